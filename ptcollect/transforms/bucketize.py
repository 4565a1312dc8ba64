"""`bucketize`: many small tensors become a few flat ones."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptcollect.chain import Chain, moved_out
from ptcollect.comm import Comm
from ptcollect.dtypes import accumulation_dtype, flat_view, fresh_copy, joined_flat, overwrite, split_flat
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, Transform, Wrapped
from ptcollect.profiling import span
from ptcollect.reducers.reducer import Reducer
from ptcollect.state import State
from ptcollect.tree import Leaves, Structure, flatten
from ptcollect.value import refuse_tree

# Smaller buckets cost rounds, larger ones overlap less: benchmarks/sync_speed.py --scenario tuning --caps ...
DEFAULT_CAP = "8MiB"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bucketize(cap: int | str = DEFAULT_CAP, *, order: str = "reverse") -> Bucketize:
    """Pack leaves into flat buckets, run the pipeline inside on each bucket, and unpack.

    A bucket holds leaves of one dtype and device, in reverse natural order of their paths by default, as gradients
    appear last layer first; a leaf of more than half the cap has a bucket to itself, which saves copies and waits for
    no other. Buckets run concurrently, a few in flight at a time, so that one is summed while another travels. Every
    leaf is in exactly one bucket.

    Args:
        cap: most bytes in a bucket of several leaves, an int or text such as ``"25MiB"`` or ``"500KB"``. Small ones
            leave earlier under `overlap` and DDP, large ones cost fewer rounds.
        order: ``"reverse"`` or ``"forward"`` in natural order of the paths (``layers.2`` before ``layers.10``).

    Returns:
        A Transform, with `Bucketize.pack` for use on its own.

    Raises:
        ValueError: `cap` is not a positive size, or `order` is neither.
        PipelineError: when it wraps anything but reducers, `compress` and other stages that work in buckets: a bucket
            has no paths.

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
    streams = True
    manages_ownership = True
    works_in_buckets = False

    cap: int | str = DEFAULT_CAP
    order: str = "reverse"

    def check(self, inner: Pipeline) -> None:
        for stage in inner.walk():
            if isinstance(stage, Wrapped) and not stage.transform.works_in_buckets:
                self._refuse(stage.transform, inner)
            elif not isinstance(stage, (Reducer, Wrapped, Chain)):
                self._refuse(stage, inner)

    def _refuse(self, stage: Pipeline | Transform, inner: Pipeline) -> None:
        moved = moved_out(stage, self, inner)
        fix = f"keep one: {moved.replace(f'{stage!r}, ', '', 1)}" if isinstance(stage, Bucketize) else f"write {moved}"
        raise PipelineError(
            f"{stage!r} inside {self!r}: buckets are flat and have no paths, so it would do something else; {fix}"
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
        return {bucket.name: _packed(bucket, leaves) for bucket in plan}, Undo(structure, leaves, plan)

    def plan(self, leaves: Leaves) -> tuple[Bucket, ...]:
        """Which leaves go into which bucket; made once for leaves of these sizes, dtypes and devices."""
        kinds = tuple([(leaf.numel(), leaf.dtype, leaf.device) for leaf in leaves.values()])
        return _plan(tuple(leaves), kinds, self.cap, self.order)

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        for path, leaf in tree.items():
            accumulation_dtype(leaf.dtype, path)  # an error here comes before any traffic
        work = [self._bucket(inner, bucket, tree, comm) for bucket in self.plan(tree)]
        done: Leaves = {
            path: leaf if comm.owned else fresh_copy(leaf) for path, leaf in tree.items() if not leaf.numel()
        }
        for leaves in [await work[0]] if len(work) == 1 else await comm.fork(work):
            done |= leaves
        return {path: done[path] for path in tree}, {"inner": state["inner"]}

    async def _bucket(self, inner: Pipeline, bucket: Bucket, tree: Leaves, comm: Comm) -> Leaves:
        leaves = await comm.arrived(tree, bucket.paths)
        residuals: Leaves | None = None if comm.residuals is None else {}
        # A donated leaf that has a bucket to itself is worked on where it is.
        alone = flat_view(leaves[bucket.paths[0]]) if comm.owned and len(bucket.paths) == 1 else None
        flat = {bucket.label: alone if alone is not None else _packed(bucket, leaves)}
        numbers = sum(bucket.sizes)
        comm.works("copy", numbers if alone is None else 0)
        out, _ = await inner.apply(flat, {}, comm.replace(owned=True, residuals=residuals, incoming=None))
        if residuals and comm.residuals is not None:
            # In storage of their own, for they become state; and here, while other buckets travel.
            rows = torch.split(residuals[bucket.label], bucket.sizes)
            own = [row.clone() for row in rows] if len(rows) > 1 else rows
            comm.works("copy", numbers if len(rows) > 1 else 0)
            comm.residuals.update(zip(bucket.paths, own, strict=True))
        comm.works("copy", numbers if comm.owned and alone is None else 0)
        return _unpacked(out[bucket.label], bucket, leaves, into_leaves=comm.owned)


class Bucket(NamedTuple):
    """Leaves that travel together."""

    name: str
    label: str
    """The name with the first and last path, for messages."""
    paths: tuple[str, ...]
    sizes: list[int]
    """Real numbers in each leaf."""


@dataclass(frozen=True)
class Undo:
    """Takes buckets apart again: what `Bucketize.pack` returns beside them."""

    structure: Structure
    leaves: Leaves
    plan: tuple[Bucket, ...]

    def __call__(self, buckets: Leaves) -> Any:
        """The tree of the structure that was packed, with the values in `buckets`.

        Raises:
            ValueError: names or sizes of `buckets` are not those that were made.
        """
        expected = {bucket.name: sum(bucket.sizes) for bucket in self.plan}
        got = {name: bucket.numel() for name, bucket in buckets.items()}
        if expected != got:
            raise ValueError(f"these are not the buckets that were packed: expected sizes {expected}, got {got}")
        leaves: Leaves = {path: fresh_copy(leaf) for path, leaf in self.leaves.items() if leaf.numel() == 0}
        for bucket in self.plan:
            leaves |= _unpacked(buckets[bucket.name].clone(), bucket, self.leaves, into_leaves=False)
        return self.structure.unflatten(leaves)


def _packed(bucket: Bucket, leaves: Leaves) -> Tensor:
    """The leaves of `bucket` as one flat tensor of their own (real) dtype."""
    with span(f"pack {bucket.label}"):
        return joined_flat([leaves[path] for path in bucket.paths])


def _unpacked(flat: Tensor, bucket: Bucket, like: Leaves, *, into_leaves: bool) -> Leaves:
    """The leaves of `bucket` with the values in `flat`: views of it, or written over `like` itself."""
    leaves = [like[path] for path in bucket.paths]
    with span(f"unpack {bucket.label}"):
        results = split_flat(flat, leaves)
        if into_leaves:
            results = [overwrite(leaf, result) for leaf, result in zip(leaves, results, strict=True)]
    return dict(zip(bucket.paths, results, strict=True))


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
    paths: tuple[str, ...], kinds: tuple[tuple[int, torch.dtype, torch.device], ...], cap: int | str, order: str
) -> tuple[Bucket, ...]:
    """Buckets in the order in which they are full: of large leaves alone, and of small ones by dtype and device."""
    most = _bytes(cap)
    buckets: list[list[tuple[str, int]]] = []
    open_bucket: dict[tuple[torch.dtype, torch.device], tuple[list[tuple[str, int]], int]] = {}
    leaves = list(zip(paths, kinds, strict=True))
    for path, (numel, dtype, device) in reversed(leaves) if order == "reverse" else leaves:
        if numel == 0:
            continue  # nothing to send
        entry, size = (path, numel * (2 if dtype.is_complex else 1)), numel * dtype.itemsize
        if 2 * size > most:
            buckets.append([entry])
            continue
        bucket, used = open_bucket.pop((dtype, device), ([], 0))
        if used + size > most:
            buckets.append(bucket)
            bucket, used = [], 0
        open_bucket[dtype, device] = ([*bucket, entry], used + size)
    buckets.extend(bucket for bucket, _ in open_bucket.values())
    return tuple(_bucket(f"bucket{i}", bucket) for i, bucket in enumerate(buckets))


def _bucket(name: str, leaves: list[tuple[str, int]]) -> Bucket:
    paths = tuple(path for path, _ in leaves)
    label = f"{name} ({paths[0]} to {paths[-1]})" if len(paths) > 1 else paths[0]
    return Bucket(name, label, paths, [size for _, size in leaves])
