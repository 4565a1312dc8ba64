"""How well `plan` predicts: link and codecs are measured first, then pipelines are predicted, then timed.

    python benchmarks/plan_accuracy.py                                   # 1 Gbit/s, 200 and 50 Mbit/s; needs root
    python benchmarks/plan_accuracy.py --rates 200mbit --repeats 5 --json out.json --markdown

Four ranks behind shaped links of netlab.py synchronise the 25 MB of sync_speed.py; for hierarchical sync they are two
nodes of two that share an uplink. Nothing that a prediction rests on comes from a timed pipeline: messages between all
neighbours at once give bandwidth, latency and overhead, and codecs are timed on all ranks at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import netlab
import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ptcollect as pc

NODES, LOCAL = 2, 2
TIMEOUT_SECONDS = 230.0
GOAL = 0.10
"""How far a prediction may be from the measured median."""
MANY = 32  # small messages in a row
ROW = 1 << 18  # numbers in a chunk of a bucket; 24 of them are the tree
LONG = 2 << 20  # bytes of a long message: about what a ring of 4 sends of a bucket
LONG_ONES = 8  # of them in a row

FLAT = {
    "dense ring": pc.chain(pc.bucketize(), pc.ring_reduce()),
    "bf16": pc.chain(pc.bucketize(), pc.compress("bf16"), pc.ring_reduce()),
    "int8 + EF": pc.chain(pc.error_feedback(), pc.bucketize("4MiB"), pc.compress("int8"), pc.ring_reduce()),
    "low_rank(4) + EF": pc.chain(pc.error_feedback(), pc.low_rank(4), pc.bucketize(), pc.ring_reduce()),
}
HIERARCHICAL = {"hierarchical": pc.chain(pc.bucketize(), pc.shard("local"), pc.ring_reduce(axis="node"))}
AXES = {"node": NODES, "local": LOCAL}
SHAPES = ranks.transformer(blocks=6)


@dataclass(frozen=True)
class Row:
    """One pipeline behind one kind of link."""

    rate: str
    pipeline: str
    measured: list[float]
    """Seconds of each round, the slowest rank's."""
    predicted: float
    off: float
    """Prediction over median, less 1."""
    met: bool
    bytes: int
    exact: bool
    """Whether every rank sent as many bytes and messages as planned, in as many rounds."""
    stages: dict[str, float]


# On every rank ------------------------------------------------------------------------------------------------------


def on_rank(kind: str, rounds: int, out: Path) -> None:
    """Measure link and codecs, then time the pipelines; rank 0 writes it all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, n = dist.get_rank(), dist.get_world_size()
    if kind == "flat":
        link = {"all": measure_link((rank + 1) % n, (rank - 1) % n)}
        contenders = [ranks.Contender(name, name, carried(pipe)) for name, pipe in FLAT.items()]
    else:
        mesh = init_device_mesh("cpu", (NODES, LOCAL), mesh_dim_names=tuple(AXES))
        beside, across = rank ^ 1, (rank + LOCAL) % n
        link = {"between": measure_link(across, across), "inside": measure_link(beside, beside)}
        contenders = [ranks.Contender(name, name, partial(pipe, group=mesh)) for name, pipe in HIERARCHICAL.items()]
    to, source = (rank + 1) % n, (rank - 1) % n
    load = 0.1 * next(iter(link.values()))["bandwidth"]  # a tenth of a second
    before = measure_codecs(to, source, load)
    tree = ranks.gradients(SHAPES)
    sent = []
    for contender in contenders:
        with pc.traffic() as traffic:
            contender.run(tree)
        everyone: list[Any] = [None] * n
        dist.all_gather_object(everyone, (traffic.bytes, traffic.messages, traffic.rounds))
        sent.append(everyone)
    seconds = ranks.time_in_turn(contenders, tree, rounds, calls=1)
    after = measure_codecs(to, source, load)  # the machine may have become busier meanwhile
    speed = {
        name: [2 / (1 / a + 1 / b) for a, b in zip(pair, after[name], strict=True)] for name, pair in before.items()
    }
    if rank == 0:
        found = {"link": link, "codec_speed": speed, "seconds": seconds, "sent": sent}
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def carried(pipeline: pc.Pipeline) -> Callable[[Any], Any]:
    """The pipeline as a function, with its state carried along."""
    tree = ranks.rebuild(SHAPES, map(torch.zeros, ranks.leaves(SHAPES)))
    return ranks.Carried(pipeline, tree) if pipeline.stateful else pipeline


def measure_link(to: int, source: int) -> dict[str, float]:
    """Seconds of exchanges around, all ranks at once: one of a byte, many of a byte in a row, and a long one."""
    byte, room = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    long, long_room = torch.zeros(LONG, dtype=torch.uint8), torch.zeros(LONG, dtype=torch.uint8)

    def exchange(data: Tensor, into: Tensor, times: int) -> None:
        works = [dist.irecv(into, source) for _ in range(times)] + [dist.isend(data, to) for _ in range(times)]
        for work in works:
            assert work is not None
            work.wait()

    one = slowest(lambda: [exchange(byte, room, 1) for _ in range(20)], 5) / 20
    many = slowest(lambda: exchange(byte, room, MANY), 5)
    row = slowest(lambda: exchange(long, long_room, LONG_ONES), 3)
    overhead = max(0.0, (many - one) / (MANY - 1))
    return {
        "bandwidth": LONG_ONES * LONG / (row - one - (LONG_ONES - 1) * overhead),
        "latency": max(0.0, one - overhead),
        "message_overhead": overhead,
    }


def measure_codecs(to: int, source: int, load: float) -> dict[str, tuple[float, float]]:
    """Numbers per second, while all ranks are at it and messages travel, on as many rows as a call goes through.

    `load` is how many bytes travel meanwhile: what the kernel does for them, and that caches are cold afterwards,
    makes codecs several times slower than they are alone.
    """
    message, room = torch.zeros(int(load), dtype=torch.uint8), torch.zeros(int(load), dtype=torch.uint8)
    numbers = torch.randn(24 * ROW, generator=torch.Generator().manual_seed(dist.get_rank()))
    rows, into = numbers.split(ROW), torch.zeros_like(numbers).split(ROW)
    key = pc.codecs.Key(0, "w", 0, 0)
    speed = {}

    def rate(count: int, run: Callable[[], object]) -> float:
        return count / slowest(run, 5, beside=lambda: [dist.irecv(room, source), dist.isend(message, to)])

    for name in ("bf16", "int8"):
        codec = pc.codecs.by_name(name)
        packets = [codec.encode(row, key) for row in rows]
        encode = rate(24 * ROW, lambda codec=codec: [codec.encode(row, key) for row in rows])
        decode = rate(
            24 * ROW,
            lambda codec=codec, packets=packets: [
                codec.accumulate(packet, row, 0.5, 1.0) for packet, row in zip(packets, into, strict=True)
            ],
        )
        speed[name] = (encode, decode)
    add = rate(24 * ROW, lambda: [row.mul_(0.5).add_(other) for row, other in zip(into, rows, strict=True)])
    speed["float32"] = (1e15, add)  # what travels as it is needs no encoding
    copy = rate(24 * ROW, lambda: [row.clone() for row in rows])
    thin, other = torch.randn(256, 4), torch.randn(1024, 4)
    multiply = rate(24 * ROW * 4, lambda: [(row.abs().amax(), row.view(-1, 256) @ thin) for row in rows])
    orthonormal = rate(24 * other.numel(), lambda: [torch.linalg.qr(other).Q.contiguous() for _ in rows])
    for name, each in (("copy", copy), ("multiply", multiply), ("orthonormal", orthonormal)):
        speed[name] = (each, each)
    return speed


def slowest(run: Callable[[], object], repeats: int, beside: Callable[[], list[Any]] = list) -> float:
    """The median over repeats of the slowest rank's seconds, after one to warm up; `beside` begins what travels."""
    samples = torch.zeros(repeats + 1, dtype=torch.float64)
    for turn in range(repeats + 1):
        dist.barrier()
        works = beside()
        start = perf_counter()
        run()
        samples[turn] = perf_counter() - start
        for work in works:
            work.wait()
    dist.all_reduce(samples, op=dist.ReduceOp.MAX)
    return float(samples[1:].median())


# Prediction ---------------------------------------------------------------------------------------------------------


def measure(rate: str, tcp: str | None, rounds: int) -> list[Row]:
    """Both networks at one rate."""
    flat = netlab.shaped_network(NODES * LOCAL, rate, tcp)
    rows = []
    for kind, network in (("flat", flat), ("nodes", netlab.node_network(NODES, LOCAL, rate, tcp))):
        found = _on_network(kind, network, rounds)
        link, world = _link(kind, found["link"])
        print(f"{rate}, {kind}: {link}", file=sys.stderr)
        print(f"  numbers/s: {found['codec_speed']}", file=sys.stderr)
        pipelines = FLAT if kind == "flat" else HIERARCHICAL
        for (name, pipeline), seconds, sent in zip(pipelines.items(), found["seconds"], found["sent"], strict=True):
            cost = pc.plan(pipeline, SHAPES, world=world, link=link, codec_speed=found["codec_speed"])
            planned = [list(each) for each in zip(cost.bytes, cost.messages, cost.rounds, strict=True)]
            off = cost.seconds / median(seconds) - 1
            exact = planned == sent
            rows.append(
                Row(rate, name, seconds, cost.seconds, off, abs(off) <= GOAL, max(cost.bytes), exact, cost.stages)
            )
    return rows


def _on_network(kind: str, network: AbstractContextManager[netlab.Network], rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, network as net:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--repeats", str(rounds), "--on-rank", kind, "--out", str(out)]
        net.run(command, TIMEOUT_SECONDS)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def _link(kind: str, found: dict[str, dict[str, float]]) -> tuple[pc.Link, Any]:
    if kind == "flat":
        return pc.Link(**found["all"]), NODES * LOCAL
    between = dict(found["between"])
    between["bandwidth"] *= LOCAL  # the ranks of a node sent at the same time
    between["message_overhead"] /= LOCAL
    return pc.two_level(pc.Link(**found["inside"]), pc.Link(**between), LOCAL), AXES


# Table --------------------------------------------------------------------------------------------------------------

HEADER = ("rate", "pipeline", "measured", "min-max", "predicted", "off", "within 10 %?", "MB", "counts exact?")


def format_table(rows: Sequence[Row], *, markdown: bool) -> str:
    """The rows as a table, plain or in Markdown."""
    lines: list[Sequence[str]] = [HEADER]
    for row in rows:
        ms = [seconds * 1e3 for seconds in row.measured]
        lines.append(
            (
                row.rate,
                row.pipeline,
                f"{median(ms):.0f} ms",
                f"{min(ms):.0f}-{max(ms):.0f}",
                f"{row.predicted * 1e3:.0f} ms",
                f"{row.off:+.1%}",
                "yes" if row.met else "NO",
                f"{row.bytes / 1e6:.1f}",
                "yes" if row.exact else "NO",
            )
        )
    if markdown:
        lines.insert(1, (":--", ":--", *["--:"] * (len(HEADER) - 2)))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main() -> None:
    """Measure, predict, time, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit", "50mbit"], help="links, as tc writes them")
    parser.add_argument(
        "--tcp", choices=("reno", "bbr", "cubic", "machine"), default="reno", help="congestion control (default reno)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the warm-up (default 5)")
    parser.add_argument("--json", type=Path, help="also write the rows and all samples here")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--on-rank", choices=("flat", "nodes"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_rank:
        on_rank(args.on_rank, args.repeats, args.out)
        return
    netlab.exit_on_sigterm()
    tcp = None if args.tcp == "machine" else args.tcp
    try:
        rows = [row for rate in args.rates for row in measure(rate, tcp, args.repeats)]
    except netlab.NetlabError as error:
        sys.exit(f"plan_accuracy: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(format_table(rows, markdown=args.markdown))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
