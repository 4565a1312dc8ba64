"""`streaming_diloco`: DiLoCo on one fragment of the parameters after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.parameters.diloco import anchored, arrived, keys, moving_leaves
from ptcollect.parameters.outer import DEFAULT, begin_outer, check_outer, step_outer
from ptcollect.pipeline import Pipeline, Transform
from ptcollect.replicas import SameEverywhere
from ptcollect.state import State
from ptcollect.tree import Leaves, sorted_paths
from ptcollect.value import whole_number


def streaming_diloco(
    every: int = 100, *, fragments: int = 2, delay: int = 0, alpha: float = 0.0, outer: Any = None
) -> StreamingDiLoCo:
    r"""DiLoCo on fragments in turn, so that the peak of what is sent falls to a fragment's share.

    .. math:: \Delta_p = \frac{1}{n} \sum_r (\theta_p - \theta_{r,p}), \quad
        \theta_p \leftarrow \text{outer}(\theta_p, \Delta_p), \quad
        \theta_{r,p} \leftarrow \alpha \theta_{r,p} + (1 - \alpha) \theta_p \ \text{after } \tau \text{ more steps}

    Leaf i in natural order belongs to fragment i mod P. Fragment p is sent every H steps, p H/P steps before fragment
    0; between sending and using it the ranks train on for tau steps, as they would while it travels. What has been
    received and not yet used waits in the state. The message itself is sent and received within the call of its step:
    to train on meanwhile, ``start`` that call and ``wait`` before the next one.

    Args:
        every: H, steps from one round of a fragment to its next.
        fragments: P, from 1 to H.
        delay: tau, steps from sending a fragment to using it, below H; 0: at once.
        alpha: how much of its own parameters a rank keeps when it uses a fragment, from 0 to below 1.
        outer: as for `diloco`.

    Returns:
        A Transform that works on parameters, with state ``{"anchor", "outer", "arrived"}``, by path; named as
        `diloco`'s where ranks differ.

    Raises:
        ValueError: a number out of its range.
        PipelineError: `outer` is no optimiser.
        TreeMismatchError: in the first round, if the ranks began with different parameters.

    Source: Douillard et al. 2025, Streaming DiLoCo with overlapping communication: towards a distributed free lunch,
    algorithm 2.

    >>> import torch, ptcollect as pc
    >>> sync = pc.chain(pc.streaming_diloco(2, fragments=2, outer=pc.sgd(1.0)), pc.ring_reduce())
    >>> trees = [{"a": torch.full((2,), r), "b": torch.full((2,), r)} for r in (1.0, 3.0)]
    >>> states = [sync.init({"a": torch.zeros(2), "b": torch.zeros(2)})] * 2
    >>> first = pc.simulate(sync, trees, states)  # fragment 1: b
    >>> first.trees[0], first.bytes
    ({'a': tensor([1., 1.]), 'b': tensor([2., 2.])}, [8, 8])
    >>> pc.simulate(sync, first.trees, first.states).trees[0]  # fragment 0: a
    {'a': tensor([2., 2.]), 'b': tensor([2., 2.])}
    """
    chosen = DEFAULT if outer is None else outer
    check_outer(chosen)
    whole_number("streaming_diloco(every)", every)
    whole_number("streaming_diloco(fragments=...)", fragments)
    whole_number("streaming_diloco(delay=...)", delay, least=0)
    if fragments > every:
        raise ValueError(f"streaming_diloco(fragments=...): expected at most every={every}, got {fragments}")
    if delay >= every:
        raise ValueError(f"streaming_diloco(delay=...): expected less than every={every} steps, got {delay}")
    if isinstance(alpha, bool) or not 0 <= alpha < 1:
        raise ValueError(f"streaming_diloco(alpha=...): expected a number from 0 to below 1, got {alpha!r}")
    return StreamingDiLoCo(every, fragments, delay, alpha, chosen)


@dataclass(frozen=True, repr=False)
class StreamingDiLoCo(Transform):
    """See `streaming_diloco`."""

    name = "streaming_diloco"
    works_on = "parameters"
    stateful = True
    uses_step = True
    goes_outside_error_feedback = True

    every: int = 100
    fragments: int = 2
    delay: int = 0
    alpha: float = 0.0
    outer: Any = DEFAULT

    def fragment_at(self, step: int) -> int | None:
        """The fragment that is sent at `step`, if one is."""
        return next((f for f in range(self.fragments) if self._rounds(f, step + 1) > self._rounds(f, step)), None)

    def _rounds(self, fragment: int, step: int) -> int:
        """How often `fragment` has been sent before `step`."""
        earlier = fragment * self.every // self.fragments
        return (step + earlier) // self.every

    def quiet(self, step: int) -> bool:
        return self.fragment_at(step) is None

    def init(self, inner: Pipeline, params: Leaves) -> State:
        anchor = anchored(params)
        anchor_key, outer_key = keys(inner)
        outer = {str(f): begin_outer(self.outer, self._fragment(anchor, f)) for f in range(self.fragments)}
        waiting = {ARRIVED[anchor_key]: {path: leaf.clone() for path, leaf in anchor.items()}} if self.delay else {}
        return {anchor_key: anchor, outer_key: outer, **waiting, "inner": inner.begin(anchor)}

    def _fragment(self, leaves: Leaves, fragment: int) -> Leaves:
        return {path: leaves[path] for path in sorted_paths(leaves)[fragment :: self.fragments]}

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        anchor_key, outer_key = keys(inner)
        after, out = dict(state), dict(tree)
        sent = self.fragment_at(comm.step)
        if sent is not None:
            anchor: Leaves = state[anchor_key]
            moving = moving_leaves(tree, anchor, repr(self))
            if not any(self._rounds(fragment, comm.step) for fragment in range(self.fragments)):
                await SameEverywhere().apply(anchor, {}, comm)
            part = self._fragment(anchor, sent)
            moved = {path: leaf - moving[path] for path, leaf in part.items() if path in moving}
            inside = comm.replace(step=self._rounds(sent, comm.step), owned=True)
            mean, after["inner"] = await inner.apply(moved, state["inner"], inside)
            new, outer = step_outer(self.outer, mean, state[outer_key][str(sent)], part)
            after[anchor_key], after[outer_key] = {**anchor, **new}, {**state[outer_key], str(sent): outer}
            if self.delay:
                after[ARRIVED[anchor_key]] = {**state[ARRIVED[anchor_key]], **new}
        used = self.fragment_at(comm.step - self.delay) if comm.step >= self.delay else None
        if used is not None:
            values: Leaves = after[ARRIVED[anchor_key] if self.delay else anchor_key]
            for path, value in self._fragment(values, used).items():
                if path in tree:
                    out[path] = arrived(self._merged(tree[path], value), tree[path])
        return out, after

    def _merged(self, own: Tensor, value: Tensor) -> Tensor:
        return value if not self.alpha else self.alpha * own.to(value.dtype) + (1 - self.alpha) * value


ARRIVED = {"anchor": "arrived", "own_anchor": "own_arrived"}
"""Key of the anchor -> key of what has been received and not been used yet."""
