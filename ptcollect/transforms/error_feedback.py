"""`error_feedback`: what encoding dropped in one step is added to the next step's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ptcollect.chain import Chain
from ptcollect.comm import Comm
from ptcollect.dtypes import accumulation_dtype, fresh_copy, from_flat, restrided, wide_dtype
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, Transform, Wrapped, apply_settled
from ptcollect.profiling import span
from ptcollect.reducers.reducer import Reducer
from ptcollect.state import State
from ptcollect.transforms import estimates
from ptcollect.transforms.shard import dims_of
from ptcollect.tree import Leaves


def error_feedback() -> Transform:
    r"""Carry what compression dropped into the next step, so that nothing is lost over time.

    .. math:: x_t = g_t + e_t, \qquad e_{t+1} = x_t - (\text{what of } x_t \text{ arrived})

    Every encoder books what its codec dropped, at hops too, in units of this rank's input. Hence, over any number of
    steps, n times the sum of the mean results plus the sum over ranks of the residuals is the sum of all gradients, to
    rounding.

    Around `gossip_avg` it compresses differences instead, for there what encoding drops stays with the sender already.
    Each rank keeps the estimate that its neighbours have of its tensor, and how theirs pull at its own:

    .. math:: q_i = D(C(x_i - \hat x_i)), \quad \hat x_i \leftarrow \hat x_i + q_i, \quad
        y_i = x_i + \gamma \sum_j W_{ij} (\hat x_j - \hat x_i)

    so that what travels vanishes as ranks agree, and gossip on parameters comes to the mean at a linear rate, as long
    as the step size suits the codec. Every step keeps the sum over ranks.

    Returns:
        A Transform with state ``{"residual": {path: tensor}}``: one residual per floating leaf, of its shape and in
        float32 at least; around gossip ``{"estimate": {path: tensor}, "pull": {path: tensor}}``. They differ between
        ranks.

    Raises:
        PipelineError: when it wraps a pipeline that loses nothing, that cannot report what it lost (`all_reduce`), or
            that has a map in it (which would treat the residual again); the message shows the order that works.

    Source: Karimireddy et al. 2019, Error feedback fixes SignSGD and other gradient compression schemes, algorithm 2;
    Seide et al. 2014, 1-bit stochastic gradient descent, section 3; around gossip Koloskova, Stich and Jaggi 2019,
    Decentralized stochastic optimization and gossip algorithms with compressed communication, algorithms 1 and 2.

    >>> import torch, ptcollect as pc
    >>> sync = pc.chain(pc.error_feedback(), pc.compress("bf16"), pc.all_to_all_avg())
    >>> run = pc.simulate(sync, [torch.tensor([1.001]), torch.tensor([3.0])])
    >>> run.trees[0], run.states[0]["error_feedback"]["residual"]
    (tensor([2.]), {'<tensor>': tensor([0.0010])})
    """
    return ErrorFeedback()


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Transform):
    """See `error_feedback`."""

    name = "error_feedback"
    stateful = True
    streams = True
    manages_ownership = True
    goes_outside_error_feedback = True  # a second one would find nothing left

    def check(self, inner: Pipeline) -> None:
        stages = list(inner.walk())
        for stage in stages:
            transform = stage.transform if isinstance(stage, Wrapped) else None
            if transform is not None and transform.goes_outside_error_feedback:
                raise PipelineError(f"{transform!r} inside {self!r}: write chain({transform!r}, {self!r}, ...)")
            if isinstance(stage, Chain) and sum(child.communicates for child in stage.program) > 1:
                raise PipelineError(
                    f"{self!r} around {stage!r}: what a second reducer loses is in other units than its input; give "
                    f"each reducer its own: chain({self!r}, ...), or T(...) around one"
                )
            if isinstance(stage, Reducer) and not stage.factory.averages:
                raise PipelineError(
                    f"{self!r} into {stage!r}: it takes no mean of all ranks, so residuals have nowhere to go; use "
                    "ring_reduce(), all_to_all_avg() or all_gather_avg()"
                )
            if isinstance(stage, Reducer) and stage.factory.native:
                raise PipelineError(
                    f"{self!r} into {stage!r}: a native all-reduce cannot report what it lost; use ring_reduce() or "
                    "all_to_all_avg() in its place"
                )
            if not stage.communicates:
                raise PipelineError(
                    f"{stage!r} between {self!r} and its reducer would treat the residual again at every step; write "
                    f"chain({stage!r}, {self!r}, ...)"
                )
        if not any(isinstance(stage, Wrapped) and stage.transform.lossy for stage in stages):
            raise PipelineError(
                f"{self!r} has nothing to feed back: {inner!r} loses nothing; write "
                f'chain({self!r}, compress("bf16"), {inner!r}) or leave it out'
            )
        if estimates.keeps_dropped(inner):
            estimates.check(inner, repr(self))

    def init(self, inner: Pipeline, params: Leaves) -> State:
        if estimates.keeps_dropped(inner):
            return estimates.init(inner, params)
        residual = {
            path: torch.zeros(leaf.shape, dtype=wide_dtype(leaf.dtype), device=leaf.device)
            for path, leaf in params.items()
            if accumulation_dtype(leaf.dtype, path).is_floating_point
        }
        return {"residual": residual, "inner": inner.begin(params)}

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        around_gossip = estimates.keeps_dropped(inner)
        before: Leaves = state["estimate" if around_gossip else "residual"]
        for path, leaf in tree.items():
            self._check(path, leaf, before)
        if around_gossip:
            return await estimates.update(inner, tree, state, comm)
        booked: Leaves = {}
        inside = comm.replace(owned=True, residuals=booked)
        if comm.incoming is None:
            with span("error_feedback, add residuals"):
                given = {path: _corrected(leaf, before.get(path), owned=comm.owned) for path, leaf in tree.items()}
                comm.works("copy", sum(leaf.numel() for leaf in tree.values()))
        else:
            given = {path: before.get(path, leaf) for path, leaf in tree.items()}  # what the values will look like

            async def incoming(paths: Sequence[str], _: Comm) -> Leaves:
                arrived = await comm.arrived(tree, paths)
                return {path: _corrected(leaf, before.get(path), owned=comm.owned) for path, leaf in arrived.items()}

            inside = inside.replace(incoming=incoming)
        out, inner_state = await apply_settled(inner, given, state["inner"], inside)
        residual = dict(before)  # a leaf that is missing in this step keeps its own
        result: Leaves = {}
        # What a narrow result cannot hold is one share of every rank's in a mean, and one rank's alone in a sum.
        sums = any(isinstance(stage, Reducer) and not stage.averages for stage in inner.walk())
        books_results = not sums or all(comm.on_axis(dim, self.name).rank == 0 for _, dim in dims_of(inner))
        for path, leaf in tree.items():
            result[path] = restrided(out[path].to(leaf.dtype), leaf)
            if path in residual:
                residual[path] = self._lost(booked.get(path), before[path])
                if out[path].dtype != leaf.dtype and books_results:
                    residual[path] += out[path] - result[path].to(out[path].dtype)
        return result, {"residual": residual, "inner": inner_state}

    def _lost(self, booked: Tensor | None, like: Tensor) -> Tensor:
        """What was booked for a leaf, as its residual: the row itself where it is a tensor of its own, else a copy."""
        if booked is None:
            return torch.zeros_like(like)
        alone = booked.dtype == like.dtype and booked.untyped_storage().nbytes() == like.nbytes
        if alone and like.is_contiguous():
            return booked.view(like.shape)
        return torch.zeros_like(like).copy_(from_flat(booked, like))

    def _check(self, path: str, leaf: Tensor, residual: Leaves) -> None:
        floating = accumulation_dtype(leaf.dtype, path).is_floating_point
        if floating and (path not in residual or residual[path].shape != leaf.shape):
            has = f"one of shape {tuple(residual[path].shape)}" if path in residual else "none"
            raise PipelineError(
                f"{self!r}: leaf {path!r} of shape {tuple(leaf.shape)} needs a residual like it, the state has {has}; "
                "make the state with init(params) for these parameters"
            )


def _corrected(leaf: Tensor, residual: Tensor | None, *, owned: bool) -> Tensor:
    """The leaf plus its residual, in the residual's dtype, that the pipeline inside may overwrite."""
    if owned and leaf.is_contiguous() and (residual is None or leaf.dtype == residual.dtype):
        return leaf if residual is None else leaf.add_(residual)
    return fresh_copy(leaf) if residual is None else leaf.to(residual.dtype) + residual
