"""`bucketize`: many small tensors become a few flat ones."""

from __future__ import annotations

import functools
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
from ptcollect.sizes import size_in_bytes
from ptcollect.state import State
from ptcollect.tree import Leaves, Structure, flatten
from ptcollect.value import refuse_tree

# Smaller buckets cost rounds, larger ones overlap less: benchmarks/run.py --only tuning
DEFAULT_CAP = "8MiB"


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
    size_in_bytes(cap, "bucketize(cap)")
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
            elif not isinstance(stage, (Reducer, Wrapped, Chain)) and not stage.works_in_buckets:
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
        kept: State = state["inner"]
        work = [self._bucket(inner, bucket, tree, kept, comm) for bucket in self.plan(tree)]
        done: Leaves = {
            path: leaf if comm.owned else fresh_copy(leaf) for path, leaf in tree.items() if not leaf.numel()
        }
        for leaves, new in [await work[0]] if len(work) == 1 else await comm.fork(work):
            done |= leaves
            kept = _merged(kept, new)
        return {path: done[path] for path in tree}, {"inner": kept}

    async def _bucket(
        self, inner: Pipeline, bucket: Bucket, tree: Leaves, kept: State, comm: Comm
    ) -> tuple[Leaves, State]:
        leaves = await comm.arrived(tree, bucket.paths)
        residuals: Leaves | None = None if comm.residuals is None else {}
        # A donated leaf that has a bucket to itself is worked on where it is.
        alone = flat_view(leaves[bucket.paths[0]]) if comm.owned and len(bucket.paths) == 1 else None
        flat = {bucket.label: alone if alone is not None else _packed(bucket, leaves)}
        numbers = sum(bucket.sizes)
        comm.works("copy", numbers if alone is None else 0)
        inside = comm.replace(owned=True, residuals=residuals, incoming=None)
        out, new = await inner.apply(flat, _packed_state(bucket, kept), inside)
        if residuals and comm.residuals is not None:
            # In storage of their own, for they become state; and here, while other buckets travel.
            rows = torch.split(residuals[bucket.label], bucket.sizes)
            own = [row.clone() for row in rows] if len(rows) > 1 else rows
            comm.works("copy", numbers if len(rows) > 1 else 0)
            comm.residuals.update(zip(bucket.paths, own, strict=True))
        comm.works("copy", numbers if comm.owned and alone is None else 0)
        return _unpacked(out[bucket.label], bucket, leaves, into_leaves=comm.owned), _unpacked_state(bucket, new, kept)


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


def _packed_state(bucket: Bucket, kept: State) -> State:
    """What the stages inside keep by path, packed as the leaves are; the rest as it is."""
    return {
        stage: {key: _packed_entry(bucket, value) if isinstance(value, dict) else value for key, value in own.items()}
        for stage, own in kept.items()
    }


def _packed_entry(bucket: Bucket, entry: Leaves) -> Leaves:
    # Leaves of one dtype: all of them have an entry or none has.
    present = [entry[path] for path in bucket.paths if path in entry]
    return {bucket.label: joined_flat(present)} if present else {}


def _unpacked_state(bucket: Bucket, new: State, kept: State) -> State:
    """The state that a bucket left behind, with its own paths again."""
    return {
        stage: {
            key: _unpacked_entry(bucket, value, kept[stage][key]) if isinstance(value, dict) else value
            for key, value in own.items()
        }
        for stage, own in new.items()
    }


def _unpacked_entry(bucket: Bucket, entry: Leaves, kept: Leaves) -> Leaves:
    if bucket.label not in entry:
        return {}
    rows = split_flat(entry[bucket.label], [kept[path] for path in bucket.paths])
    own = [row.clone() for row in rows] if len(rows) > 1 else rows  # in storage of their own, for they are state
    return dict(zip(bucket.paths, own, strict=True))


def _merged(kept: State, new: State) -> State:
    """`kept` with what is in `new` instead; of what is not by path every bucket has the same."""
    return {
        stage: {
            key: {**value, **new[stage][key]} if isinstance(value, dict) else new[stage][key]
            for key, value in own.items()
        }
        for stage, own in kept.items()
    }


@functools.lru_cache(maxsize=64)
def _plan(
    paths: tuple[str, ...], kinds: tuple[tuple[int, torch.dtype, torch.device], ...], cap: int | str, order: str
) -> tuple[Bucket, ...]:
    """Buckets in the order in which they are full: of large leaves alone, and of small ones by dtype and device."""
    most = size_in_bytes(cap, "bucketize(cap)")
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
