"""`chain`: the readable spelling of transforms around pipelines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, overload

from ptcollect.comm import Comm
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, Transform, Wrapped, apply_settled
from ptcollect.profiling import span
from ptcollect.state import State, joined, part
from ptcollect.tree import Leaves
from ptcollect.value import refuse_tree


@overload
def chain(*stages: Transform) -> Transform: ...  # type: ignore[overload-overlap]  # chain() is a Pipeline
@overload
def chain(*stages: Pipeline | Transform) -> Pipeline: ...
def chain(*stages: Pipeline | Transform) -> Pipeline | Transform:
    """Compose stages, read from the left.

    Each transform wraps everything up to and including the next reducer and is undone, innermost first, when that
    returns; what follows sees the whole tree again. So ``chain(bucketize(), compress("bf16"), ring_reduce(),
    clip_by_global_norm(1.0))`` clips the averaged gradient. ``chain(T, chain(P, Q))`` flattens, so T wraps P;
    ``T(chain(P, Q))`` wraps both.

    Args:
        *stages: pipelines and transforms; none at all is the identity.

    Returns:
        A Pipeline; a Transform (a reusable prefix) if every stage is one; the stage itself if it is the only one.

    Raises:
        PipelineError: the stages cannot work in this order; the message shows both and the corrected order.

    >>> import ptcollect as pc
    >>> prefix = pc.chain(pc.bucketize("1MiB"), pc.compress("bf16"))
    >>> pc.chain(prefix, pc.ring_reduce(), pc.scale(2.0))
    chain(bucketize("1MiB"), compress("bf16"), ring_reduce(), scale(2.0))
    >>> pc.chain(pc.ring_reduce(), pc.bucketize())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ptcollect.errors.PipelineError: bucketize() has no reducer after it ... write chain(bucketize(), ring_reduce())
    """
    flat: list[Pipeline | Transform] = []
    for stage in stages:
        if isinstance(stage, (Chain, Prefix)):
            flat.extend(stage.stages)
        elif isinstance(stage, (Pipeline, Transform)):
            flat.append(stage)
        else:
            raise _not_a_stage(stage)
    if len(flat) == 1:
        return flat[0]
    transforms = [stage for stage in flat if isinstance(stage, Transform)]
    if flat and len(transforms) == len(flat):
        return Prefix(tuple(transforms))
    return Chain(tuple(flat))


@dataclass(frozen=True, repr=False)
class Chain(Pipeline):
    """Stages as the user wrote them, and the pipelines they amount to."""

    stages: tuple[Pipeline | Transform, ...]
    program: tuple[Pipeline, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "program", _compose(self.stages))

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.stages))})"

    def children(self) -> tuple[Pipeline, ...]:
        return self.program

    @property
    def streams(self) -> bool:
        return next((child.streams for child in self.program if not child.local_and_leafwise), True)

    @property
    def fresh(self) -> bool:
        return bool(self.program) and self.program[-1].fresh

    def begin(self, params: Leaves) -> State:
        return joined(self.state_names, [child.begin(params) for child in self.program])

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        states: list[State] = []
        start = 0
        for child in self.program:
            stop = start + len(child.state_names)
            if comm.incoming is not None and child.local_and_leafwise:
                comm = comm.replace(owned=child.fresh, incoming=_mapped(child, tree, comm))
                states.append({})
                continue
            before = tree
            # What sends nothing runs without a pause.
            with span(repr(child)) if not child.communicates and comm.incoming is None else nullcontext():
                tree, new = await apply_settled(child, tree, part(state, self.state_names, start, stop), comm)
            if tree is not before:  # fresh tensors: whoever comes next may overwrite them
                comm = comm.replace(owned=child.fresh, incoming=None)
            states.append(new)
            start = stop
        return tree, joined(self.state_names, states)


def _mapped(child: Pipeline, tree: Leaves, comm: Comm) -> Callable[[Sequence[str], Comm], Awaitable[Leaves]]:
    """Where the values of leaves come from after a map that treats each leaf alone."""

    async def incoming(paths: Sequence[str], _: Comm) -> Leaves:
        leaves, _state = await child.apply(await comm.arrived(tree, paths), {}, comm.replace(incoming=None))
        return leaves

    return incoming


@dataclass(frozen=True, repr=False)
class Prefix(Transform):
    """A chain of transforms only."""

    stages: tuple[Transform, ...]

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.stages))})"

    def __call__(self, inner: Pipeline) -> Pipeline:
        refuse_tree(repr(self), "inner", inner)
        for transform in reversed(self.stages):
            inner = transform(inner)
        return inner


def _compose(stages: Sequence[Pipeline | Transform]) -> tuple[Pipeline, ...]:
    program: list[Pipeline] = []
    rest = list(stages)
    while rest:
        stage = rest.pop(0)
        if isinstance(stage, Pipeline):
            program.append(stage)
            continue
        end = next((i for i, later in enumerate(rest) if isinstance(later, Pipeline) and later.communicates), None)
        if end is None:
            raise _no_reducer(stage, stages)
        inside, rest = rest[: end + 1], rest[end + 1 :]
        inner = inside[0] if len(inside) == 1 else Chain(tuple(inside))
        assert isinstance(inner, Pipeline)  # noqa: S101  (its last stage communicates)
        program.append(stage(inner))
    return tuple(program)


def _no_reducer(stage: Transform, stages: Sequence[Pipeline | Transform]) -> PipelineError:
    written = ", ".join(map(repr, stages))
    others = [other for other in stages if other is not stage]
    last = next(
        (i for i, other in reversed(list(enumerate(others))) if isinstance(other, Pipeline) and other.communicates),
        None,
    )
    end = max(i for i, each in enumerate(stages) if isinstance(each, Transform)) + 1
    fixed: list[Any] = [*stages[:end], stage.example_reducer(), *stages[end:]]
    if last is not None:
        with suppress(PipelineError):  # that reducer may not do
            moved = [*others[:last], stage, *others[last:]]
            _compose(moved)
            fixed = moved
    return PipelineError(
        f"{stage!r} has no reducer after it in chain({written}); write chain({', '.join(map(str, fixed))})"
    )


def moved_out(stage: Pipeline | Transform, outer: Transform, inner: Pipeline) -> str:
    """Code for `outer` around `inner` with `stage` taken out: before `outer`, or at the end if a reducer came first."""
    stages = list(_written(inner))
    at = next((i for i, each in enumerate(stages) if each is stage), 0)
    others = [each for each in stages if each is not stage]
    late = any(isinstance(each, Pipeline) and each.communicates for each in stages[:at])
    fixed = [outer, *others, stage] if late else [stage, outer, *others]
    return f"chain({', '.join(map(repr, fixed))})"


def _written(pipeline: Pipeline) -> Iterator[Pipeline | Transform]:
    """The stages of `pipeline` in the order in which they are written."""
    if isinstance(pipeline, Chain):
        for stage in pipeline.stages:
            yield from _written(stage) if isinstance(stage, Pipeline) else (stage,)
    elif isinstance(pipeline, Wrapped):
        yield pipeline.transform
        yield from _written(pipeline.inner)
    else:
        yield pipeline


def _not_a_stage(stage: object) -> PipelineError:
    try:
        refuse_tree("chain", "stage", stage)
    except PipelineError as error:
        return error
    return PipelineError(f"chain(...) takes pipelines and transforms, got {type(stage).__name__}: {stage!r}")
