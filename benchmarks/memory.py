"""Peak memory of calls on real ranks, above what is held before the first one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import Carried, Measured, Tree, flat_all_reduce, gradients, nbytes, transformer
from sync import Settings

import ptcollect as pc
from ptcollect import schedule

# MALLOC_MMAP_THRESHOLD_ must be set: malloc would keep freed tensors, and the next would not show in resident memory.

BLOCKS = 24  # 82 MB
ROUNDS = 3


def memory(settings: Settings) -> list[Measured]:
    """Peak extra bytes per pipeline, without and with ``donate=True``, and donated by size of the buckets."""
    check_meter()
    tree = gradients(transformer(blocks=BLOCKS))
    size = nbytes(tree)
    rows = [Measured("tree", "the tree itself, for comparison", [float(size)] * ROUNDS, size=size)]
    rows.append(Measured("flat", "cat, dist.all_reduce, divide, unflatten", weigh(flat_all_reduce), "tree", size=size))
    for key, pipeline in pipelines().items():
        for suffix, options in (("", {}), (" donated", {"donate": True})):
            title = repr(pipeline) + (", donate=True" if options else "")
            run: Any = Carried(pipeline, tree, **options) if pipeline.stateful else partial(pipeline, **options)
            rows.append(Measured(key + suffix, title, weigh(run), "tree", size=size))
            del run  # and its state
    for cap in settings.caps:
        title, in_flight = largest_in_flight(cap)
        rows.append(Measured(f"{cap} in flight", title, [in_flight] * ROUNDS, size=size))
        donated = partial(pc.chain(pc.bucketize(cap), pc.ring_reduce()), donate=True)
        title = f'chain(bucketize("{cap}"), ring_reduce()), donate=True'
        rows.append(Measured(f"{cap} donated", title, weigh(donated), f"{cap} in flight", size=size))
    return rows


def pipelines() -> dict[str, pc.Pipeline]:
    """Whose peaks are stated."""
    buckets, feedback = pc.bucketize("4MiB"), pc.error_feedback()
    return {
        "ring without buckets": pc.ring_reduce(),
        "ring": pc.chain(buckets, pc.ring_reduce()),
        "direct": pc.chain(buckets, pc.all_to_all_avg()),
        "all_gather": pc.chain(buckets, pc.all_gather_avg()),
        "native": pc.chain(buckets, pc.all_reduce()),
        "bf16": pc.chain(buckets, pc.compress("bf16"), pc.ring_reduce()),
        "int8": pc.chain(feedback, buckets, pc.compress("int8"), pc.ring_reduce()),
        "topk": pc.chain(feedback, buckets, pc.compress(pc.codecs.topk(0.01)), pc.all_gather_avg()),
        "low_rank": pc.chain(feedback, pc.low_rank(4), pc.bucketize(), pc.ring_reduce()),
    }


def largest_in_flight(cap: str) -> tuple[str, float]:
    """The most bytes of buckets that are in flight at a time, and how to say it."""
    buckets, _ = pc.bucketize(cap).pack(gradients(transformer(blocks=BLOCKS)))
    sizes = sorted((bucket.nbytes for bucket in buckets.values()), reverse=True)
    return f"the {schedule.IN_FLIGHT} largest of {len(sizes)} buckets", float(sum(sizes[: schedule.IN_FLIGHT]))


def weigh(run: Callable[[Tree], Tree]) -> list[float]:
    """How far resident memory rises above its level before the first call, per call, on the rank where it is most.

    All threads count, gloo's too, and so does what is kept from one call to the next. Process groups, threads and
    imports do not: a call on a small tree has made them before. Resident memory is exact only if freed tensors go
    back to the system at once, so that none hides in what malloc keeps: see `check_meter`.
    """
    tree = gradients(transformer(blocks=BLOCKS))
    pc.chain(pc.bucketize("1KiB"), pc.ring_reduce())(gradients({"small": (50_000,)}))
    before = resident("VmRSS")
    peaks = torch.zeros(ROUNDS, dtype=torch.float64)
    for turn in range(ROUNDS):
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
