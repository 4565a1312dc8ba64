"""Does anything grow or slow down over a long time? Mixed pipelines on real ranks, with errors in between.

    python benchmarks/soak.py --minutes 30 --ranks 4 --json benchmarks/results/soak.json

Every round runs each pipeline once on every rank. After every tenth round one rank brings another tree, or raises in
the middle of a call, which is an error on all ranks, and the next call works again. Now and then each rank notes its
resident memory, open descriptors and threads, when it has collected garbage and malloc has given back what is free:
what malloc keeps for later would look like a leak. In the end: the slope of memory with a 95 % interval (`trend.py`),
and how the medians of times in the last third compare with the first.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
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
from trend import growth, slope

import ptcollect as pc

ERROR_EVERY = 10

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


def fail(rank: int, turn: int) -> None:
    """An error on all ranks: rank 1 brings a leaf of another shape, or raises in the middle of a call."""
    mismatch = turn % (2 * ERROR_EVERY) != 0
    expected: type[Exception] = pc.TreeMismatchError if mismatch else Exception
    try:
        if mismatch:
            pc.ring_reduce()({"weight": torch.ones(3 if rank == 1 else 2)})
        else:  # the engine drops its connections, and makes others for the next call
            pc.chain(pc.stateless(raise_on_rank_1), pc.ring_reduce())(torch.ones(1000))
    except expected:
        return
    raise RuntimeError("one rank was to fail, and no error came")


def raise_on_rank_1(tree: Tree) -> Tree:
    """A map that fails on one rank."""
    if dist.get_rank() == 1:
        raise RuntimeError("on purpose")
    return tree


def soak(seconds: float, out: str) -> None:
    """Run rounds for so long; every rank writes what it saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    every = runs(gradients(transformer(blocks=1, vocabulary=1024)))  # 4 MB
    # Room for all that is noted, touched in advance: a list that grows would look like a leak.
    capacity = 1000 + round(50 * seconds)
    taken = torch.zeros(capacity, len(every), dtype=torch.float64)
    levels = torch.zeros(400, 4, dtype=torch.float64)
    apart = max(1.0, seconds / 390)
    turn = noted = errors = 0
    go_on = torch.ones(1)
    begin = time.monotonic()
    while go_on and turn < capacity:
        for place, run in enumerate(every.values()):
            dist.barrier()
            start = time.perf_counter()
            run()
            taken[turn, place] = time.perf_counter() - start
        turn += 1
        if turn % ERROR_EVERY == 0:
            fail(rank, turn)
            errors += 1
        now = time.monotonic() - begin
        if now >= noted * apart and noted < len(levels):
            levels[noted] = torch.tensor([now, *level()], dtype=torch.float64)
            noted += 1
        go_on.fill_(now < seconds)
        dist.broadcast(go_on, 0)
    seen = {"taken": dict(zip(every, taken[:turn].t().tolist(), strict=True)), "levels": levels[:noted].tolist()}
    Path(f"{out}.{rank}").write_text(json.dumps({**seen, "errors": errors}))
    dist.barrier()
    dist.destroy_process_group()


def level() -> tuple[int, int, int]:
    """Bytes of resident memory, open descriptors, threads."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))  # noqa: PTH208
    return pages * os.sysconf("SC_PAGE_SIZE"), descriptors, threads


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
        "descriptors": growth([[row[2] for row in each["levels"]] for each in ranks]),
        "threads": growth([[row[3] for row in each["levels"]] for each in ranks]),
        "pipelines": pipelines,
        "levels": [thinned(each["levels"]) for each in ranks],
    }


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
