"""What every rank of `sync_speed.py` runs: check that the contenders agree, then time or weigh them in turn.

    python ranks.py {dense,small,compression,tuning,memory} --rounds 7 --out result.json

Needs the environment that `netlab.py` gives. Rank 0 writes a list of `Measured` as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ptcollect as pc
from ptcollect import schedule

Tree = dict[str, Any]  # nested dicts of tensors (or of shapes) by name

LOSSLESS, BF16 = 1e-5, 2e-2  # how far a result may be from the baseline's, relative to the leaf's largest value


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    rounds: int
    caps: Sequence[str]
    in_flight: Sequence[int]


@dataclass(frozen=True)
class Contender:
    """One way to average a tree; `prepare` is not timed, and without a tolerance the result is not checked."""

    key: str
    title: str
    run: Callable[[Any], Any]
    prepare: Callable[[Tree], Any] = lambda tree: tree
    tolerance: float | None = LOSSLESS


class Carried:
    """A pipeline with state, called like a function: each call goes on from the state that the last one left."""

    def __init__(self, pipeline: pc.Pipeline, like: Tree) -> None:
        self.pipeline = pipeline
        self.state = pipeline.init(like)

    def __call__(self, tree: Tree) -> Tree:
        result, self.state = self.pipeline.update(tree, self.state)
        return result  # type: ignore[no-any-return]

    def kept_back(self, tree: Tree) -> list[torch.Tensor]:
        """What error feedback keeps for the next step, as the mean over the ranks, for the leaves of `tree`."""
        residual = pc.ring_reduce()(self.state["error_feedback"]["residual"])
        return [residual[path] for path in paths(tree)]


@dataclass(frozen=True)
class Measured:
    """One number per round, the worst over the ranks: seconds or bytes. The first of a list is the baseline."""

    key: str
    title: str
    samples: list[float]
    sent_bytes: float | None = None  # by one rank in one call, headers left out


# Scenarios ----------------------------------------------------------------------------------------------------------


def dense(settings: Settings) -> list[Measured]:
    """25 MB of a transformer's gradients: pipelines against flatten, all_reduce, divide, unflatten."""
    bf16 = pc.chain(pc.bucketize(), pc.compress("bf16"), pc.ring_reduce())
    contenders = [
        Contender("flat", "cat, dist.all_reduce, divide, unflatten (baseline)", flat_all_reduce),
        Contender("ring", "bucketize, ring_reduce", pc.chain(pc.bucketize(), pc.ring_reduce())),
        Contender("ring_bf16", "bucketize, compress bf16, ring_reduce", bf16, tolerance=BF16),
        Contender("all_to_all", "bucketize, all_to_all_avg", pc.chain(pc.bucketize(), pc.all_to_all_avg())),
    ]
    return compare(contenders, gradients(transformer(blocks=6)), settings.rounds, calls=1)


def small(settings: Settings) -> list[Measured]:
    """200 leaves of 1 KB: pipelines against one all_reduce of a tensor that is already flat."""
    contenders = [
        Contender("flat", "one flat dist.all_reduce (baseline)", dist.all_reduce, prepare=flatten, tolerance=None),
        Contender("ring", "bucketize, ring_reduce", pc.chain(pc.bucketize(), pc.ring_reduce())),
        Contender("all_to_all", "bucketize, all_to_all_avg", pc.chain(pc.bucketize(), pc.all_to_all_avg())),
    ]
    return compare(contenders, gradients({f"leaf{i}": (256,) for i in range(200)}), settings.rounds, calls=10)


def compression(settings: Settings) -> list[Measured]:
    """The dense tree through error feedback and compression, with the state carried from call to call."""
    tree = gradients(transformer(blocks=6))
    feedback, codecs = pc.error_feedback(), pc.codecs
    int8, int4, top = pc.compress("int8"), pc.compress("int4"), pc.compress(codecs.topk(0.01))
    pipelines = {
        "int8": pc.chain(feedback, pc.bucketize("4MiB"), int8, pc.ring_reduce()),
        "int8_direct": pc.chain(feedback, pc.bucketize("4MiB"), int8, pc.all_to_all_avg()),
        "int4": pc.chain(feedback, pc.bucketize("4MiB"), int4, pc.ring_reduce()),
        "int4_direct": pc.chain(feedback, pc.bucketize("4MiB"), int4, pc.all_to_all_avg()),
        "low_rank": pc.chain(feedback, pc.low_rank(4), pc.bucketize(), pc.ring_reduce()),
        "low_rank_direct": pc.chain(feedback, pc.low_rank(4), pc.bucketize(), pc.all_to_all_avg()),
        "topk": pc.chain(feedback, pc.bucketize("4MiB"), top, pc.all_gather_avg()),
        "topk_direct": pc.chain(feedback, pc.bucketize("4MiB"), top, pc.all_to_all_avg()),
        "topk_ring": pc.chain(feedback, pc.bucketize("4MiB"), top, pc.ring_reduce()),
    }
    contenders = [Contender("flat", "cat, dist.all_reduce, divide, unflatten (baseline)", flat_all_reduce)]
    contenders += [Contender(key, repr(pipe), Carried(pipe, tree)) for key, pipe in pipelines.items()]
    return compare(contenders, tree, settings.rounds, calls=1)


def tuning(settings: Settings) -> list[Measured]:
    """The dense tree with every choice of bucket size and number of buckets in flight: what the defaults rest on."""
    contenders = [Contender("flat", "cat, dist.all_reduce, divide, unflatten (baseline)", flat_all_reduce)]
    for cap in settings.caps:
        pipeline = pc.chain(pc.bucketize(cap), pc.ring_reduce())
        title = f"bucketize {cap}, ring_reduce"
        contenders.extend(
            Contender("ring", f"{title}, {count} in flight", limited(pipeline, count)) for count in settings.in_flight
        )
    return compare(contenders, gradients(transformer(blocks=6)), settings.rounds, calls=1)


def memory(settings: Settings) -> list[Measured]:
    """Peak memory of a donated call on 82 MB of gradients, against the buckets in flight, for several bucket sizes."""
    check_meter()
    measured = []
    for cap in settings.caps:
        title, in_flight = largest_in_flight(cap)
        measured.append(Measured("in_flight", f"{title} (baseline)", [in_flight] * settings.rounds))
        donated = partial(pc.chain(pc.bucketize(cap), pc.ring_reduce()), donate=True)
        measured.append(Measured("donated", f"bucketize {cap}, ring_reduce, donated", weigh(donated, settings.rounds)))
    flat = weigh(flat_all_reduce, settings.rounds)
    measured.append(Measured("flat", "cat, dist.all_reduce, divide, unflatten (for comparison)", flat))
    return measured


SCENARIOS = {"dense": dense, "small": small, "compression": compression, "tuning": tuning, "memory": memory}


# Trees --------------------------------------------------------------------------------------------------------------


def transformer(blocks: int, width: int = 256, vocabulary: int = 5902) -> Tree:
    """The shapes of a language model's parameters; 6 blocks are 25 MB of float32 in 25 matrices and 50 vectors."""
    return {
        "embedding": {"weight": (vocabulary, width)},
        "blocks": {str(i): block(width) for i in range(blocks)},
        "norm": {"weight": (width,), "bias": (width,)},
    }


def block(width: int) -> Tree:
    """The shapes of one transformer block's parameters."""
    return {
        "norm1": {"weight": (width,), "bias": (width,)},
        "attention": {
            "qkv": {"weight": (3 * width, width), "bias": (3 * width,)},
            "out": {"weight": (width, width), "bias": (width,)},
        },
        "norm2": {"weight": (width,), "bias": (width,)},
        "mlp": {
            "up": {"weight": (4 * width, width), "bias": (4 * width,)},
            "down": {"weight": (width, 4 * width), "bias": (width,)},
        },
    }


def gradients(shapes: Tree) -> Tree:
    """Random gradients of these shapes, other ones on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tree: Tree = rebuild(shapes, (torch.randn(shape, generator=generator) for shape in leaves(shapes)))
    return tree


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested dicts, in order."""
    return [leaf for child in tree.values() for leaf in leaves(child)] if isinstance(tree, dict) else [tree]


def paths(tree: Tree) -> list[str]:
    """The dotted paths of the leaves, in the order of `leaves`."""
    below = {name: paths(child) if isinstance(child, dict) else [""] for name, child in tree.items()}
    return [f"{name}.{path}".rstrip(".") for name, rest in below.items() for path in rest]


def rebuild(tree: Any, values: Iterator[Any]) -> Any:
    """Nested dicts of the same shape with these leaves."""
    return {name: rebuild(child, values) for name, child in tree.items()} if isinstance(tree, dict) else next(values)


def flatten(tree: Tree) -> torch.Tensor:
    """All leaves in one new vector."""
    return torch.cat([leaf.reshape(-1) for leaf in leaves(tree)])


def flat_all_reduce(tree: Tree) -> Tree:
    """What one writes by hand: flatten, all_reduce, divide, unflatten (as views)."""
    flat = flatten(tree)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    pieces = flat.split([leaf.numel() for leaf in leaves(tree)])
    result: Tree = rebuild(tree, (piece.view_as(leaf) for piece, leaf in zip(pieces, leaves(tree), strict=True)))
    return result


# Time ---------------------------------------------------------------------------------------------------------------


def compare(contenders: Sequence[Contender], tree: Tree, rounds: int, calls: int) -> list[Measured]:
    """Check all contenders against the flat all_reduce, then time them in turn."""
    sent = [check(contender, tree) for contender in contenders]
    seconds = time_in_turn(contenders, tree, rounds, calls)
    return [
        Measured(contender.key, contender.title, samples, sent_bytes)
        for contender, samples, sent_bytes in zip(contenders, seconds, sent, strict=True)
    ]


def check(contender: Contender, tree: Tree) -> float:
    """The bytes that a call sends from here; raise if its result, with what it keeps back, is too far from the mean."""
    with pc.traffic() as traffic:
        result = contender.run(contender.prepare(tree))
    n = dist.get_world_size()
    sent = traffic.bytes or sum(leaf.nbytes for leaf in leaves(tree)) * 2 * (n - 1) / n  # not ours: a dense ring
    if contender.tolerance is None:
        return sent
    expected, got = leaves(flat_all_reduce(tree)), leaves(result)
    if isinstance(contender.run, Carried):
        # The first call of this state: nothing is lost, so the mean is what came out and what all ranks keep of it.
        got = [have + kept for have, kept in zip(got, contender.run.kept_back(tree), strict=True)]
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        error = float((have - want).abs().max() / want.abs().max())
        if not error <= contender.tolerance:
            raise RuntimeError(
                f"{contender.title}: leaf {index} is off by {error:.1e}, allowed are {contender.tolerance:.0e}"
            )
    return sent


def time_in_turn(contenders: Sequence[Contender], tree: Tree, rounds: int, calls: int) -> list[list[float]]:
    """Seconds of one call, per contender and round; every round starts with another contender."""
    seconds = torch.zeros(len(contenders), rounds, dtype=torch.float64)
    for turn in range(-1, rounds):  # turn -1 warms up
        for offset in range(len(contenders)):
            index = (turn + offset) % len(contenders)
            mean = sum(time_call(contenders[index], tree) for _ in range(calls)) / calls
            if turn >= 0:
                seconds[index, turn] = mean
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    listed: list[list[float]] = seconds.tolist()
    return listed


def time_call(contender: Contender, tree: Tree) -> float:
    """Seconds of one call on this rank, from a barrier on."""
    prepared = contender.prepare(tree)
    dist.barrier()
    start = time.perf_counter()
    result = contender.run(prepared)
    seconds = time.perf_counter() - start
    del result  # freeing it is not part of the call
    return seconds


def limited(pipeline: Callable[[Tree], Tree], in_flight: int) -> Callable[[Tree], Tree]:
    """The pipeline with another number of buckets in flight; the library has no switch for it on purpose."""

    def run(tree: Tree) -> Tree:
        defaults = schedule.drive.__defaults__
        schedule.drive.__defaults__ = (in_flight,)
        try:
            return pipeline(tree)
        finally:
            schedule.drive.__defaults__ = defaults

    return run


# Memory -------------------------------------------------------------------------------------------------------------


def largest_in_flight(cap: str) -> tuple[str, float]:
    """The most bytes of buckets that are in flight at a time, and how to say it."""
    buckets, _ = pc.bucketize(cap).pack(gradients(transformer(blocks=24)))
    sizes = sorted((bucket.nbytes for bucket in buckets.values()), reverse=True)
    return f"the {schedule.IN_FLIGHT} largest of {len(sizes)} buckets", float(sum(sizes[: schedule.IN_FLIGHT]))


def weigh(run: Callable[[Tree], Tree], rounds: int) -> list[float]:
    """How far resident memory rises above its level before the first call, per call, on the rank where it is most.

    All threads count, gloo's too, and so does what is kept from one call to the next. Process groups, threads and
    imports do not: a call on a small tree has made them before. Resident memory is exact only if freed tensors go
    back to the system at once, so that none hides in what malloc keeps: see `check_meter`.
    """
    tree = gradients(transformer(blocks=24))
    run(gradients({"small": (50_000,)}))
    before = resident("VmRSS")
    peaks = torch.zeros(rounds, dtype=torch.float64)
    for turn in range(rounds):
        dist.barrier()
        restart_peak()
        tree = run(tree)
        peaks[turn] = resident("VmHWM") - before
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    listed: list[float] = peaks.tolist()
    return listed


def restart_peak() -> None:
    """Set the high-water mark of resident memory back to the present level."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> float:
    """Bytes of resident memory now (VmRSS) or at most (VmHWM)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("measuring memory needs Linux's /proc/self/status")
    return int(found[1]) * 1024.0


def check_meter() -> None:
    """Raise if allocations of known size, made and freed again and again, are misread."""
    for turn in range(3):
        restart_peak()
        before = resident("VmRSS")
        torch.ones(5_000_000).add(1).sum()
        peak = (resident("VmHWM") - before) / 1e6
        if turn > 0 and not 39 < peak < 42:  # the first turn also reads torch's code from disk
            raise RuntimeError(f"40 MB read as {peak:.1f} MB; MALLOC_MMAP_THRESHOLD_=65536 must be set at start")


# Run ----------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run one scenario on this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--caps", nargs="+", default=["4MiB"])
    parser.add_argument("--in-flight", nargs="+", type=int, default=[schedule.IN_FLIGHT])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    measured = SCENARIOS[args.scenario](Settings(args.rounds, args.caps, args.in_flight))
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps([asdict(each) for each in measured]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
