"""`diloco`: an outer optimiser on what the ranks moved by in many steps of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.dtypes import restrided, wide_dtype
from ptcollect.errors import PipelineError
from ptcollect.parameters.outer import DEFAULT, begin_outer, check_outer, step_outer
from ptcollect.pipeline import Pipeline, Transform
from ptcollect.replicas import SameEverywhere
from ptcollect.state import State
from ptcollect.tree import Leaves
from ptcollect.value import whole_number


def diloco(every: int = 500, *, outer: Any = None) -> DiLoCo:
    r"""Let the ranks train by themselves for H steps, then treat what they moved by as a gradient.

    .. math:: \Delta = \frac{1}{n} \sum_r (\theta - \theta_r), \quad \theta \leftarrow \text{outer}(\theta, \Delta),
        \quad \theta_r \leftarrow \theta

    Call the pipeline on the parameters once per step, after the inner optimiser's:
    ``state = sync_params(pipeline, module, state)``. On all steps but every H-th nothing is sent and the parameters
    stay as they are. The pseudo-gradient goes through the pipeline inside, so codecs, `error_feedback`, `low_rank`,
    `shard` and `gossip_avg` mean there what they mean for gradients; for them, steps are rounds. It is float32 at
    least, as the anchor is. Leaves of integers are left alone. The ranks must start from the same parameters, which the
    first round compares.

    Args:
        every: H, inner steps from one round to the next.
        outer: the outer optimiser: `nesterov`, `sgd`, or any pair ``init(params)``, ``update(gradients, state,
            params)`` whose updates are added, optax's and torchopt's included; None: ``nesterov(0.7, momentum=0.9)``.

    Returns:
        A Transform that works on parameters, with state ``{"anchor": {path: tensor}, "outer": {...}}``, the same on all
        ranks; with a pipeline inside that does not end with the same bits everywhere, as gossip, both are each rank's
        own and called ``"own_anchor"`` and ``"own_outer"``.

    Raises:
        ValueError: `every` is no whole number from 1.
        PipelineError: `outer` is no such pair.
        TreeMismatchError: in the first round, if the ranks began with different parameters; names the first.

    Source: Douillard et al. 2023, DiLoCo: distributed low-communication training of language models, algorithm 1.

    >>> import torch, ptcollect as pc
    >>> sync = pc.chain(pc.diloco(2, outer=pc.nesterov(0.5, momentum=0.5)), pc.bucketize(), pc.ring_reduce())
    >>> sync
    chain(diloco(2, outer=nesterov(0.5, momentum=0.5)), bucketize(), ring_reduce())
    >>> start = torch.zeros(2)
    >>> states = [sync.init(start)] * 2
    >>> once = pc.simulate(sync, [start - 1, start - 2], states)
    >>> once.trees, once.messages
    ([tensor([-1., -1.]), tensor([-2., -2.])], [0, 0])
    >>> pc.simulate(sync, [start - 2, start - 4], once.states).trees[0]  # 3 * 0.5 * (1 + 0.5) below
    tensor([-2.2500, -2.2500])
    """
    chosen = DEFAULT if outer is None else outer
    check_outer(chosen)
    return DiLoCo(whole_number("diloco(every)", every), chosen)


@dataclass(frozen=True, repr=False)
class DiLoCo(Transform):
    """See `diloco`."""

    name = "diloco"
    works_on = "parameters"
    stateful = True
    uses_step = True
    goes_outside_error_feedback = True

    every: int = 500
    outer: Any = DEFAULT

    def quiet(self, step: int) -> bool:
        return (step + 1) % self.every != 0

    def init(self, inner: Pipeline, params: Leaves) -> State:
        anchor = anchored(params)
        anchor_key, outer_key = keys(inner)
        return {anchor_key: anchor, outer_key: begin_outer(self.outer, anchor), "inner": inner.begin(anchor)}

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        if self.quiet(comm.step):
            return tree, state
        anchor_key, outer_key = keys(inner)
        anchor = state[anchor_key]
        moving = moving_leaves(tree, anchor, repr(self))
        number = (comm.step + 1) // self.every - 1
        if number == 0:
            await SameEverywhere().apply(anchor, {}, comm)
        moved = {path: anchor[path] - leaf for path, leaf in moving.items()}
        mean, after = await inner.apply(moved, state["inner"], comm.replace(step=number, owned=True))
        stepped, outer_state = step_outer(self.outer, mean, state[outer_key], anchor)
        new = {**anchor, **stepped}
        out = {path: arrived(new[path], leaf) if path in moving else leaf for path, leaf in tree.items()}
        return out, {anchor_key: new, outer_key: outer_state, "inner": after}


def keys(inner: Pipeline) -> tuple[str, str]:
    """What anchor and outer state are called: those that differ between ranks have names of their own."""
    return ("anchor", "outer") if inner.consensus else ("own_anchor", "own_outer")


def anchored(params: Leaves) -> Leaves:
    """The parameters that a round begins with, in storage of their own."""
    return {path: leaf.detach().to(wide_dtype(leaf.dtype), copy=True) for path, leaf in params.items() if _moves(leaf)}


def moving_leaves(tree: Leaves, anchor: Leaves, stage: str) -> Leaves:
    """The leaves of `tree` that are averaged.

    Raises:
        PipelineError: one of them was not there, or had another shape, when the state was made.
    """
    moving = {path: leaf for path, leaf in tree.items() if _moves(leaf)}
    for path, leaf in moving.items():
        if path not in anchor or anchor[path].shape != leaf.shape:
            had = f"{tuple(anchor[path].shape)}" if path in anchor else "nothing"
            raise PipelineError(
                f"{stage}: leaf {path!r} has shape {tuple(leaf.shape)} and the state's anchor has {had}; make the "
                "state with pipeline.init(params) of these parameters"
            )
    return moving


def arrived(value: Tensor, like: Tensor) -> Tensor:
    """`value` as a parameter: in the dtype and strides of `like`, in storage of its own."""
    return restrided(value.to(like.dtype, copy=True), like)


def _moves(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()
