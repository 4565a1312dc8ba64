"""`shard`: each rank of one mesh dim reduces a part of every leaf over the other dims."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ptcollect.averaging import finish_mean, partial_scale, split_evenly
from ptcollect.chain import Chain, moved_out
from ptcollect.comm import Comm
from ptcollect.dtypes import flat_copy, flat_numel, flat_view, fresh_copy, from_flat, overwrite, real_dtype
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, Transform, Wrapped
from ptcollect.reducers.all_to_all import sum_in_rank_order
from ptcollect.reducers.reducer import Reducer
from ptcollect.state import State
from ptcollect.tree import Leaves
from ptcollect.value import refuse_tree


def shard(axis: str) -> Transform:
    r"""Reduce-scatter along one mesh dim, run the pipeline inside on the own part, all-gather: hierarchical sync.

    .. math:: y = \frac{1}{L N} \sum_{j=0}^{N-1} \sum_{l=0}^{L-1} x_{j,l}

    with L ranks on `axis` and N on the dims of the reducers inside. Where the L ranks of ``"local"`` are those of a
    node, each of them sends only 1/L of the tensor to other nodes. A leaf is cut into L parts. First round: part l of
    every rank goes to rank l, which adds them up in rank order. The pipeline inside takes the mean of that over the
    other dims. Last round: every rank sends its part of the result to the others. Both are direct exchanges of L-1
    messages, (L-1)/L of the tensor, so the bits depend on packing only where those of the pipeline inside do. A leaf
    with fewer than L numbers is filled up with zeros to L.

    A part is held in float32 at least, whatever the dtype of the leaf; what travels, on either level, is rounded to the
    leaf's own dtype or encoded by the codec. ``compress`` before `shard` applies to both levels, between `shard` and
    the reducer to the other dims alone, and there may be one in either place. ``op="sum"`` inside makes the whole a
    sum. Integer means are rounded once, at the end, from the exact sum; N times that must fit int64, or it wraps.

    Args:
        axis: name of the mesh dim whose ranks share the work; the reducers inside name other dims.

    Returns:
        A Transform; all ranks of the mesh dims it covers end with the same bits if those inside do.

    Raises:
        TypeError: `axis` is no name.
        PipelineError: when it wraps anything but `compress`, `shard` and reducers that give every rank a mean, or a
            sum, along other dims; when it runs on a group without these dims.

    Source: Cho et al. 2019, BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy
    (an all-reduce as one reduce-scatter and one all-gather per level).

    >>> import torch, ptcollect as pc
    >>> sync = pc.chain(pc.bucketize(), pc.shard("local"), pc.ring_reduce(axis="node"))
    >>> trees = [torch.full((4,), 10.0**rank) for rank in range(4)]
    >>> run = pc.simulate(sync, trees, axes={"node": 2, "local": 2})
    >>> run.trees[0], run.bytes  # 8 + 8 within the node, 8 to the other one
    (tensor([277.7500, 277.7500, 277.7500, 277.7500]), [24, 24, 24, 24])
    """
    refuse_tree("shard", "axis", axis)
    if not isinstance(axis, str):
        raise TypeError(f"shard(axis): expected the name of a mesh dim, got {axis!r}")
    return Shard(axis)


@dataclass(frozen=True, repr=False)
class Shard(Transform):
    """See `shard`."""

    name = "shard"
    manages_ownership = True
    works_in_buckets = True
    sends = True

    axis: str

    def example_reducer(self) -> str:
        return f'ring_reduce(axis="{"node" if self.axis != "node" else "local"}")'

    def check(self, inner: Pipeline) -> None:
        for stage in inner.walk():
            if isinstance(stage, Wrapped) and (stage.transform.stateful or not stage.transform.works_in_buckets):
                self._refuse(stage.transform, inner)
            elif not isinstance(stage, (Reducer, Wrapped, Chain)):
                self._refuse(stage, inner)
            elif isinstance(stage, Reducer) and not stage.factory.averages:
                raise PipelineError(
                    f"{stage!r} inside {self!r}: it gives no mean or sum to every rank, so parts of the result would "
                    f"mean different things; write chain({self!r}, {self.example_reducer()})"
                )
        for text, axis in dims_of(inner):
            if axis is None:
                raise PipelineError(
                    f"{text} inside {self!r} names no dim of the mesh, which has two at least; name the one to reduce "
                    f"over next: write chain({self!r}, {self.example_reducer()})"
                )
            if axis == self.axis:
                raise PipelineError(
                    f"{text} inside {self!r}: along {axis!r} every rank has another part of the tensor, and parts "
                    f"are not to be reduced with one another; name another dim: write chain({self!r}, "
                    f"{self.example_reducer()})"
                )
        if len({stage.averages for stage in inner.walk() if isinstance(stage, Reducer)}) > 1:
            raise PipelineError(
                f"{self!r} around {inner!r}, which takes a mean along one dim and a sum along another: the ranks of "
                f"{self.axis!r} cannot be told which; use reducers of one kind: write chain({self!r}, "
                f"{self.example_reducer()})"
            )

    def _refuse(self, stage: Pipeline | Transform, inner: Pipeline) -> None:
        of_several = isinstance(stage, Pipeline) and stage.communicates
        fix = f"give each pipeline in it a {self!r}" if of_several else f"write {moved_out(stage, self, inner)}"
        raise PipelineError(
            f"{stage!r} inside {self!r} would see flat parts of leaves, other ones on every rank, and do something "
            f"else; {fix}"
        )

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        local = self._along_axis(inner, comm)
        if local.size == 1:
            out, inner_state = await inner.apply(tree, state["inner"], comm)
            return out, {"inner": inner_state}
        # Dtypes first, all of them: a leaf that cannot be treated is an error before any traffic.
        comms = {path: local.for_leaf(path, leaf) for path, leaf in tree.items()}
        out = {path: leaf if comm.owned else fresh_copy(leaf) for path, leaf in tree.items() if leaf.numel() == 0}
        full = [path for path in tree if path not in out]
        work = [self._leaf(inner, tree[path], comms[path], comm) for path in full]
        reduced = [await work[0]] if len(work) == 1 else await comm.fork(work)
        out |= dict(zip(full, reduced, strict=True))
        return {path: out[path] for path in tree}, {"inner": state["inner"]}

    async def _leaf(self, inner: Pipeline, leaf: Tensor, local: Comm, comm: Comm) -> Tensor:
        path, numel = local.leaf, flat_numel(leaf)
        if numel >= local.size:
            return await self._reduce(inner, leaf, local, comm)
        # Some rank's part would be empty, and that rank would make fewer requests than the others: where ranks run
        # several leaves at a time and wait for the oldest request, they would wait for each other. So zeros fill up.
        padded = torch.zeros(local.size, dtype=real_dtype(leaf.dtype), device=leaf.device)
        padded[:numel] = flat_copy(leaf, padded.dtype)
        out = await self._reduce(inner, padded, local.for_leaf(path, padded), comm.replace(owned=True))
        if comm.residuals is not None and path in comm.residuals:
            comm.residuals[path] = comm.residuals[path][:numel]
        result = from_flat(out[:numel], leaf)
        return overwrite(leaf, result) if comm.owned else result

    async def _reduce(self, inner: Pipeline, leaf: Tensor, local: Comm, comm: Comm) -> Tensor:
        path, n, rank = local.leaf, local.size, local.rank
        mean, floating = _averages(inner), local.dtype.is_floating_point
        ranks_inside = math.prod(comm.axes[axis].size for axis in {axis for _, axis in dims_of(inner)})
        view = flat_view(leaf) if comm.owned else None
        x = view if view is not None and view.dtype == local.dtype else flat_copy(leaf, local.dtype)
        chunks = split_evenly(x.numel(), n)
        start, stop = chunks[rank]
        others = [peer for peer in range(n) if peer != rank]

        # Codecs that draw at random draw apart on all ranks of the mesh here, and alike on N of them at the end.
        mesh = ", ".join(str(place.rank) for place in comm.axes.values())
        first = local.replace(scope=f"{comm.scope}rank ({mesh}) of ")
        parts = [first.encode(x[a:b], at=a) for a, b in chunks]
        received = await first.exchange(
            send={peer: parts[peer] for peer in others}, recv=dict.fromkeys(others, stop - start)
        )
        scale = partial_scale(local.dtype, n) if mean else 1.0
        mine = sum_in_rank_order({**received, rank: parts[rank]}, first, scale=scale)
        if mean and floating:
            finish_mean(mine, n)
        elif mean:
            mine.mul_(ranks_inside)  # a mean of multiples of N is exact: the sum itself

        first.close_books()
        booked: Leaves | None = None if comm.residuals is None else {}
        inside = comm.replace(
            owned=True,
            residuals=booked,
            scope=f"{comm.scope}part {rank} of ",
            wire_dtypes={**comm.wire_dtypes, path: comm.wire_dtype(path, leaf)},
        )
        out, _ = await inner.apply({path: mine}, {}, inside)
        result = out[path]
        if mean and not floating:
            finish_mean(result, n * ranks_inside)
        if booked and comm.residuals is not None:  # in units of `mine`, a mean of n inputs or a sum of them
            comm.residuals[path][start:stop].add_(booked[path], alpha=n if mean else 1)

        # N ranks encode this same part, one for each row along the axis, and each books its share of what that drops.
        packet = local.encode(result, at=start, scale=1 / n if mean else ranks_inside)
        places = {peer: x[a:b] for peer, (a, b) in enumerate(chunks)}
        wanted = {peer: places[peer] if local.plain else places[peer].numel() for peer in others}
        received = await local.exchange(send=dict.fromkeys(others, packet), recv=wanted)
        for peer, each in {**received, rank: packet}.items():
            if peer == rank or not local.plain:
                local.accumulate(each, places[peer], keep=0.0)
        whole = from_flat(x, leaf)
        return overwrite(leaf, whole) if comm.owned else whole

    def _along_axis(self, inner: Pipeline, comm: Comm) -> Comm:
        """The comm along this axis; raises, on all ranks and before any traffic, where the group lacks a dim."""
        if len(comm.axes) == 1:
            have = "".join(f", {name!r}" for name in comm.axes if name is not None)
            raise PipelineError(
                f"{self!r}: the group has one dim{have}; pass a mesh with two, such as "
                f'group=init_device_mesh("cpu", (nodes, ranks), mesh_dim_names=("node", "local"))'
            )
        for stage in inner.walk():
            if isinstance(stage, Reducer):
                comm.on_axis(stage.axis, stage.factory.__name__)
        return comm.on_axis(self.axis, self.name)


def dims_of(inner: Pipeline) -> Iterator[tuple[str, str | None]]:
    """The stages that send, as text, and the mesh dim that each of them sends along."""
    for stage in inner.walk():
        if isinstance(stage, Reducer):
            yield repr(stage), stage.axis
        elif isinstance(stage, Wrapped) and isinstance(stage.transform, Shard):
            yield repr(stage.transform), stage.transform.axis


def _averages(inner: Pipeline) -> bool:
    """Whether the reducers inside take means; `Shard.check` has seen that they are of one kind."""
    return all(stage.averages for stage in inner.walk() if isinstance(stage, Reducer))
