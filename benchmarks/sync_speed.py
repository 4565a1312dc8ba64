"""How fast the pipelines are, as ratios to plain torch.distributed measured in the same run.

    python benchmarks/sync_speed.py                                        # everything; shaped links need root
    python benchmarks/sync_speed.py --scenario dense --rates 200mbit loopback --repeats 7 --json out.json --markdown
    python benchmarks/sync_speed.py --scenario tuning --rates loopback --caps 1MiB 4MiB --in-flight 2 4

See README.md beside this file for what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import netlab

WORLD_SIZE = 4
TIMEOUT_SECONDS = 300.0
SHAPED_BYTES = 1e6
RANKS = Path(__file__).with_name("ranks.py")

IMPORT_TIMER = """
from time import perf_counter
start = perf_counter()
import torch
middle = perf_counter()
import ptcollect
print(middle - start, perf_counter() - middle)
"""

# The largest ratio that is good enough, by scenario and setting.
GOALS: dict[str, dict[str, float]] = {
    "dense shaped": {"ring": 1.0, "ring_bf16": 0.53},
    "dense loopback": {"ring": 1.15},
    "small loopback": {"ring": 1.5, "all_to_all": 1.5},
    "compression shaped": {"int8": 0.30, "int4": 0.18, "low_rank": 0.14, "topk": 0.20},
    "import": {"ptcollect": 0.06},  # 50 ms beside the 0.8 to 0.9 s of torch
    "memory": {"donated": 1.1},
}


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    rates: Sequence[str]
    repeats: int
    caps: Sequence[str]
    in_flight: Sequence[int]
    tcp: str | None


@dataclass(frozen=True)
class Row:
    """One line of the table: a median, and the ratio to the baseline of the same round."""

    what: str
    value: float
    unit: str
    ratio: float
    lowest: float
    highest: float
    goal: float | None
    link_used: float | None  # what bytes / rate alone would take, as a share of the median
    samples: list[float]

    @property
    def met(self) -> bool | None:
        """Whether the ratio reaches its goal; None without a goal."""
        return None if self.goal is None else self.ratio <= self.goal


# Scenarios ----------------------------------------------------------------------------------------------------------


def dense(settings: Settings) -> list[Row]:
    """25 MB of a transformer's gradients, behind each kind of link."""
    return _timed("dense", settings)


def small(settings: Settings) -> list[Row]:
    """200 leaves of 1 KB, behind each kind of link."""
    return _timed("small", settings)


def compression(settings: Settings) -> list[Row]:
    """The dense tree through error feedback and compression, behind each kind of link."""
    return _timed("compression", settings)


def tuning(settings: Settings) -> list[Row]:
    """The dense tree with other bucket sizes and other numbers of buckets in flight."""
    return _timed("tuning", settings)


def memory(settings: Settings) -> list[Row]:
    """Peak memory of a donated call, against the bytes of the buckets in flight."""
    # Without this, malloc would keep freed tensors and the next one would not show in resident memory.
    measured = _on_ranks("memory", None, settings, env={"MALLOC_MMAP_THRESHOLD_": "65536"})
    rows: list[Row] = []
    baseline: list[float] = []
    for each in measured:
        baseline = each["samples"] if each["key"] == "in_flight" else baseline
        goal = GOALS["memory"].get(each["key"])
        rows.append(_row(f"memory: {each['title']}", each["samples"], baseline, "MB", goal))
    return rows


def import_time(settings: Settings) -> list[Row]:
    """What `import ptcollect` adds to `import torch`, each time in a new process."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    pairs = [
        tuple(map(float, subprocess.check_output([sys.executable, "-c", IMPORT_TIMER], text=True, env=env).split()))
        for _ in range(settings.repeats + 1)
    ][1:]  # the first one may compile
    torch_seconds, ours = map(list, zip(*pairs, strict=True))
    return [
        _row("import torch (baseline)", torch_seconds, torch_seconds, "ms"),
        _row("import ptcollect, after torch", ours, torch_seconds, "ms", GOALS["import"]["ptcollect"]),
    ]


SCENARIOS = {
    "dense": dense,
    "small": small,
    "compression": compression,
    "import": import_time,
    "memory": memory,
    "tuning": tuning,
}
FIGURES = ["dense", "small", "compression", "import", "memory"]


def _timed(scenario: str, settings: Settings) -> list[Row]:
    rows = []
    for rate in settings.rates:
        link = netlab.link_rate(rate)
        goals = GOALS.get(f"{scenario} {'shaped' if link else 'loopback'}", {})
        measured = _on_ranks(scenario, link, settings)
        for each in measured:
            limit = _link_seconds(each["sent_bytes"], link)
            what = f"{scenario} {rate}: {each['title']}"
            rows.append(_row(what, each["samples"], measured[0]["samples"], "ms", goals.get(each["key"]), limit))
    return rows


def _link_seconds(sent_bytes: float, link: str | None) -> float | None:
    """The least time a link needs; None where nothing is shaped, or so little is sent that much passes as a burst."""
    if link is None or sent_bytes < SHAPED_BYTES:
        return None
    return sent_bytes * 8 / netlab.bits_per_second(link)


def _on_ranks(
    scenario: str, rate: str | None, settings: Settings, env: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """What the ranks measured, as rank 0 wrote it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable, str(RANKS), scenario, "--out", str(out), "--rounds", str(settings.repeats)]
        command += ["--caps", *settings.caps, "--in-flight", *map(str, settings.in_flight)]
        netlab.run_ranks(command, WORLD_SIZE, rate, TIMEOUT_SECONDS, env, settings.tcp)
        measured: list[dict[str, Any]] = json.loads(out.read_text())
        return measured


def _row(
    what: str,
    samples: list[float],
    baseline: list[float],
    unit: str,
    goal: float | None = None,
    limit: float | None = None,
) -> Row:
    """Compare round by round: what slows one round down slows both."""
    ratios = [ours / theirs for ours, theirs in zip(samples, baseline, strict=True)]
    scale = {"ms": 1e3, "MB": 1e-6}[unit]
    middle = median(samples)
    return Row(
        what=what,
        value=middle * scale,
        unit=unit,
        ratio=median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        goal=goal,
        link_used=None if limit is None else limit / middle,
        samples=[sample * scale for sample in samples],
    )


# Table --------------------------------------------------------------------------------------------------------------

HEADER = ("what", "median", "ratio", "min-max", "goal", "met?", "link used")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.what,
        f"{row.value:.{0 if row.value >= 100 else 1}f} {row.unit}",
        f"{row.ratio:.2f}",
        f"{row.lowest:.2f}-{row.highest:.2f}",
        "" if row.goal is None else f"<= {row.goal:.2f}",
        {None: "", True: "yes", False: "NO"}[row.met],
        "" if row.link_used is None else f"{row.link_used:.0%}",
    )


def format_table(rows: Iterable[Row], *, markdown: bool) -> str:
    """The rows as an aligned table, plain or in Markdown."""
    lines = [HEADER, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in aligned)
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [aligned[0], rule, *aligned[1:]])


def as_json(rows: Sequence[Row]) -> str:
    """The rows with every sample, and where they were measured."""
    machine = {"python": platform.python_version(), "torch": version("torch"), "cpus": os.cpu_count()}
    return json.dumps({**machine, "rows": [{**asdict(row), "met": row.met} for row in rows]}, indent=1)


# Run ----------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the chosen scenarios and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=FIGURES, help="default: all but tuning")
    parser.add_argument(
        "--rates", nargs="+", default=["200mbit", "loopback"], help="links, as tc writes them, or `loopback`"
    )
    parser.add_argument("--repeats", type=int, default=7, help="rounds after the warm-up (default 7)")
    parser.add_argument("--caps", nargs="+", default=["1MiB", "4MiB", "25MiB"], help="bucket sizes of tuning, memory")
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 2, 4, 8], help="buckets in flight of tuning")
    parser.add_argument(
        "--tcp", default="reno", help="congestion control behind shaped links, or `machine` for its own"
    )
    parser.add_argument("--json", type=Path, help="also write the rows and all samples here")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args()
    netlab.exit_on_sigterm()
    tcp = None if args.tcp == "machine" else args.tcp
    settings = Settings(args.rates, args.repeats, args.caps, args.in_flight, tcp)
    try:
        rows = [row for scenario in args.scenario for row in SCENARIOS[scenario](settings)]
    except netlab.NetlabError as error:
        sys.exit(f"sync_speed: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(format_table(rows, markdown=args.markdown))
    if args.json:
        args.json.write_text(as_json(rows))


if __name__ == "__main__":
    main()
