"""Says what a pipeline would cost before anything runs: bytes, messages, rounds and seconds, from shapes alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ptcollect.errors import PipelineError
from ptcollect.link import Link
from ptcollect.pipeline import Pipeline
from ptcollect.shapes import without_values
from ptcollect.simulate import simulate
from ptcollect.speed import CodecSpeed, Speeds
from ptcollect.state import State
from ptcollect.symmetry import NotSymmetricError, OneRank, Programs, TimedRank
from ptcollect.timeline import Timeline
from ptcollect.value import whole_number

_EVERY_RANK = 10_000  # messages of all ranks up to which each is simulated
_AT_MOST = 2_000_000  # and up to which that is tried where nothing else would do


@dataclass(frozen=True)
class Plan:
    """What one step of a pipeline would cost; lists by rank.

    >>> import ptcollect as pc
    >>> cost = pc.plan(pc.ring_reduce(), {"w": (1000,)}, world=4, link=pc.Link("1gbit", latency="1ms"))
    >>> cost.bytes, cost.messages, cost.rounds
    ([6000, 6000, 6000, 6000], [6, 6, 6, 6], [6, 6, 6, 6])
    >>> cost  # doctest: +ELLIPSIS
    Plan(pipeline=ring_reduce(), ranks=4, seconds=0.008..., stages={'agreement': 0.002..., 'ring_reduce': 0.006...})
    """

    pipeline: Pipeline
    ranks: int
    seconds: float
    """When the last rank would have ended."""
    stages: dict[str, float]
    """Where the seconds of that rank go: to waiting, by stage, and to work, by codec; they add up."""
    bytes: list[int] = field(repr=False)
    """Payload bytes sent; exact."""
    messages: list[int] = field(repr=False)
    """Payload messages sent; exact."""
    rounds: list[int] = field(repr=False)
    """Exchanges and collectives made; exact."""
    agreement_bytes: list[int] = field(repr=False)
    """Bytes of the records compared before traffic."""
    every_rank: bool = field(default=True, repr=False)
    """Whether all ranks were simulated, or one of each kind."""
    timeline: Timeline | None = field(default=None, repr=False)
    """When everything would happen, where all ranks were simulated."""


def plan(
    pipeline: Pipeline,
    params: Any,
    *,
    world: int | Mapping[str, int],
    link: Link,
    codec_speed: CodecSpeed | str | Path | None = None,
    step: int = 0,
    check: Literal["every_step", "off"] = "every_step",
    every_rank: bool | None = None,
) -> Plan:
    r"""Predict bytes, messages, rounds and time of one step, from shapes alone; nothing is sent and nothing computed.

    .. math:: t_\text{ring} = 2(p-1)\,\text{latency} + \frac{2(p-1)}{p} \frac{m}{\text{bandwidth}}

    for one ring over p ranks and m bytes, for example; it is not the formula that is used, but the program itself: the
    simulator runs the pipeline on tensors without values, and messages take time on a virtual clock. Bytes, messages
    and rounds are exact: those of `simulate`, and what `traffic` counts on the wire. Like the engine it has a few
    buckets in flight, and a rank waits for its oldest request. The records that ranks compare before traffic take
    their time too (``stages["agreement"]``).

    All ranks are simulated while that is quick. In larger worlds one rank of each kind is, with messages as
    long as the longest of their round: the rest of a division by the number of ranks then counts on every rank, no more
    than a number per message. That needs links that are alike (one, or two levels) and ranks that do the same but
    for a rotation, which is checked. With two levels, a ring whose messages leave a node on some ranks only takes
    the mean of their latencies.

    Args:
        pipeline: what to run. Control flow may not depend on values: `skip_nonfinite` is planned as a step that is not
            skipped, and a step function or reducer that looks at values is an error.
        params: a tree of tensors (on any device, ``"meta"`` included) or of shapes, a `torch.nn.Module`, or how many
            parameters there are (``124_000_000`` or ``"124M"``: a transformer of that size, in float32).
        world: number of ranks, or dims of a mesh and their sizes, outermost first, as in ``{"node": 2, "local": 4}``.
        link: what joins the ranks.
        codec_speed: numbers per second that each codec encodes and decodes, as in ``{"int8": (2e9, 3e9)}``; or a JSON
            file with such a mapping, or one that ``benchmarks/codec_speed.py --json`` has written. Known beside codecs:
            dtypes such as ``"float32"`` (adding what travels as it is), ``"copy"`` (passes over fresh memory, as in
            packing), and of `low_rank` ``"multiply"`` and ``"orthonormal"``. What is not named takes no time, and by
            default nothing is.
        step: the state's step count, for `piecewise`.
        check: as in `RunOptions`.
        every_rank: whether to simulate all ranks; None: as the size allows.

    Returns:
        A `Plan`.

    Raises:
        ValueError: a link, a world or parameters that do not fit together.
        PipelineError: the pipeline looks at values, or is too large to simulate and ranks do not do the same.

    Source: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH, section
    2 (the cost model); Hockney 1994.

    >>> import ptcollect as pc
    >>> dense = pc.chain(pc.bucketize(), pc.ring_reduce())
    >>> int8 = pc.chain(pc.error_feedback(), pc.bucketize(), pc.compress("int8"), pc.ring_reduce())
    >>> for sync in (dense, int8):
    ...     cost = pc.plan(sync, "124M", world=8, link=pc.Link("1gbit", latency="1ms"))
    ...     print(f"{max(cost.bytes) / 1e6:.0f} MB, {cost.seconds:.2f} s")
    868 MB, 6.96 s
    220 MB, 1.78 s
    """
    shape = _shape(world)
    ranks = math.prod(shape.values())
    link.check(ranks)
    tree = without_values(params)
    case = _Case(pipeline, shape, ranks, link, codec_speed, check, tree, _state(pipeline, tree, step))
    with torch.no_grad():
        try:
            return case.plan(every_rank)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, PipelineError) or "meta" not in str(error).lower():
                raise
            raise PipelineError(
                f"plan: {pipeline!r} looks at values, and a plan has none: {str(error).splitlines()[0]}; use "
                "simulate(..., link=link) with real tensors instead"
            ) from error


def _shape(world: Any) -> dict[Any, int]:
    shape = dict(world) if isinstance(world, Mapping) else {None: world}
    if not shape:
        raise ValueError("plan(world): expected a number of ranks, or dims with their sizes, got no dims")
    for axis, size in shape.items():
        whole_number("plan(world)" if axis is None else f"plan(world): {axis!r}", size)
    return shape


def _state(pipeline: Pipeline, tree: Any, step: int) -> State | None:
    state = pipeline.init(tree)
    return {**state, "step": step} if state else state


@dataclass(frozen=True)
class _Case:
    pipeline: Pipeline
    shape: dict[Any, int]
    ranks: int
    link: Link
    codec_speed: CodecSpeed | str | Path | None
    check: Literal["every_step", "off"]
    tree: Any
    state: State | None

    def plan(self, every_rank: bool | None) -> Plan:
        if every_rank:
            return self.of_every_rank()
        programs = Programs()
        first = OneRank(self.shape, dict.fromkeys(self.shape, 0), programs)
        try:
            first.run(self.pipeline, self.tree, self.state, self.check)
            if every_rank is None and first.messages * self.ranks <= _EVERY_RANK:
                return self.of_every_rank()
            return self.of_one_of_each(first, programs)
        except NotSymmetricError as error:
            if every_rank is False or first.messages * self.ranks > _AT_MOST:
                raise PipelineError(
                    f"plan: {self.ranks} ranks are too many to simulate each of them, and one cannot stand for "
                    f"others: {error}; plan a smaller world"
                ) from error
            return self.of_every_rank()

    def of_every_rank(self) -> Plan:
        """Simulate all ranks."""
        run = simulate(
            self.pipeline,
            [self.tree] * self.ranks,
            [self.state or {}] * self.ranks,
            axes=None if None in self.shape else self.shape,
            check=self.check,
            link=self.link,
            codec_speed=self.codec_speed,
        )
        assert run.seconds is not None  # noqa: S101
        assert run.stages is not None  # noqa: S101
        last = max(range(self.ranks), key=run.seconds.__getitem__)
        return Plan(
            pipeline=self.pipeline,
            ranks=self.ranks,
            seconds=run.seconds[last],
            stages=run.stages[last],
            bytes=run.bytes,
            messages=run.messages,
            rounds=run.rounds,
            agreement_bytes=run.agreement_bytes,
            timeline=run.timeline,
        )

    def of_one_of_each(self, first: OneRank, programs: Programs) -> Plan:
        """Time one rank, and count on one of each kind: those that differ where stages that are no reducers send."""
        timed = TimedRank(self.shape, programs, self.link, Speeds(self.codec_speed))
        timed.run(self.pipeline, self.tree, self.state, self.check)
        dims = [axis for axis in self.shape if axis in first.dims]
        kinds = {}
        for places in itertools.product(*(range(self.shape[axis]) for axis in dims)):
            kinds[places] = OneRank(
                self.shape, {**dict.fromkeys(self.shape, 0), **dict(zip(dims, places, strict=True))}, programs
            )
            kinds[places].run(self.pipeline, self.tree, self.state, self.check)
        rows = [self._counted(kinds, dims, programs, place) for place in self._places()]
        return Plan(
            pipeline=self.pipeline,
            ranks=self.ranks,
            seconds=timed.time,
            stages=dict(timed.stages),
            bytes=[row[0] for row in rows],
            messages=[row[1] for row in rows],
            rounds=[row[2] for row in rows],
            agreement_bytes=[row[3] for row in rows],
            every_rank=False,
        )

    def _places(self) -> list[dict[Any, int]]:
        return [
            dict(zip(self.shape, place, strict=True))
            for place in itertools.product(*(range(size) for size in self.shape.values()))
        ]

    def _counted(
        self, kinds: Mapping[tuple[int, ...], OneRank], dims: list[Any], programs: Programs, place: dict[Any, int]
    ) -> tuple[int, int, int, int]:
        own = kinds[tuple(place[axis] for axis in dims)]
        sent, messages, rounds = own.traffic.bytes, own.traffic.messages, own.traffic.rounds
        for (kind, numbers), times in own.reductions.items():
            counts = programs.of(kind, numbers).counts(numbers)
            at = place[kind.comm.axis]
            sent += times * counts.bytes[at]
            messages += times * counts.messages[at]
            rounds += times * counts.rounds[at]
        return sent, messages, rounds, own.traffic.agreement_bytes
