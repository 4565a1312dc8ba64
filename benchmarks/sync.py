"""Scenarios on real ranks that synchronise trees: by size and world size, small leaves, compressed, other tunings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from ranks import (
    BF16,
    Carried,
    Contender,
    Measured,
    Tree,
    compare,
    copied,
    flat_all_reduce,
    flatten,
    gradients,
    nbytes,
    transformer,
)
from raw_ring import RawRing

import ptcollect as pc
from ptcollect import schedule

KIB, MIB = 2**10, 2**20
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 32 * MIB, 128 * MIB)
BASELINE = "cat, dist.all_reduce, divide, unflatten"


@dataclass(frozen=True)
class Settings:
    """What the harness chose for one scenario."""

    link: str
    seconds: float
    """Time for one list of contenders."""
    sizes: Sequence[int] = SIZES
    caps: Sequence[str] = ("1MiB", "4MiB", "8MiB", "25MiB")
    in_flight: Sequence[int] = (1, 2, 4, 8)


# By size ------------------------------------------------------------------------------------------------------------


def sizes(settings: Settings) -> list[Measured]:
    """Trees of one leaf up to 4 MiB, above that of leaves of 4 MiB, against dist.all_reduce of one flat buffer."""
    return [row for size in settings.sizes for row in _of_size(size, settings)]


def _of_size(size: int, settings: Settings) -> list[Measured]:
    most = 4 * MIB
    tree = gradients({f"leaf{i}": (min(size, most) // 4,) for i in range(max(1, size // most))})
    several = len(tree) > 1
    around = (pc.bucketize("4MiB"),) if several else ()  # a leaf as large as a bucket is not packed
    reducers = {"ring": pc.ring_reduce(), "direct": pc.all_to_all_avg()}
    if hasattr(pc, "auto_reduce"):
        reducers["auto"] = pc.auto_reduce()
    shaped = settings.link != "loopback"
    long = size >= 128 * MIB and settings.link == "200mbit"  # eight seconds a call
    flat = "dist.all_reduce of one flat buffer, not even divided"
    contenders = [Contender("all_reduce", flat, dist.all_reduce, prepare=flatten, tolerance=None)]
    for key, reducer in reducers.items():
        pipeline = pc.chain(*around, reducer)
        if key == "ring" or not long:
            contenders.append(Contender(key, repr(pipeline), pipeline))
        if size <= 256 * KIB and key != "ring":
            unchecked = partial(pipeline, check="first")
            contenders.append(Contender(f"{key} unchecked", f'{pipeline!r}, check="first"', unchecked))
        if not shaped:  # behind a link it makes no difference
            donated = partial(pipeline, donate=True)
            contenders.append(Contender(f"{key} donated", f"{pipeline!r}, donate=True", donated, prepare=copied))
    if size <= 256 * KIB:
        gather = pc.all_gather_avg()
        contenders.append(Contender("all_gather", repr(gather), gather))
    calls = 1 if size > MIB else 5 if shaped or size == MIB else 20
    share = 0.04 if size <= 256 * KIB else 0.08 if size <= 4 * MIB else 0.3
    seconds = settings.seconds * share
    if long:  # the same pipeline is checked, and the connection warm, at 32 MiB
        return compare(contenders, tree, seconds=seconds, least=2, checked=False)
    return _with_limits(contenders, tree, settings, seconds, calls)


# Whole trees --------------------------------------------------------------------------------------------------------


def dense(settings: Settings) -> list[Measured]:
    """25 MB of a transformer's gradients: pipelines against flatten, all_reduce, divide, unflatten."""
    bf16 = pc.chain(pc.bucketize(), pc.compress("bf16"), pc.ring_reduce())
    pipelines = {
        "ring": pc.chain(pc.bucketize(), pc.ring_reduce()),
        "direct": pc.chain(pc.bucketize(), pc.all_to_all_avg()),
    }
    contenders = [Contender("all_reduce", BASELINE, flat_all_reduce)]
    contenders += [Contender(key, repr(pipe), pipe) for key, pipe in pipelines.items()]
    tree = gradients(transformer(blocks=6))
    if dist.get_world_size() != 4 and settings.link != "loopback":  # enough to see how it grows with the ranks
        return compare(contenders, tree, seconds=settings.seconds)
    contenders.append(Contender("ring_bf16", repr(bf16), bf16, tolerance=BF16))
    return _with_limits(contenders, tree, settings, settings.seconds, calls=1)


def small(settings: Settings) -> list[Measured]:
    """200 leaves of 1 KB: pipelines against one all_reduce of a tensor that is already flat."""
    tree = gradients({f"leaf{i}": (256,) for i in range(200)})
    ring, direct = pc.chain(pc.bucketize(), pc.ring_reduce()), pc.chain(pc.bucketize(), pc.all_to_all_avg())
    contenders = [
        Contender("all_reduce", "one flat dist.all_reduce", dist.all_reduce, prepare=flatten, tolerance=None),
        Contender("ring", repr(ring), ring),
        Contender("direct", repr(direct), direct),
        Contender("direct unchecked", f'{direct!r}, check="first"', partial(direct, check="first")),
    ]
    if hasattr(pc, "auto_reduce"):
        auto = pc.chain(pc.bucketize(), pc.auto_reduce())
        contenders.append(Contender("auto", repr(auto), auto))
    return _with_limits(contenders, tree, settings, settings.seconds, calls=10)


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
    contenders = [Contender("all_reduce", BASELINE, flat_all_reduce)]
    contenders += [Contender(key, repr(pipe), Carried(pipe, tree)) for key, pipe in pipelines.items()]
    return compare(contenders, tree, seconds=settings.seconds)


def tuning(settings: Settings) -> list[Measured]:
    """The dense tree with every choice of bucket size and number of buckets in flight: what the defaults rest on."""
    contenders = [Contender("all_reduce", BASELINE, flat_all_reduce)]
    for cap in settings.caps:
        pipeline = pc.chain(pc.bucketize(cap), pc.ring_reduce())
        contenders.extend(
            Contender(f"{cap} {count}", f"{pipeline!r}, {count} in flight", limited(pipeline, count))
            for count in settings.in_flight
        )
    return compare(contenders, gradients(transformer(blocks=6)), seconds=settings.seconds)


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


# Limits -------------------------------------------------------------------------------------------------------------


def _with_limits(
    contenders: Sequence[Contender], tree: Tree, settings: Settings, seconds: float, calls: int
) -> list[Measured]:
    """Time the contenders beside what sets their limit: copies in memory on loopback, plain TCP on a link."""
    n = dist.get_world_size()
    size = nbytes(tree)
    sent = size * 2 * (n - 1) // n
    extra: list[Contender] = []
    ring = None
    if settings.link == "loopback":
        numbers = flatten(tree)
        room = torch.empty_like(numbers)
        extra = [Contender("copy", "copy the same bytes in memory", lambda _: room.copy_(numbers), tolerance=None)]
    elif size >= MIB:
        ring = RawRing(sent)
        extra = [Contender("tcp", "as many bytes through one TCP connection", ring, tolerance=None)]
    try:
        rows = compare([*contenders, *extra], tree, seconds=seconds, calls=calls)
    finally:
        if ring is not None:
            ring.close()
    return [replace(row, baseline="") if row.key in ("copy", "tcp") else row for row in rows]
