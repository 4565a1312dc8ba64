"""`bucketize`: many small tensors become a few flat ones."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.dtypes import flat_numel, flat_rows, fresh_copy, from_flat, overwrite, real_dtype
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, Transform, Wrapped
from ptcollect.reducers.reducer import Reducer
from ptcollect.state import State
from ptcollect.tree import Leaves, Structure, flatten
from ptcollect.value import refuse_tree

DEFAULT_CAP = (
    "4MiB"  # benchmarks/sync_speed.py --caps: small enough that transfers overlap sums, large enough for few rounds
)

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bucketize(cap: int | str = DEFAULT_CAP, *, order: str = "reverse") -> Bucketize:
    """Pack leaves into flat buckets, run the pipeline inside on each bucket, and unpack.

    A bucket holds leaves of one dtype and device, in reverse natural order of their paths by default, as gradients
    appear last layer first; a leaf larger than the cap has a bucket to itself. Buckets run concurrently, a few in flight
    at a time, so that one is summed while another travels. Every leaf is in exactly one bucket.

    Args:
        cap: most bytes in a bucket, an int or text such as ``"25MiB"`` or ``"500KB"``.
        order: ``"reverse"`` or ``"forward"`` in natural order of the paths (``layers.2`` before ``layers.10``).

    Returns:
        A Transform, with `Bucketize.pack` for use on its own.

    Raises:
        ValueError: `cap` is not a positive size, or `order` is neither.
        PipelineError: when it wraps anything but reducers, `compress` and other stages that work in buckets: a bucket has no paths.

    Source: Li et al. 2020, PyTorch Distributed: experiences on accelerating data parallel training, section 3.2.3.

    >>> import torch, ptcollect as pc
    >>> buckets, undo = pc.bucketize("1KiB").pack({"a": torch.zeros(2), "b": torch.ones(3)})
    >>> buckets
    {'bucket0': tensor([1., 1., 1., 0., 0.])}
    >>> undo(buckets)
    {'a': tensor([0., 0.]), 'b': tensor([1., 1., 1.])}
    """
    refuse_tree("bucketize", "cap", cap)
    if order not in ("reverse", "forward"):
        raise ValueError(f'bucketize(order=...): expected "reverse" or "forward", got {order!r}')
    _bytes(cap)
    return Bucketize(cap, order)


@dataclass(frozen=True, repr=False)
class Bucketize(Transform):
    """See `bucketize`."""

    name = "bucketize"
    manages_ownership = True
    works_in_buckets = False

    cap: int | str = DEFAULT_CAP
    order: str = "reverse"

    def check(self, inner: Pipeline) -> None:
        for stage in inner.walk():
            if isinstance(stage, Wrapped) and not stage.transform.works_in_buckets:
                self._refuse(stage.transform, inner)
            elif not isinstance(stage, (Reducer, Wrapped)) and not stage.children():
                self._refuse(stage, inner)

    def _refuse(self, stage: Pipeline | Transform, inner: Pipeline) -> None:
        stages = list(getattr(inner, "stages", (inner,)))
        if isinstance(inner, Wrapped):
            stages = [inner.transform, inner.inner]
        rest = ", ".join(repr(other) for other in stages if other is not stage)
        raise PipelineError(
            f"{stage!r} inside {self!r}: buckets are flat and have no paths, so it would silently do something else; "
            f"write chain({stage!r}, {self!r}, {rest})"
        )

    def pack(self, tree: Any) -> tuple[Leaves, Undo]:
        """The buckets of `tree` and the function that undoes it, for use without communication.

        Args:
            tree: tree of tensors; left unchanged.

        Returns:
            ``{"bucket0": flat tensor, ...}`` in fresh storage, and ``undo(buckets) -> tree``.
        """
        leaves, structure = flatten(tree)
        plan = self.plan(leaves)
        return {name: _packed(paths, leaves) for name, paths in plan.items()}, Undo(structure, leaves, plan)

    def plan(self, leaves: Leaves) -> dict[str, tuple[str, ...]]:
        """Bucket name -> paths, for leaves of these sizes, dtypes and devices."""
        shapes = tuple((path, flat_numel(leaf), leaf.dtype, leaf.device) for path, leaf in leaves.items())
        return _plan(shapes, _bytes(self.cap), self.order)

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        plan = self.plan(tree)
        work = [self._bucket(inner, name, paths, tree, comm) for name, paths in plan.items()]
        done: Leaves = {
            path: leaf if comm.owned else fresh_copy(leaf) for path, leaf in tree.items() if leaf.numel() == 0
        }
        for leaves in [await work[0]] if len(work) == 1 else await comm.fork(work):
            done |= leaves
        return {path: done[path] for path in tree}, {"inner": state["inner"]}

    async def _bucket(self, inner: Pipeline, name: str, paths: tuple[str, ...], tree: Leaves, comm: Comm) -> Leaves:
        label = f"{name} ({paths[0]} to {paths[-1]})" if len(paths) > 1 else paths[0]
        residuals: Leaves | None = None if comm.residuals is None else {}
        flat = _packed(paths, tree)
        out, _ = await inner.apply({label: flat}, {}, comm.replace(owned=True, residuals=residuals))
        if residuals and comm.residuals is not None:
            comm.residuals.update(_cut(residuals[label], paths, tree))
        return _unpacked(out[label], paths, tree, into_leaves=comm.owned)


@dataclass(frozen=True)
class Undo:
    """Takes buckets apart again: what `Bucketize.pack` returns beside them."""

    structure: Structure
    leaves: Leaves
    plan: dict[str, tuple[str, ...]]

    def __call__(self, buckets: Leaves) -> Any:
        """The tree of the structure that was packed, with the values in `buckets`.

        Raises:
            ValueError: names or sizes of `buckets` are not those that were made.
        """
        expected = {name: sum(flat_numel(self.leaves[path]) for path in paths) for name, paths in self.plan.items()}
        got = {name: bucket.numel() for name, bucket in buckets.items()}
        if expected != got:
            raise ValueError(f"these are not the buckets that were packed: expected sizes {expected}, got {got}")
        leaves: Leaves = {path: fresh_copy(leaf) for path, leaf in self.leaves.items() if leaf.numel() == 0}
        for name, paths in self.plan.items():
            leaves |= _unpacked(buckets[name].clone(), paths, self.leaves, into_leaves=False)
        return self.structure.unflatten(leaves)


def _packed(paths: tuple[str, ...], leaves: Leaves) -> Tensor:
    """The values of `paths` as one flat tensor of their own (real) dtype."""
    return torch.cat(flat_rows([leaves[path] for path in paths]))


def _unpacked(flat: Tensor, paths: tuple[str, ...], like: Leaves, *, into_leaves: bool) -> Leaves:
    """The leaves at `paths` with the values in `flat`: views of it, or written over `like` itself."""
    put = overwrite if into_leaves else from_flat
    return {path: put(part, like[path]) for path, part in _cut(flat, paths, like).items()}


def _cut(flat: Tensor, paths: tuple[str, ...], like: Leaves) -> Leaves:
    """`flat` cut into one row of numbers per path."""
    return dict(zip(paths, torch.split(flat, [flat_numel(like[path]) for path in paths]), strict=True))


def _bytes(cap: int | str) -> int:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", cap) if isinstance(cap, str) else None
    if match and match[2].upper() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(cap, int) and not isinstance(cap, bool):
        size = cap
    else:
        raise ValueError(f'bucketize(cap): expected bytes as an int or a size such as "25MiB" or "500KB", got {cap!r}')
    if size <= 0:
        raise ValueError(f"bucketize(cap): expected a positive size, got {cap!r}")
    return size


@functools.lru_cache(maxsize=64)
def _plan(
    shapes: tuple[tuple[str, int, torch.dtype, torch.device], ...], cap: int, order: str
) -> dict[str, tuple[str, ...]]:
    """Fill buckets in order; one is open per dtype and device, and closes when the next leaf does not fit."""
    buckets: list[list[str]] = []
    open_bucket: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for path, numel, dtype, device in reversed(shapes) if order == "reverse" else shapes:
        if numel == 0:
            continue  # nothing to send
        size = numel * real_dtype(dtype).itemsize
        bucket, used = open_bucket.get((dtype, device), ([], cap))
        if used + size > cap:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(path)
        open_bucket[dtype, device] = (bucket, used + size)
    return {f"bucket{i}": tuple(bucket) for i, bucket in enumerate(buckets)}
