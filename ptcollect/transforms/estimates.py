"""Error feedback around gossip: what travels is the difference to what neighbours know already.

`error_feedback` does this where the reducer inside keeps what encoding drops, as `gossip_avg` does: a residual added to
the next input would then count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.dtypes import accumulation_dtype, from_flat, restrided, wide_dtype
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, Wrapped
from ptcollect.reducers.reducer import Reducer
from ptcollect.state import State
from ptcollect.tree import Leaves


def keeps_dropped(inner: Pipeline) -> bool:
    """Whether the reducers in `inner` keep what encoding drops."""
    return any(reducer.factory.keeps_dropped for reducer in _reducers(inner))


def check(inner: Pipeline, feedback: str) -> None:
    """Raise a PipelineError if estimates cannot be kept around `inner`."""
    for reducer in _reducers(inner):
        if not reducer.factory.keeps_dropped:
            raise PipelineError(
                f"{feedback} around {inner!r}: it feeds back estimates to gossip and residuals to {reducer!r}; give "
                f"each its own, as in partition({{...: chain({feedback}, ...), ...}})"
            )
        if reducer.uses_step:
            raise PipelineError(
                f"{feedback} around {reducer!r}: estimates are of what fixed neighbours know, and these change from "
                'step to step; use a topology that does not, such as "exponential" or "ring"; without error_feedback '
                "the mean is kept too"
            )
    for stage in inner.walk():
        if isinstance(stage, Wrapped) and stage.transform.sends:
            raise PipelineError(
                f"{stage.transform!r} between {feedback} and gossip encodes by itself, so what neighbours know is not "
                f"what was sent; leave {feedback} out: the mean is kept without"
            )


def init(inner: Pipeline, params: Leaves) -> State:
    """Nobody knows anything: all estimates are zero."""
    floating = {path: leaf for path, leaf in params.items() if _floating(leaf, path)}

    def zeros(dtype: Callable[[torch.dtype], torch.dtype]) -> Leaves:
        return {path: torch.zeros(p.shape, dtype=dtype(p.dtype), device=p.device) for path, p in floating.items()}

    return {"estimate": zeros(wide_dtype), "pull": zeros(_double), "inner": inner.begin(params)}


async def update(inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
    """Send the differences, and move by all that estimates of neighbours differ from one's own."""
    tree, comm = await comm.settled(tree)
    estimates: Leaves = dict(state["estimate"])
    pulls: Leaves = dict(state["pull"])
    floating = [path for path, leaf in tree.items() if _floating(leaf, path)]
    # In float64: whatever rounding leaves in a pull would move the mean again at every step to come.
    given = {
        path: tree[path].to(pulls[path].dtype) - estimates[path] if path in floating else tree[path] for path in tree
    }
    lost: Leaves = {}
    wires = {path: comm.wire_dtype(path, tree[path]) for path in floating}
    inside = comm.replace(owned=False, residuals=lost, wire_dtypes={**comm.wire_dtypes, **wires})
    out, inner_state = await inner.apply(given, state["inner"], inside)
    for path in floating:
        difference = given[path]
        sent = difference - from_flat(lost[path], difference) if path in lost else difference
        estimates[path] = (estimates[path] + sent).to(estimates[path].dtype)
        pulls[path] = pulls[path] + (out[path] - difference)
        out[path] = restrided((tree[path] + pulls[path]).to(tree[path].dtype), tree[path])
    return out, {"estimate": estimates, "pull": pulls, "inner": inner_state}


def _reducers(inner: Pipeline) -> Iterator[Reducer]:
    return (stage for stage in inner.walk() if isinstance(stage, Reducer))


def _double(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(wide_dtype(dtype), torch.float64)


def _floating(leaf: Tensor, path: str) -> bool:
    return accumulation_dtype(leaf.dtype, path).is_floating_point
