"""Does anything grow or slow down over a long time? Mixed pipelines on real ranks, with errors in between.

    python benchmarks/soak.py --minutes 30 --ranks 4 --json benchmarks/results/soak.json

Every round runs each pipeline once on every rank; every tenth round one rank brings another tree, which is an error on
all ranks, and the next call works again. Once a second each rank notes its resident memory, open descriptors and
threads. In the end: the slope of memory by least squares over the last two thirds, with a 95 % interval from blocks of
the residuals, since neighbouring samples are alike; and how the medians of the last third compare with the first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import netlab
import torch
import torch.distributed as dist
from figures import machine
from ranks import Carried, Tree, gradients, transformer
from torch import nn

import ptcollect as pc

ERROR_EVERY = 10
BLOCKS = 20

Run = Callable[[], object]


# One rank -----------------------------------------------------------------------------------------------------------


def runs(tree: Tree) -> dict[str, Run]:
    """What every round runs, by name; each ends with nothing under way."""
    feedback, buckets = pc.error_feedback(), pc.bucketize("1MiB")
    ring = pc.chain(buckets, pc.ring_reduce())
    direct = pc.all_to_all_avg()
    int8 = Carried(pc.chain(feedback, buckets, pc.compress("int8"), pc.ring_reduce()), tree)
    low_rank = Carried(pc.chain(feedback, pc.low_rank(4), pc.bucketize(), pc.ring_reduce()), tree)
    topk = Carried(pc.chain(feedback, buckets, pc.compress(pc.codecs.topk(0.01)), pc.all_gather_avg()), tree)
    return {
        "ring in buckets": lambda: ring(tree),
        "all_to_all": lambda: direct(tree),
        "native": lambda: pc.all_reduce()(tree),
        "int8, error feedback": lambda: int8(tree),
        "low rank, error feedback": lambda: low_rank(tree),
        "topk, error feedback": lambda: topk(tree),
        "start, wait": lambda: ring.start(tree).wait(),
        "overlap": overlapped(ring),
        "DDP hook": hooked(pc.chain(feedback, buckets, pc.compress("bf16"), pc.ring_reduce())),
    }


def model() -> nn.Module:
    """Half a million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256))


def overlapped(pipeline: pc.Pipeline) -> Run:
    """Training steps under `pc.overlap`."""
    net = model()
    handle = pc.overlap(pipeline, net)
    x = torch.randn(8, 256)

    def run() -> None:
        net.zero_grad()
        with handle:
            net(x).square().mean().backward()

    return run


def hooked(pipeline: pc.Pipeline) -> Run:
    """Training steps under DDP with a hook."""
    ddp = nn.parallel.DistributedDataParallel(model())
    ddp.register_comm_hook(None, pc.as_ddp_hook(pipeline, ddp))
    x = torch.randn(8, 256)

    def run() -> None:
        ddp.zero_grad()
        ddp(x).square().mean().backward()

    return run


def bring_another_tree(rank: int) -> None:
    """An error on all ranks: one of them brings a leaf of another shape."""
    odd = {"weight": torch.ones(3 if rank == 1 else 2)}
    try:
        pc.ring_reduce()(odd)
    except pc.TreeMismatchError:
        return
    raise RuntimeError("trees differ, and no error came")


def soak(seconds: float, out: str) -> None:
    """Run rounds for so long; every rank writes what it saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    tree = gradients(transformer(blocks=1, vocabulary=1024))  # 4 MB
    every = runs(tree)
    taken: dict[str, list[float]] = {name: [] for name in every}
    levels: list[tuple[float, ...]] = []
    errors = 0
    begin = time.monotonic()
    noted = -math.inf
    go_on = torch.ones(1)
    turn = 0
    while True:
        for name, run in every.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
        turn += 1
        if turn % ERROR_EVERY == 0:
            bring_another_tree(rank)
            errors += 1
        now = time.monotonic() - begin
        if now - noted >= 1:
            noted = now
            levels.append((now, *level()))
        go_on.fill_(1.0 if now < seconds else 0.0)
        dist.broadcast(go_on, 0)
        if not go_on:
            break
    Path(f"{out}.{rank}").write_text(json.dumps({"taken": taken, "levels": levels, "errors": errors}))
    dist.barrier()
    dist.destroy_process_group()


def level() -> tuple[float, float, float]:
    """Bytes of resident memory, open descriptors, threads of the interpreter."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208  (the listing itself is one)
    return float(pages * os.sysconf("SC_PAGE_SIZE")), float(descriptors), float(threading.active_count())


# What the ranks saw -------------------------------------------------------------------------------------------------


def summary(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the run; the worst rank's where ranks differ."""
    slopes = [slope([row[0] for row in each["levels"]], [row[1] for row in each["levels"]]) for each in ranks]
    pipelines = {}
    for name in ranks[0]["taken"]:
        samples = [max(each) for each in zip(*(rank["taken"][name] for rank in ranks), strict=True)]
        third = max(1, len(samples) // 3)
        first, last = median(samples[:third]), median(samples[-third:])
        pipelines[name] = {"calls": len(samples), "first_third": first, "last_third": last, "drift": last / first}
    return {
        "ranks": len(ranks),
        "errors_recovered": ranks[0]["errors"],
        "memory_slope": max(slopes, key=lambda each: each["mb_per_hour"]),
        "memory_slopes": slopes,
        "descriptors": growth(ranks, 2),
        "threads": growth(ranks, 3),
        "pipelines": pipelines,
        "levels": [thinned(each["levels"]) for each in ranks],
    }


def slope(seconds: Sequence[float], memory: Sequence[float]) -> dict[str, float]:
    """MB/hour over the last two thirds, and a 95 % interval from the scatter of block means about the line."""
    begin = len(seconds) // 3
    x, y = list(seconds[begin:]), [value / 1e6 for value in memory[begin:]]
    blocks = max(3, min(BLOCKS, len(x) // 5))
    bounds = [len(x) * i // blocks for i in range(blocks + 1)]
    means = [(sum(x[a:b]) / (b - a), sum(y[a:b]) / (b - a)) for a, b in itertools.pairwise(bounds) if b > a]
    n = len(means)
    mean_x, mean_y = sum(a for a, _ in means) / n, sum(b for _, b in means) / n
    spread = sum((a - mean_x) ** 2 for a, _ in means)
    if n < 3 or spread == 0:
        return {"mb_per_hour": math.nan, "low": math.nan, "high": math.nan}
    rise = sum((a - mean_x) * (b - mean_y) for a, b in means) / spread
    rest = sum((b - mean_y - rise * (a - mean_x)) ** 2 for a, b in means)
    half = 2.1 * math.sqrt(rest / (n - 2) / spread)  # Student's t for about 18 degrees of freedom
    return {"mb_per_hour": rise * 3600, "low": (rise - half) * 3600, "high": (rise + half) * 3600}


def growth(ranks: Sequence[dict[str, Any]], column: int) -> dict[str, float]:
    """The medians of the second tenth and the last tenth, on the rank where it grew most."""
    found = []
    for each in ranks:
        values = [row[column] for row in each["levels"]]
        tenth = max(1, len(values) // 10)
        found.append((median(values[tenth : 2 * tenth] or values), median(values[-tenth:])))
    first, last = max(found, key=lambda pair: pair[1] - pair[0])
    return {"first": first, "last": last}


def thinned(levels: Sequence[Sequence[float]]) -> list[list[float]]:
    """At most 120 of the samples, evenly."""
    step = max(1, len(levels) // 120)
    return [[round(value, 1) for value in row] for row in levels[::step]]


# Run ----------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the ranks, print what they saw, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--on-rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_rank:
        soak(60 * args.minutes, args.on_rank)
        return
    netlab.exit_on_sigterm()
    about = machine("machine")
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rank"
        command = [sys.executable, __file__, "--minutes", str(args.minutes), "--on-rank", out]
        try:
            netlab.run_ranks(command, args.ranks, None, 60 * args.minutes + 120)
        except netlab.NetlabError as error:
            sys.exit(f"soak: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
        seen = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(args.ranks)]
    found = {"machine": about, "minutes": args.minutes, **summary(seen)}
    for each in found["memory_slopes"]:
        print(f"memory {each['mb_per_hour']:+.1f} MB/hour, 95 % between {each['low']:+.1f} and {each['high']:+.1f}")
    print(f"descriptors {found['descriptors']}, threads {found['threads']}, errors {found['errors_recovered']}")
    for name, each in found["pipelines"].items():
        shown = f"{each['first_third'] * 1e3:.1f} -> {each['last_third'] * 1e3:.1f} ms, x {each['drift']:.2f}"
        print(f"  {name:26} {each['calls']} calls, {shown}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
