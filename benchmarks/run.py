"""How fast ptcollect is, beside what else one would use and beside what the machine and the link allow.

    sudo python benchmarks/run.py --json benchmarks/results/NAME.json     # everything, about 12 minutes
    sudo python benchmarks/run.py --quick                                 # less of everything, 2 minutes
    python benchmarks/run.py --links loopback                             # without root
    sudo python benchmarks/run.py --only dense training --links 200mbit
    python benchmarks/run.py --only tuning --links loopback               # bucket sizes and buckets in flight

See README.md beside this file for what is measured and how; `report.py` makes docs/performance.md from the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import netlab
from figures import Results, Row, in_unit, machine, ratio
from goals import judge

HERE = Path(__file__).parent
SHAPED_BYTES = 1e6
"""What is sent behind a link below this passes as a burst, so that its rate says little."""
KIB, MIB = 2**10, 2**20

IMPORT_TIMER = """
from time import perf_counter
start = perf_counter()
import torch
middle = perf_counter()
import ptcollect
print(middle - start, perf_counter() - middle)
"""


@dataclass(frozen=True)
class Choice:
    """What the command line chose."""

    links: Sequence[str]
    quick: bool
    tcp: str | None
    repeats_scale: float
    deadline: float
    skipped: list[str] = field(default_factory=list)
    """What was not measured, and why."""

    def seconds(self, most: float) -> float:
        """Time for one scenario's rounds."""
        return most * self.repeats_scale

    def left(self) -> float:
        """Seconds until everything must have ended."""
        return self.deadline - time.monotonic()


class OutOfTimeError(Exception):
    """The whole run has taken as long as it may."""


# Scenarios: each yields rows, one launch at a time ------------------------------------------------------------------


def sizes(choice: Choice) -> Iterator[list[Row]]:
    """Dense sync by size."""
    whole = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 32 * MIB, 128 * MIB]
    for link in choice.links:
        quick = [4 * KIB, 64 * KIB, MIB] + ([32 * MIB] if link == "loopback" else [])
        seconds = choice.seconds(30 if link == "200mbit" else 20)
        yield _on_ranks("sizes", link, 4, choice, seconds=seconds, sizes=quick if choice.quick else whole)


def dense(choice: Choice) -> Iterator[list[Row]]:
    """25 MB of a transformer's gradients."""
    for link in choice.links:
        yield _on_ranks("dense", link, 4, choice, seconds=choice.seconds(25 if link == "200mbit" else 10))


def worlds(choice: Choice) -> Iterator[list[Row]]:
    """The same on other numbers of ranks."""
    for world in (2, 8):
        for link in choice.links:
            if link != "1gbit" and not (choice.quick and (link != "loopback" or world == 8)):
                yield _on_ranks("dense", link, world, choice, seconds=choice.seconds(10))


def small(choice: Choice) -> Iterator[list[Row]]:
    """200 leaves of 1 KB."""
    for link in choice.links:
        if link != "1gbit":
            yield _on_ranks("small", link, 4, choice, seconds=choice.seconds(8))


def compression(choice: Choice) -> Iterator[list[Row]]:
    """Error feedback around codecs and low rank, behind the slowest link."""
    link = _slowest(choice.links)
    if not choice.quick and (link != "loopback" or len(choice.links) == 1):
        yield _on_ranks("compression", link, 4, choice, seconds=choice.seconds(12))


def training(choice: Choice) -> Iterator[list[Row]]:
    """Whole steps of DDP and without it."""
    for link in [_slowest(choice.links)] if choice.quick else choice.links:
        yield _on_ranks("training", link, 4, choice, seconds=choice.seconds(30 if link == "200mbit" else 12))


def hierarchical(choice: Choice) -> Iterator[list[Row]]:
    """Two nodes with one uplink each, where links are shaped at all."""
    if any(link != "loopback" for link in choice.links) and not choice.quick:
        yield _on_ranks("hierarchical", "100mbit", 4, choice, seconds=choice.seconds(12))


def memory(choice: Choice) -> Iterator[list[Row]]:
    """Peak memory per pipeline."""
    if not choice.quick:
        yield _on_ranks("memory", "loopback", 4, choice, seconds=0)


def tuning(choice: Choice) -> Iterator[list[Row]]:
    """Every choice of bucket size and number of buckets in flight; only when asked for."""
    for link in choice.links:
        yield _on_ranks("tuning", link, 4, choice, seconds=choice.seconds(40))


def overhead(choice: Choice) -> Iterator[list[Row]]:
    """Python's share of a call: a transport that answers at once."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable, str(HERE / "overhead.py"), str(choice.seconds(12)), str(out)]
        _run_alone(command, choice)
        yield [_row("overhead", "", 4, each) for each in json.loads(out.read_text())]


def codecs(choice: Choice) -> Iterator[list[Row]]:
    """The codecs alone, in copies of what they pack."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        names = ["--only", "bf16", "int8", "sign", "topk(1 %)"] if choice.quick else []
        repeats = ["--repeats", "5" if choice.quick else "11"]
        _run_alone([sys.executable, str(HERE / "codec_speed.py"), *names, *repeats, "--json", str(out)], choice)
        measured = json.loads(out.read_text())["rows"]
    for each in measured:
        moved = _moved(each["codec"], each["operation"])
        key = f"{each['codec']} {each['operation']}"
        rows.append(
            Row(
                "codecs",
                "",
                1,
                32 * MIB,
                key,
                key,
                "copies",
                each["samples"],
                "",
                moved,
                "bytes moved / memory bandwidth",
            )
        )
    yield rows


def _moved(codec: str, operation: str) -> float | None:
    """Bytes that must be read and written, over those of a copy of the numbers; None for codecs not known here."""
    share = WIRE_SHARE.get(codec)
    if share is None:
        return None
    if operation == "add":  # what it adds to is read too, as far as the packet reaches
        return share / 2 + (0.01 if "(1 %" in codec else 1.0)
    return (1 + share) / 2


WIRE_SHARE = {
    "bf16": 1 / 2,
    "fp16": 1 / 2,
    "fp8": 1 / 4,
    "int8": 1 / 4 + 1 / 256,
    "int8 stochastic": 1 / 4 + 1 / 256,
    "int4": 1 / 8 + 1 / 256,
    "int4 stochastic": 1 / 8 + 1 / 256,
    "sign": 1 / 32,
    "ternary": 1 / 16,
    "ternary stochastic": 1 / 16,
    "topk(1 %)": 0.02,
    "topk(1 %, int8)": 0.0125,
    "randk(1 %)": 0.01,
}
"""Bytes of a packet over those of the float32 numbers in it, to the precision of a limit."""


def import_time(choice: Choice) -> Iterator[list[Row]]:
    """What `import ptcollect` adds to `import torch`, each time in a new process."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    pairs = [
        tuple(map(float, subprocess.check_output([sys.executable, "-c", IMPORT_TIMER], text=True, env=env).split()))
        for _ in range(4 if choice.quick else 8)
    ][1:]  # the first one may compile
    torch_seconds, ours = map(list, zip(*pairs, strict=True))
    yield [
        Row("import", "", 1, 0, "torch", "import torch", "s", torch_seconds, "torch"),
        Row("import", "", 1, 0, "ptcollect", "import ptcollect, after torch", "s", ours, "torch"),
    ]


def hooks(choice: Choice) -> Iterator[list[Row]]:
    """Which PowerSGD hooks survive 20 steps under DDP on 4 ranks."""
    if choice.quick:
        return
    from surviving_hooks import CASES, HOOKS, STEPS, outcome

    rows = []
    for case in CASES:
        for hook, title in HOOKS.items():
            steps, story = outcome(hook, case, limit=min(20.0, choice.left()))
            rows.append(
                Row(
                    "hooks",
                    "loopback",
                    4,
                    0,
                    f"{hook}, {case}",
                    f"{title}, {case}",
                    "steps",
                    [float(steps)],
                    note=story,
                )
            )
    yield [replace(row, limit=float(STEPS), limit_is="steps asked for") for row in rows]


SCENARIOS: dict[str, Callable[[Choice], Iterator[list[Row]]]] = {
    "sizes": sizes,
    "dense": dense,
    "worlds": worlds,
    "small": small,
    "compression": compression,
    "training": training,
    "hierarchical": hierarchical,
    "memory": memory,
    "overhead": overhead,
    "codecs": codecs,
    "import": import_time,
    "hooks": hooks,
    "tuning": tuning,
}


# One launch ---------------------------------------------------------------------------------------------------------


def _on_ranks(scenario: str, link: str, world: int, choice: Choice, **settings: Any) -> list[Row]:
    """The rows of one scenario on the ranks of one network."""
    if choice.left() < 10:
        raise OutOfTimeError
    shown = f"{scenario}, {link}, {world} ranks"
    print(f"{shown} ...", end=" ", flush=True)
    begin = time.monotonic()
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # namespaces have no host names, which torch warns of
    if scenario == "memory":
        env["MALLOC_MMAP_THRESHOLD_"] = "65536"  # see memory.py
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        chosen = json.dumps({"link": link, **settings})
        command = [sys.executable, str(HERE / "rank_main.py"), scenario, chosen, str(out)]
        try:
            with _network(scenario, link, world, choice.tcp) as net:
                net.run(command, min(200.0, choice.left()), env)
        except netlab.NetlabError as error:
            print("failed", flush=True)
            choice.skipped.append(f"{shown}: {error}")
            return []
        measured = json.loads(out.read_text())
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    return _limited([_row(scenario, link, world, each) for each in measured], measured)


def _network(
    scenario: str, link: str, world: int, tcp: str | None
) -> contextlib.AbstractContextManager[netlab.Network]:
    if scenario == "hierarchical":
        return netlab.node_network(2, 2, link, tcp)
    return netlab.shaped_network(world, netlab.link_rate(link), tcp)


def _run_alone(command: Sequence[str], choice: Choice) -> None:
    """Run one process without a network."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, timeout=max(1.0, choice.left()))


def _row(scenario: str, link: str, world: int, each: dict[str, Any]) -> Row:
    unit = "B" if scenario == "memory" else "s"
    return Row(scenario, link, world, each["size"], each["key"], each["title"], unit, each["samples"], each["baseline"])


def _limited(rows: list[Row], measured: list[dict[str, Any]]) -> list[Row]:
    """The rows with what the link, or else memory, allows at best."""
    sent = {(each["key"], each["size"]): each["sent_bytes"] for each in measured}
    out = []
    for row in rows:
        same = {other.key: other for other in rows if other.group == row.group}
        crossing = sent[row.key, row.size]
        limit, what = None, ""
        if row.link == "loopback":
            if "copy" in same and crossing and row.key != "copy":
                # In and out of a socket: two copies of what one rank sends, while all others do the same.
                limit, what = 2 * crossing / row.size * same["copy"].median, "bytes sent, copied twice in memory"
        elif crossing and crossing >= SHAPED_BYTES:
            limit, what = crossing * 8 / netlab.bits_per_second(row.link), "bytes sent / link rate"
        if "alone" in same and row.key != "alone" and (limit or 0) < same["alone"].median:
            limit, what = same["alone"].median, "computing alone"
        out.append(replace(row, limit=limit, limit_is=what))
    return out


def _slowest(links: Sequence[str]) -> str:
    return min(links, key=lambda link: netlab.bits_per_second(link) if link != "loopback" else float("inf"))


# Run ----------------------------------------------------------------------------------------------------------------


def measure(names: Sequence[str], choice: Choice, tcp: str) -> Results:
    """The rows of the chosen scenarios; one that fails or finds no time is noted, and the others go on."""
    results = Results(machine(tcp), [], choice.skipped)
    for name in names:
        try:
            if name in ("overhead", "codecs", "import", "hooks"):
                print(f"{name} ...", flush=True)
            for rows in SCENARIOS[name](choice):
                results.rows.extend(rows)
        except OutOfTimeError:
            results.skipped.append(f"{name}: out of time")
        except (netlab.NetlabError, subprocess.SubprocessError) as error:
            print("failed", flush=True)
            results.skipped.append(f"{name}: {error}")
    return results


def show(results: Results) -> None:
    """Print every row, then every goal."""
    for (scenario, link, world, size), rows in results.groups().items():
        what = f", {size} bytes" if size else ""
        print(f"\n{scenario}{f', {link}' if link else ''}{f', {world} ranks' if world > 1 else ''}{what}")
        same = {row.key: row for row in rows}
        for row in rows:
            base = same.get(row.baseline)
            quotient = str(ratio(row.samples, base.samples)) if base is not None and base is not row else ""
            used = "" if row.reached is None else f"{row.reached:.1%} of the limit"
            print(f"  {in_unit(row.median, row.unit):>10}  {quotient:>20}  {used:>20}  {row.note or row.title}")
    verdicts = judge(results)
    print(f"\ngoals: {sum(v.met for v in verdicts)} of {len(verdicts)} met")
    for verdict in verdicts:
        print(f"  {'met   ' if verdict.met else 'MISSED'}  {verdict.got:6.3f}  {verdict.goal.text}")
    for what in results.skipped:
        print(f"not measured: {what}")


def main() -> None:
    """Run the chosen scenarios, print what they measured, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name for name in SCENARIOS if name != "tuning"]
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=every, help="default: all but tuning")
    links = "loopback, or as tc writes it (default: loopback 200mbit 1gbit; with --quick not 200mbit)"
    parser.add_argument("--links", nargs="+", help=links)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, 2 minutes")
    parser.add_argument("--minutes", type=float, help="when to stop (default 13, with --quick 2)")
    parser.add_argument("--tcp", default="reno", help="congestion control on shaped links, or `machine` for its own")
    parser.add_argument("--json", type=Path, help="also write all samples here")
    args = parser.parse_args()
    netlab.exit_on_sigterm()
    minutes = args.minutes or (2 if args.quick else 13)
    choice = Choice(
        links=args.links or ["loopback", *["200mbit"] * (not args.quick), "1gbit"],
        quick=args.quick,
        tcp=None if args.tcp == "machine" else args.tcp,
        repeats_scale=0.15 if args.quick else 1.0,
        deadline=time.monotonic() + 60 * minutes,
    )
    begin = time.monotonic()
    try:
        results = measure(args.only, choice, args.tcp)
    except KeyboardInterrupt:
        sys.exit(130)
    show(results)
    print(f"{time.monotonic() - begin:.0f} s in all")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results.as_json(), separators=(",", ":")) + "\n")
    sys.exit(1 if results.skipped else 0)


if __name__ == "__main__":
    main()
