"""`piecewise`: one pipeline after another, by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, apply_settled
from ptcollect.state import State, joined, part
from ptcollect.tree import Leaves
from ptcollect.value import refuse_tree


def piecewise(pieces: Mapping[int, Pipeline]) -> Pipeline:
    r"""Run the pipeline whose first step has come last: a dense warm-up, or ever sparser compression.

    .. math:: y_t = \text{pipeline}_{\max \{ s : s \le t \}}(x_t)

    with t the state's step count, the same on all ranks. State of a piece that has not begun is what `init` made; when
    a piece begins, residuals of the piece before it move over where both keep one for a path, so nothing is lost.

    Args:
        pieces: first step -> pipeline; one of them 0.

    Returns:
        A stateful Pipeline, with state ``{"piece": int}`` beside that of its pieces.

    Raises:
        PipelineError: no piece begins at step 0, a key is no step, or a value no pipeline.

    Source: Lin et al. 2018, Deep gradient compression, section 3.3 (warm-up with falling ratios).

    >>> import torch, ptcollect as pc
    >>> sync = pc.piecewise({0: pc.ring_reduce(), 1: pc.chain(pc.compress("bf16"), pc.ring_reduce())})
    >>> first = pc.simulate(sync, [torch.ones(4)] * 2)
    >>> first.bytes, pc.simulate(sync, [torch.ones(4)] * 2, first.states).bytes
    ([16, 16], [8, 8])
    """
    refuse_tree("piecewise", "pieces", pieces)
    checked = dict[Any, Any](pieces)
    if 0 not in checked:
        raise PipelineError(f"piecewise(pieces): expected {{0: pipeline, step: pipeline, ...}}, got {pieces!r}")
    for step, pipeline in checked.items():
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise PipelineError(
                f"piecewise: the first step of a piece: expected a whole number from 0 on, got {step!r}"
            )
        if not isinstance(pipeline, Pipeline):
            raise PipelineError(
                f"piecewise: at step {step} expected a pipeline, got {pipeline!r}; a transform needs a reducer"
            )
    return Piecewise(tuple(sorted(pieces.items())))


@dataclass(frozen=True, repr=False)
class Piecewise(Pipeline):
    """See `piecewise`."""

    name = "piecewise"

    pieces: tuple[tuple[int, Pipeline], ...]

    def __repr__(self) -> str:
        return f"piecewise({{{', '.join(f'{step}: {pipeline!r}' for step, pipeline in self.pieces)}}})"

    def children(self) -> tuple[Pipeline, ...]:
        return tuple(pipeline for _, pipeline in self.pieces)

    @property
    def consensus(self) -> bool:
        return all(child.consensus for child in self.children())

    @property
    def fresh(self) -> bool:
        return all(child.fresh for child in self.children())

    @property
    def streams(self) -> bool:
        return True

    @property
    def uses_step(self) -> bool:
        return True

    @property
    def state_names(self) -> tuple[str, ...]:
        return (self.name, *super().state_names)

    def begin(self, params: Leaves) -> State:
        own = {self.name: {"piece": 0}}  # the piece that ran last
        return joined(self.state_names, [own, *(child.begin(params) for child in self.children())])

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        stops = list(accumulate((len(child.state_names) for child in self.children()), initial=1))
        states = [part(state, self.state_names, *ends) for ends in pairwise(stops)]
        now = max(i for i, (first, _) in enumerate(self.pieces) if first <= comm.step)
        last = state[self.name]["piece"]
        if now != last:
            states[last], states[now] = _moved(states[last], states[now])
        out, states[now] = await apply_settled(self.pieces[now][1], tree, states[now], comm)
        return out, joined(self.state_names, [{self.name: {"piece": now}}, *states])


def _moved(before: State, after: State) -> tuple[State, State]:
    """The two states with the residuals of `before` moved into `after` where both have one for a path."""
    wanted = {path for own in after.values() for path in own.get("residual", ())}
    moving = {path: e for own in before.values() for path, e in own.get("residual", {}).items() if path in wanted}
    left = {stage: _changed(own, lambda path, e: e * 0 if path in moving else e) for stage, own in before.items()}
    got = {
        stage: _changed(own, lambda path, e: e + moving[path] if path in moving else e) for stage, own in after.items()
    }
    return left, got


def _changed(own: State, change: Callable[[str, Tensor], Tensor]) -> State:
    if "residual" not in own:
        return own
    return {**own, "residual": {path: change(path, e) for path, e in own["residual"].items()}}
