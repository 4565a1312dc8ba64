"""How long pipelines take on trees of given shapes, beside one `dist.all_reduce` of a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ptcollect as pc
from ptcollect.measure.spread import Spread, no_tick, ratios, spread_of

BASELINE = "dist.all_reduce"
SHORT_BYTES, SHORT_CALLS = 256 << 10, 10  # below so many bytes a sample is the mean of so many calls

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class PipelineTime:
    """One contender on one tree; all ranks hold the same."""

    name: str
    pipeline: str
    """As code; of the baseline, what it does."""
    bytes: int
    """Of the tree on one rank, in float32."""
    sent_bytes: list[int]
    """By rank, in one call, headers left out: those of `simulate`. Of the baseline: of a ring."""
    messages: int
    """Of one rank in one call, the most over ranks; rounds likewise."""
    rounds: int
    seconds: Spread | None
    """Of one call, from a barrier until it returns, on the rank that takes longest."""
    ratio: Spread | None
    """To the baseline in the same round."""
    off: float | None
    """How far the first call's result is from the mean over ranks: norm of the difference over norm of the mean.
    What error feedback keeps for the next step counts as missing."""
    failed: str = ""
    """Why there are no figures."""


@dataclass
class _Contender:
    name: str
    text: str
    run: Callable[[dict[str, Tensor]], Any]
    samples: list[float] = field(default_factory=list)
    traffic: pc.Traffic = field(default_factory=pc.Traffic)
    off: float = math.nan
    failed: str = ""


def measure_pipelines(
    pipelines: Mapping[str, pc.Pipeline], shapes: Shapes, repeats: int = 7, tick: Callable[[str], None] = no_tick
) -> list[PipelineTime]:
    """Time each pipeline in turn, round after round, on random gradients of these shapes; all ranks call this.

    State is carried from call to call. A contender that raises on any rank, or gives numbers that are not finite, is
    left out from then on and reported as failed.

    Args:
        pipelines: by name.
        shapes: of the tree's leaves, by path.
        repeats: rounds that count, after one that warms up and is checked.
        tick: called as each contender of each round begins; see `rounds`.

    Returns:
        The baseline first, then the pipelines in order.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    tree = {path: torch.randn(tuple(shape), generator=generator) for path, shape in shapes.items()}
    size = sum(leaf.nbytes for leaf in tree.values())
    flat = torch.cat([leaf.reshape(-1) for leaf in tree.values()])
    mean = flat.clone()
    _all_reduce(mean)
    contenders = [_Contender(BASELINE, "all_reduce of a flat buffer, divide", lambda _: None)]
    contenders += [_contender(name, each, tree) for name, each in pipelines.items()]
    calls = SHORT_CALLS if size < SHORT_BYTES else 1
    for number in range(-1, repeats):
        for offset in range(len(contenders)):
            contender = contenders[(number + offset) % len(contenders)]
            tick(f"{size / 2**20:.3g} MiB {contender.name}")
            if _failed_anywhere(contender):
                continue
            try:
                if contender.name == BASELINE:
                    seconds = _time_baseline(flat, calls)
                elif number < 0:
                    seconds = 0.0
                    _first_call(contender, tree, mean)
                else:
                    seconds = _time_pipeline(contender, tree, calls)
            except Exception as error:  # whatever one pipeline raises, the others are still worth measuring
                contender.failed = f"rank {rank}: {type(error).__name__}: {error}"
                continue
            if number >= 0:
                contender.samples.append(seconds)
    _exchange_failures(contenders)
    return _results(contenders, size, repeats, n)


def rounds(pipelines: int, repeats: int) -> int:
    """How many times `measure_pipelines` ticks."""
    return (pipelines + 1) * (repeats + 1)


class _Carried:
    """A pipeline that goes on from the state its last call left."""

    def __init__(self, pipeline: pc.Pipeline, like: dict[str, Tensor]) -> None:
        self.pipeline = pipeline
        self.state = pipeline.init(like)

    def __call__(self, tree: dict[str, Tensor]) -> Any:
        result, self.state = self.pipeline.update(tree, self.state)
        return result


def _contender(name: str, pipeline: pc.Pipeline, tree: dict[str, Tensor]) -> _Contender:
    try:
        return _Contender(name, repr(pipeline), _Carried(pipeline, tree))
    except Exception as error:  # no first state for such a tree
        return _Contender(name, repr(pipeline), lambda _: None, failed=f"{type(error).__name__}: {error}")


def _all_reduce(flat: Tensor) -> None:
    dist.all_reduce(flat)
    flat /= dist.get_world_size()


def _time_baseline(flat: Tensor, calls: int) -> float:
    total = 0.0
    for _ in range(calls):
        buffer = flat.clone()
        dist.barrier()
        start = perf_counter()
        _all_reduce(buffer)
        total += perf_counter() - start
    return total / calls


def _time_pipeline(contender: _Contender, tree: dict[str, Tensor], calls: int) -> float:
    total = 0.0
    for _ in range(calls):
        dist.barrier()
        start = perf_counter()
        result = contender.run(tree)
        total += perf_counter() - start
        del result  # freeing it is not part of the call
    return total / calls


def _first_call(contender: _Contender, tree: dict[str, Tensor], mean: Tensor) -> None:
    """Count what it sends, and see whether what comes out can be meant.

    Raises:
        ValueError: it cannot.
    """
    with pc.traffic() as contender.traffic:
        result = contender.run(tree)
    got = torch.cat([result[path].reshape(-1) for path in tree])
    if not bool(torch.isfinite(got).all()):
        raise ValueError("the result of the first call is not finite")
    contender.off = float((got - mean).norm() / mean.norm())


def _failed_anywhere(contender: _Contender) -> bool:
    """Whether it failed on any rank: all ranks leave it out together. Waits for all ranks, as a barrier does."""
    flag = torch.tensor([float(bool(contender.failed))])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _exchange_failures(contenders: Sequence[_Contender]) -> None:
    """Every rank learns of every failure; that of the first rank which has one of its own counts."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, [contender.failed for contender in contenders])
    for index, contender in enumerate(contenders):
        reasons = [row[index] for row in said if row[index]]
        causes = [reason for reason in reasons if "PeerLostError" not in reason]
        contender.failed = next(iter([*causes, *reasons]), "")


def _results(contenders: Sequence[_Contender], size: int, repeats: int, n: int) -> list[PipelineTime]:
    seconds = torch.full((len(contenders), repeats), -1.0, dtype=torch.float64)
    counts = torch.zeros(len(contenders), n, 3, dtype=torch.int64)
    off = torch.tensor([contender.off for contender in contenders], dtype=torch.float64)
    for index, contender in enumerate(contenders):
        if not contender.failed:
            seconds[index] = torch.tensor(contender.samples, dtype=torch.float64)
        traffic = contender.traffic
        counts[index, dist.get_rank()] = torch.tensor([traffic.bytes, traffic.messages, traffic.rounds])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(counts)
    dist.all_reduce(off, op=dist.ReduceOp.MAX)
    counts[0] = torch.tensor([2 * (n - 1) * size // n, 2 * (n - 1), 2 * (n - 1)])
    baseline = seconds[0].tolist()
    return [
        PipelineTime(
            contender.name,
            contender.text,
            size,
            counts[index, :, 0].tolist(),
            int(counts[index, :, 1].max()),
            int(counts[index, :, 2].max()),
            None if contender.failed else spread_of(seconds[index].tolist()),
            None if contender.failed else ratios(seconds[index].tolist(), baseline),
            None if contender.failed or index == 0 else float(off[index]),
            contender.failed,
        )
        for index, contender in enumerate(contenders)
    ]
