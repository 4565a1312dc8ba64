"""`skip_nonfinite`: a step in which any rank has NaN or infinity is skipped by all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ptcollect.agreement import any_rank
from ptcollect.comm import Comm
from ptcollect.dtypes import with_strides
from ptcollect.errors import NonFiniteError
from ptcollect.pipeline import Pipeline, Transform
from ptcollect.state import State
from ptcollect.tree import Leaves
from ptcollect.value import whole_number


def skip_nonfinite(*, patience: int | None = None) -> Transform:
    r"""Skip a step in which some rank has NaN or infinity: the result is zeros, the state inside stays as it was.

    .. math::
        y = \begin{cases} \text{inner}(x) & \text{if all } x_r \text{ are finite} \\ 0 & \text{otherwise} \end{cases}

    All ranks decide alike, from one byte that they exchange before the tree. So a NaN never gets into residuals: put it
    before `error_feedback`.

    Args:
        patience: raise after more than that many skipped steps in a row; None: never.

    Returns:
        A Transform with state ``{"skipped": int, "in_a_row": int}``, the same on all ranks.

    Raises:
        ValueError: `patience` is negative.
        NonFiniteError: on every rank, when patience is at an end.

    Source: Micikevicius et al. 2018, Mixed precision training, section 3.2 (skipped updates under loss scaling).

    >>> import torch, ptcollect as pc
    >>> sync = pc.chain(pc.skip_nonfinite(), pc.ring_reduce())
    >>> run = pc.simulate(sync, [torch.tensor([1.0]), torch.tensor([float("nan")])])
    >>> run.trees[0], run.states[0]["skip_nonfinite"]
    (tensor([0.]), {'skipped': 1, 'in_a_row': 1})
    """
    if patience is not None:
        whole_number("skip_nonfinite(patience=...)", patience, least=0)
    return SkipNonfinite(patience)


@dataclass(frozen=True, repr=False)
class SkipNonfinite(Transform):
    """See `skip_nonfinite`."""

    name = "skip_nonfinite"
    stateful = True
    manages_ownership = True
    goes_outside_error_feedback = True

    patience: int | None = None

    def init(self, inner: Pipeline, params: Leaves) -> State:
        return {"skipped": 0, "in_a_row": 0, "inner": inner.begin(params)}

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        bad = [path for path, leaf in tree.items() if not _finite(leaf)]
        if not await any_rank(bool(bad), comm):
            out, inner_state = await inner.apply(tree, state["inner"], comm)
            return out, {"skipped": state["skipped"], "in_a_row": 0, "inner": inner_state}
        in_a_row = state["in_a_row"] + 1
        if self.patience is not None and in_a_row > self.patience:
            here = f"here in leaf {bad[0]!r}" if bad else "on another rank"
            raise NonFiniteError(
                f"{self!r}: NaN or infinity in {in_a_row} steps in a row, this time {here}; lower the learning rate or "
                "the loss scale, or look for the operation that makes them with torch.autograd.detect_anomaly"
            )
        zeros = {
            path: with_strides(torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device), leaf)
            for path, leaf in tree.items()
        }
        return zeros, {"skipped": state["skipped"] + 1, "in_a_row": in_a_row, "inner": state["inner"]}


def _finite(leaf: torch.Tensor) -> bool:
    if leaf.is_meta:  # has no values: a plan is one of a step that is not skipped
        return True
    if leaf.is_floating_point() and leaf.dtype.itemsize == 1:
        leaf = leaf.to(torch.float32)
    # A sum of finite numbers may overflow, but one that is finite had no NaN or infinity in it; so ask fully only if
    # not.
    return bool(torch.isfinite(leaf.sum())) or bool(torch.isfinite(leaf).all())
