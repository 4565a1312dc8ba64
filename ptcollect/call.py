"""One call of a pipeline on one rank, as a coroutine: agree, fill in, weigh, apply, rebuild.

Both interpreters run this very program, so that a simulated call does all that a real one does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ptcollect.agreement import (
    Agreement,
    Description,
    DisagreementError,
    any_of,
    describe_all,
    gather_numbers,
    settle,
)
from ptcollect.arrivals import Arrivals
from ptcollect.chain import Chain
from ptcollect.comm import Axis, Comm, Observer
from ptcollect.dtypes import fresh_copy
from ptcollect.errors import PeerLostError, PipelineError
from ptcollect.maps import scaled
from ptcollect.options import Options, check_weight
from ptcollect.pipeline import Pipeline, apply_settled
from ptcollect.reducers.reducer import Reducer
from ptcollect.state import State
from ptcollect.tree import Leaves, flatten, refuse_empty
from ptcollect.value import canonical, fingerprint


@dataclass
class Place:
    """Where a call happens: the axes that this rank sees, what it is called in messages, and what happened before."""

    axes: dict[str | None, Axis]
    name: str
    last_failed: bool = False
    unanimous: Exception | None = None
    """The error of the present call that every rank raises; the connection is sound then."""
    checked: set[bytes] = field(default_factory=set)
    """Digests of the pipelines that have been called here with ``check="first"``."""
    observer: Observer | None = None
    """Who is told of the work done in a call, beside what is sent."""

    @property
    def size(self) -> int:
        """World size over all axes."""
        return math.prod(axis.size for axis in self.axes.values())


async def call(
    pipeline: Pipeline,
    tree: Any,
    state: State | None,
    place: Place,
    options: Options,
    arrivals: Arrivals | None = None,
) -> tuple[Any, State]:
    """What `Pipeline.update` does, on one rank; with `arrivals`, `tree` only shows what the leaves will look like."""
    comm = Comm(place.axes, observer=place.observer)
    quiet = pipeline.quiet(state["step"]) if state and isinstance(state.get("step"), int) else False
    checks = pipeline.communicates and not quiet and place.size > 1 and _must_check(pipeline, place, options)
    try:
        state = pipeline.checked_state(state)
        leaves, structure = flatten(tree)
        refuse_empty(structure)
        _check_weight(pipeline, options)
    except Exception as error:
        if checks:  # the others must hear of it in the slot where they expect this rank's record
            await _report(error, _Brought(pipeline, 0, {}, (), place, options), comm)
        raise
    step = state.get("step", 0)
    mine = _Brought(pipeline, step, leaves, structure.paths, place, options)
    job = _Job(pipeline, {name: value for name, value in state.items() if name != "step"}, options, arrivals)
    inside = comm.replace(step=step, structure=structure, owned=options.donate and _apart(leaves))
    agreement = None
    if checks:
        agreement = Agreement(mine.digest(), comm)
        await agreement.begin()
    out, stages = await (_agreeing(mine, job, inside, agreement, comm) if agreement else job.on(leaves, inside))
    if not options.donate and not pipeline.fresh and arrivals is None:
        out = _private(out, leaves)
    return structure.unflatten(out), {"step": step + 1, **stages} if pipeline.stateful else {}


@dataclass(frozen=True)
class _Job:
    """What there is to do once the ranks agree."""

    pipeline: Pipeline
    state: State
    options: Options
    arrivals: Arrivals | None

    async def on(self, leaves: Leaves, comm: Comm) -> tuple[Leaves, State]:
        if self.arrivals is not None:
            return await _streamed(self.pipeline, leaves, self.state, comm, self.arrivals)
        if self.options.weight is not None:
            return await _weighted(self.pipeline, leaves, self.state, comm, self.options.weight)
        return await self.pipeline.apply(leaves, self.state, comm)


async def _agreeing(mine: _Brought, job: _Job, inside: Comm, agreement: Agreement, comm: Comm) -> tuple[Leaves, State]:
    """Do what can be done before the records are in; if they differ, nothing has been sent."""
    outcome: tuple[Leaves, State] | Exception
    # What is donated may be overwritten before the records are in, and then nothing could be filled in and done again;
    # nothing has to be where backward brings all leaves to all ranks.
    certain = job.arrivals is not None and job.arrivals.certain
    try:
        if job.options.donate and not certain:
            await agreement.passed()
        outcome = await job.on(mine.leaves, inside.replace(gate=agreement))
    except PeerLostError:
        raise
    except Exception as error:  # a stage's own; whether the ranks agree comes first
        outcome = error
    try:
        if not agreement.open:
            await agreement.passed()
    except DisagreementError:
        leaves = await _settled(mine, comm)
        if job.options.donate and certain:
            raise PipelineError(
                f"{mine.place.name}: gradients are missing on some rank, and this one's, donated because all were "
                "expected everywhere, are overwritten; give every rank the same DDP options"
            ) from None
        return await job.on(leaves, inside)
    mine.place.last_failed = False  # every rank knows by now
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _must_check(pipeline: Pipeline, place: Place, options: Options) -> bool:
    if options.check == "first":
        digest = fingerprint(_canonical(pipeline))
        if digest in place.checked:
            return False
        place.checked.add(digest)
    return options.check != "off"


@dataclass(frozen=True)
class _Brought:
    """What one rank brings to a call, and the ranks must agree on."""

    pipeline: Pipeline
    step: int
    leaves: Leaves
    paths: tuple[str, ...]
    place: Place
    options: Options

    def digest(self) -> bytes:
        """16 bytes that are equal on two ranks only if what they bring agrees."""
        kinds = tuple([_kind(self.leaves.get(path)) for path in self.paths])
        options = (self.options.missing, self.options.check, self.options.weight is not None)
        leaves = _leaves_print(self.paths, kinds).hex()
        return fingerprint(f"{_canonical(self.pipeline)} {leaves} {self.step} {options} {self.place.last_failed}")

    def describe(self, failure: Exception | None = None) -> Description:
        """The same in full, for the ranks to compare when digests differ."""
        return Description(
            pipeline=repr(self.pipeline),
            identity=_canonical(self.pipeline),
            step=self.step,
            missing=self.options.missing,
            check=self.options.check,
            weighted=self.options.weight is not None,
            leaves=[_described(path, self.leaves.get(path)) for path in self.paths],
            failure=None if failure is None else f"{type(failure).__name__}: {failure}",
            last_failed=self.place.last_failed,
            place=self.place.name,
        )


_remembered = functools.lru_cache(maxsize=256)(canonical)


def _canonical(pipeline: Pipeline) -> str:
    try:
        return _remembered(pipeline)
    except TypeError:  # somebody's stage has an option that cannot be hashed
        return canonical(pipeline)


def _kind(leaf: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if leaf is None else (leaf.shape, leaf.dtype)


@functools.lru_cache(maxsize=256)
def _leaves_print(paths: tuple[str, ...], kinds: tuple[tuple[torch.Size, torch.dtype] | None, ...]) -> bytes:
    return fingerprint(repr((paths, kinds)))


def _described(path: str, leaf: Tensor | None) -> tuple[str, list[int] | None, str]:
    return (path, None, "") if leaf is None else (path, list(leaf.shape), str(leaf.dtype).removeprefix("torch."))


async def _report(error: Exception, mine: _Brought, comm: Comm) -> None:
    """Tell all ranks that this one cannot take part; its digest is equal to no other's."""
    agreement = Agreement(fingerprint(f"{mine.place.name} failed: {error}"), comm)
    await agreement.begin()
    with suppress(DisagreementError):
        await agreement.passed()
    await describe_all(mine.describe(error), comm)
    mine.place.last_failed = False
    mine.place.unanimous = error


async def _settled(mine: _Brought, comm: Comm) -> Leaves:
    """This rank's leaves with zeros for those that only others have, or raise on every rank."""
    everyone = await describe_all(mine.describe(), comm)
    mine.place.last_failed = False  # every rank knows by now
    try:
        wanted = settle(everyone, mine.describe())
    except Exception as error:
        mine.place.unanimous = error
        raise
    device = next((leaf.device for leaf in mine.leaves.values()), torch.device("cpu"))
    zeros = {
        path: torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for path, (shape, dtype) in wanted.items()
    }
    found = mine.leaves | zeros
    return {path: found[path] for path in mine.paths if path in found}


def _check_weight(pipeline: Pipeline, options: Options) -> None:
    check_weight(options.weight)
    if options.weight is None:
        return
    if pipeline.works_on == "parameters":
        raise ValueError(
            f"weight={options.weight}: {pipeline!r} works on parameters, and weights belong to means of "
            "gradients; leave the weight out"
        )
    for stage in pipeline.walk():
        if isinstance(stage, Reducer) and not stage.averages:
            raise ValueError(
                f"weight={options.weight}: {stage!r} does not give every rank a mean, and weights belong to means; "
                'use a reducer with op="mean", or leave the weight out'
            )


async def _streamed(
    pipeline: Pipeline, leaves: Leaves, state: State, comm: Comm, arrivals: Arrivals
) -> tuple[Leaves, State]:
    """Start before all leaves are there; if in the end others came than were expected, do it again with those."""

    async def incoming(paths: Sequence[str], comm: Comm) -> Leaves:
        return await comm.arrival(arrivals, paths)

    streaming = comm.replace(incoming=incoming)
    if arrivals.certain:
        return await apply_settled(pipeline, leaves, state, streaming)
    if not pipeline.streams:
        used = await _used(arrivals, comm)
        return await pipeline.apply(arrivals.exactly(used), state, comm)
    out, new_state = await pipeline.apply(leaves, state, streaming)
    if await _used(arrivals, comm) == arrivals.expected:
        return out, new_state
    return await pipeline.apply(arrivals.exactly(arrivals.used), state, comm)


async def _used(arrivals: Arrivals, comm: Comm) -> frozenset[str]:
    """The leaves that have come on some rank, when nothing is left to come."""
    paths = list(arrivals.like)
    await comm.arrival(arrivals, paths)
    arrivals.used = await any_of(paths, arrivals.delivered, comm)
    return arrivals.used


async def _weighted(
    pipeline: Pipeline, leaves: Leaves, state: State, comm: Comm, weight: float
) -> tuple[Leaves, State]:
    """Leading maps first, then this rank's tree times n*w/sum(w), then the rest."""
    weights = await gather_numbers(weight, comm)
    total = math.fsum(weights)
    if total == 0:
        raise ValueError(
            "weight: the weights of all ranks are zero, so there is no mean; skip the call when no rank has samples"
        )
    stages = list(pipeline.program) if isinstance(pipeline, Chain) else [pipeline]
    first = next((i for i, stage in enumerate(stages) if stage.communicates), len(stages))
    for stage in stages[:first]:
        leaves, _ = await stage.apply(leaves, {}, comm)
    factor = len(weights) * weight / total
    # Down by a power of two that makes every rank's factor at most 1, and up again after the mean: 40000 in float16
    # times 1.8 would overflow. Not where state is kept, which must mean the same at every step.
    shift = 1.0 if pipeline.stateful else _power_of_two(len(weights) * max(weights) / total)
    leaves = {
        path: scaled(leaf, factor / shift if _fractional(leaf) else factor, path) for path, leaf in leaves.items()
    }
    rest = stages[first : first + 1] + [_Rescale(shift)] * (shift != 1) + stages[first + 1 :]
    return await Chain(tuple(rest)).apply(leaves, state, comm.replace(owned=True))


@dataclass(frozen=True, repr=False)
class _Rescale(Pipeline):
    """Takes the power of two back."""

    factor: float

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        return {p: scaled(leaf, self.factor, p) if _fractional(leaf) else leaf for p, leaf in tree.items()}, state


def _power_of_two(number: float) -> float:
    """The smallest power of two that is not below `number`."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def _fractional(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _apart(leaves: Leaves) -> bool:
    """Whether no two leaves share memory, so that a donated one can be overwritten while another is read."""
    extents = sorted((leaf.data_ptr(), leaf.data_ptr() + _extent(leaf)) for leaf in leaves.values() if leaf.numel())
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(extents))


def _extent(leaf: Tensor) -> int:
    return (
        sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)) + 1
    ) * leaf.dtype.itemsize


def _private(out: Leaves, inputs: Leaves) -> Leaves:
    """`out` with copies of those leaves that share storage with an input."""
    theirs = {leaf.untyped_storage().data_ptr() for leaf in inputs.values()}
    return {
        path: fresh_copy(leaf) if leaf.untyped_storage().data_ptr() in theirs else leaf for path, leaf in out.items()
    }
