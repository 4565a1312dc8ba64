"""The two tables that every law is tested over: pipelines, with what they mean, and trees.

A new reducer, map, transform or codec joins `PIPELINES`; `test_laws.py` fails while one is missing.
"""

from __future__ import annotations

import functools
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import optree
import oracle
import torch
from torch import Tensor

import ptcollect as pc

WORLD_SIZES = (1, 2, 3, 4, 5, 8)


# Pipelines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A pipeline and what it means."""

    pipeline: pc.Pipeline
    steps: tuple[oracle.Step, ...]
    ranks: int = 1
    """The smallest world size that it works on."""
    mesh: Callable[[int], dict[str, int]] | None = None
    """The dims of the mesh that it needs, with their sizes for a world size; None: it runs on a plain group."""

    @property
    def id(self) -> str:
        return repr(self.pipeline)

    def simulate(self, trees: Any) -> pc.Simulation:
        return pc.simulate(self.pipeline, trees, axes=self.mesh and self.mesh(len(trees)))

    def group(self, n: int) -> Any:
        """What `n` real ranks pass as ``group=``."""
        return self.mesh and device_mesh(tuple(self.mesh(n).items()))


@functools.cache
def device_mesh(dims: tuple[tuple[str, int], ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(size for _, size in dims), mesh_dim_names=tuple(name for name, _ in dims))


def wide(n: int) -> dict[str, int]:
    """Two nodes where there are ranks for them."""
    nodes = 2 if n > 2 and n % 2 == 0 else 1
    return {"node": nodes, "local": n // nodes}


def tall(n: int) -> dict[str, int]:
    """Two ranks in a node where that leaves several nodes, and else one."""
    local = 2 if n > 2 and n % 2 == 0 else 1
    return {"node": n // local, "local": local}


def deep(n: int) -> dict[str, int]:
    """Three dims; 8 ranks are 2 x 2 x 2."""
    racks = 2 if n == 8 else 1
    return {"rack": racks, **tall(n // racks)}


def unchanged(tree: Any) -> Any:
    return tree


BF16, FP16 = torch.bfloat16, torch.float16


def hops(n: int) -> int:
    """How often an element is rounded: in a ring at each hop, and as the result; natively before and at each sum."""
    return n


def twice(n: int) -> int:
    """Once on the way to its owner, once as the result."""
    return 2


def once(n: int) -> int:
    return 1


def doublings(n: int) -> int:
    """Once for every bit of the world size, and twice more where it is no power of two."""
    return n.bit_length() + 1


def levels(n: int) -> int:
    """Once within the node, at each hop and as the result between nodes, and once as the result within the node."""
    return n + 2


def to_both_sides(n: int) -> list[list[Fraction]]:
    """Equal weights for a rank and its neighbours in a ring."""
    return _equal(n, (0, 1, -1))


def doubling(n: int) -> list[list[Fraction]]:
    """Equal weights for a rank and those 1, 2 and 4 places before it; of 8 ranks and fewer that is all."""
    return _equal(n, [0, *(-d for d in (1, 2, 4) if d < n)])


def _equal(n: int, places: Sequence[int]) -> list[list[Fraction]]:
    sources = [{(rank + place) % n for place in places} for rank in range(n)]
    return [[Fraction(j in mine, len(mine)) for j in range(n)] for mine in sources]


PIPELINES = (
    # Reducers alone.
    Row(pc.ring_reduce(), (oracle.mean(),)),
    Row(pc.ring_reduce(op="sum"), (oracle.total(),)),
    Row(pc.all_to_all_avg(), (oracle.mean(),)),
    Row(pc.all_gather_avg(), (oracle.mean(),)),
    Row(pc.auto_reduce(), (oracle.mean(),)),
    Row(pc.all_reduce(), (oracle.mean(),)),
    Row(pc.all_reduce(op="sum"), (oracle.total(),)),
    Row(pc.gather_avg(), (oracle.mean_at(0),)),
    Row(pc.gather_avg(root=1), (oracle.mean_at(1),), ranks=2),
    Row(pc.broadcast(), (oracle.copy_of(0),)),
    Row(pc.broadcast(root=2), (oracle.copy_of(2),), ranks=3),
    Row(pc.gossip_avg("ring"), (oracle.gossip(to_both_sides),)),
    # Buckets: one for all, several, one leaf each, the other order.
    Row(pc.chain(pc.bucketize(), pc.ring_reduce()), (oracle.mean(),)),
    Row(pc.chain(pc.bucketize(64), pc.ring_reduce()), (oracle.mean(),)),
    Row(pc.chain(pc.bucketize(1), pc.all_to_all_avg()), (oracle.mean(),)),
    Row(pc.chain(pc.bucketize("1KiB", order="forward"), pc.all_gather_avg()), (oracle.mean(),)),
    Row(pc.chain(pc.bucketize(100), pc.all_reduce()), (oracle.mean(),)),
    Row(pc.chain(pc.bucketize(1), pc.auto_reduce(doubling=20, direct="0.1KB")), (oracle.mean(),)),
    Row(pc.chain(pc.bucketize("0.1KB"), pc.broadcast()), (oracle.copy_of(0),)),
    Row(pc.chain(pc.bucketize(), pc.gather_avg()), (oracle.mean_at(0),)),
    # Codecs, around and inside buckets.
    Row(pc.chain(pc.compress("bf16"), pc.ring_reduce()), (oracle.mean(BF16, hops),)),
    Row(pc.chain(pc.compress("fp16"), pc.ring_reduce(op="sum")), (oracle.total(FP16, hops),)),
    Row(pc.chain(pc.compress("fp16"), pc.all_to_all_avg()), (oracle.mean(FP16, twice),)),
    Row(pc.chain(pc.compress(pc.codecs.bf16()), pc.all_gather_avg()), (oracle.mean(BF16, once),)),
    Row(pc.chain(pc.compress(pc.codecs.fp16()), pc.all_reduce()), (oracle.mean(FP16, hops),)),
    Row(pc.chain(pc.compress("bf16"), pc.all_reduce()), (oracle.mean(BF16, hops),)),
    Row(pc.chain(pc.compress("bf16"), pc.auto_reduce()), (oracle.mean(BF16, doublings),)),
    Row(pc.chain(pc.compress("bf16"), pc.gather_avg()), (oracle.mean_at(0, BF16, once),)),
    Row(pc.chain(pc.compress("fp16"), pc.broadcast()), (oracle.copy_of(0, FP16),)),
    Row(pc.chain(pc.bucketize(), pc.compress("bf16"), pc.ring_reduce()), (oracle.mean(BF16, hops),)),
    Row(pc.chain(pc.compress("bf16"), pc.bucketize(64), pc.all_to_all_avg()), (oracle.mean(BF16, twice),)),
    Row(
        pc.chain(pc.bucketize(64), pc.compress("bf16"), pc.gossip_avg("exponential")),
        (oracle.gossip(doubling, BF16),),
    ),
    # A mesh: part of each leaf on each rank of one dim.
    Row(pc.chain(pc.bucketize(), pc.shard("local"), pc.ring_reduce(axis="node")), (oracle.mean(),), mesh=wide),
    Row(pc.chain(pc.shard("local"), pc.all_to_all_avg(axis="node")), (oracle.mean(),), mesh=tall),
    Row(
        pc.chain(pc.bucketize(64), pc.shard("node"), pc.ring_reduce(op="sum", axis="local")),
        (oracle.total(),),
        mesh=wide,
    ),
    Row(
        pc.chain(pc.compress("bf16"), pc.shard("local"), pc.ring_reduce(axis="node")),
        (oracle.mean(BF16, levels),),
        mesh=wide,
    ),
    Row(
        pc.chain(pc.bucketize(100), pc.shard("local"), pc.compress("fp16"), pc.all_reduce(axis="node")),
        (oracle.mean(FP16, levels),),
        mesh=tall,
    ),
    Row(
        pc.chain(pc.bucketize("1KiB"), pc.shard("local"), pc.shard("node"), pc.all_gather_avg(axis="rack")),
        (oracle.mean(),),
        mesh=deep,
    ),
    # Different treatment by path.
    Row(pc.partition({"*": pc.all_to_all_avg()}), (oracle.mean(),)),
    # Maps alone, before and after.
    Row(pc.chain(), (oracle.same,)),
    Row(pc.scale(2.0), (oracle.scaled(2.0),)),
    Row(pc.clip_by_value(1.0), (oracle.clamped(1.0),)),
    Row(pc.clip_by_global_norm(1.5), (oracle.clipped(1.5),)),
    Row(pc.stateless(unchanged), (oracle.same,)),
    Row(pc.chain(pc.scale(3.0), pc.all_to_all_avg()), (oracle.scaled(3.0), oracle.mean())),
    Row(pc.chain(pc.all_gather_avg(), pc.clip_by_value(1.0)), (oracle.mean(), oracle.clamped(1.0))),
    Row(pc.chain(pc.ring_reduce(), pc.stateless(unchanged)), (oracle.mean(), oracle.same)),
    Row(pc.chain(pc.stateless(unchanged), pc.all_to_all_avg()), (oracle.same, oracle.mean())),
    Row(
        pc.chain(pc.clip_by_global_norm(2.0), pc.bucketize(48), pc.compress("bf16"), pc.ring_reduce(), pc.scale(2.0)),
        (oracle.clipped(2.0), oracle.mean(BF16, hops), oracle.scaled(2.0)),
    ),
    Row(
        pc.chain(pc.bucketize(), pc.all_to_all_avg(), pc.clip_by_global_norm(0.5)),
        (oracle.mean(), oracle.clipped(0.5)),
    ),
    # Two reducers, and transforms around whole chains.
    Row(pc.chain(pc.gather_avg(root=0), pc.broadcast(root=0)), (oracle.mean_at(0), oracle.copy_of(0))),
    Row(
        pc.chain(pc.bucketize(), pc.ring_reduce(), pc.compress("bf16"), pc.broadcast()),
        (oracle.mean(), oracle.copy_of(0, BF16)),
    ),
    Row(
        pc.compress("fp16")(pc.chain(pc.scale(2.0), pc.all_gather_avg())),
        (oracle.scaled(2.0), oracle.mean(FP16, once)),
    ),
    Row(
        pc.bucketize("1KiB")(pc.chain(pc.gather_avg(), pc.broadcast())),
        (oracle.mean_at(0), oracle.copy_of(0)),
    ),
    Row(
        pc.bucketize("25MiB")(pc.compress("bf16")(pc.chain(pc.all_gather_avg(), pc.broadcast(root=1)))),
        (oracle.mean(BF16, once), oracle.copy_of(1, BF16)),
        ranks=2,
    ),
)


# Trees --------------------------------------------------------------------------------------------------------------


class Numbers:
    """Makes the leaves of one rank's tree; the same seed makes the same leaves, other ranks get other ones."""

    def __init__(self, tree: str, rank: int) -> None:
        self.rank = rank
        self._generator = torch.Generator().manual_seed(zlib.crc32(f"{tree}/{rank}".encode()))

    def real(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(dtype)

    def complex(self, *shape: int, dtype: torch.dtype = torch.complex64) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.complex128).to(dtype)

    def integer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Small enough for sums over 8 ranks, and three times those, to fit int8."""
        low, high = (0, 10) if dtype == torch.uint8 else (-5, 6)
        return torch.randint(low, high, shape, generator=self._generator).to(dtype)


class Pair(NamedTuple):
    weight: Tensor
    bias: Tensor


@optree.dataclasses.dataclass(namespace="ptcollect")
class Layer:
    weight: Tensor
    bias: Tensor


Make = Callable[[Numbers], Any]


def mixed(new: Numbers) -> Any:
    return {
        "layers": {"10": {"w": new.real(3, 4)}, "2": {"w": new.real(5), "b": None}},
        "scalar": new.real(),
        "half": new.real(6, dtype=torch.bfloat16),
        "steps": new.integer(2, dtype=torch.int64),
        "empty": new.real(0, 10),
        "head": [new.real(7), (new.real(1, dtype=torch.float64), None)],
    }


def strided(new: Numbers) -> Any:
    return {
        "column": new.real(5, 3)[:, 0],
        "transposed": new.real(3, 4).T,
        "channels_last": new.real(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "every_other": new.real(9)[::2],
        "offset": new.real(8)[3:],
        "permuted": new.real(2, 3, 4).permute(2, 0, 1),
    }


def expanded(new: Numbers) -> Any:
    return {"rows": new.real(4).expand(3, 4), "columns": new.real(3, 1).expand(3, 4), "all": new.real().expand(2, 3)}


def complexes(new: Numbers) -> Any:
    return {
        "complex64": new.complex(3, 3),
        "complex128": new.complex(5, dtype=torch.complex128),
        "conjugated": new.complex(4, 2).conj(),
        "adjoint": new.complex(2, 3).mH,
        "negated": new.complex(5).conj().imag,  # has the negative bit
        "scalar": new.complex(),
    }


def integers(new: Numbers) -> Any:
    dtypes = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
    return {str(dtype): new.integer(7, dtype=dtype) for dtype in dtypes}


def narrow(new: Numbers) -> Any:
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    return {str(dtype): new.real(9, dtype=dtype) for dtype in dtypes}


def empties(new: Numbers) -> Any:
    return {
        "flat": new.real(0),
        "wide": new.real(0, 10),
        "integer": new.integer(0, dtype=torch.int32),
        "w": new.real(3),
    }


TREES: dict[str, Make] = {
    "mixed": mixed,
    "strided": strided,
    "expanded": expanded,
    "complex": complexes,
    "integers": integers,
    "narrow": narrow,
    "empties": empties,
    "only_empty": lambda new: [new.real(0)],
    "bare": lambda new: new.real(10, 3),
    "bare_scalar": lambda new: new.real(),
    "one_leaf": lambda new: {"w": new.real(2, 2, dtype=torch.float64)},
    "list": lambda new: [new.real(2), new.real(3)],
    "tuple": lambda new: (new.real(2), {"a": new.real(3)}),
    "named_tuple": lambda new: Pair(new.real(2, 2), new.real(2)),
    "ordered_dict": lambda new: OrderedDict([("z", new.real(3)), ("a", new.real(2))]),
    "dataclass": lambda new: Layer(new.real(3, 2), new.real(3)),
    "all_missing": lambda new: {"a": None, "b": [None]},
    "requires_grad": lambda new: {"w": new.real(4).requires_grad_(), "b": torch.nn.Parameter(new.real(2))},
    "numel_1": lambda new: new.real(1),
    "numel_7": lambda new: new.real(7),
    "numel_8": lambda new: new.real(8),
}


@functools.cache
def trees(name: str, n: int) -> tuple[Any, ...]:
    """The trees of `n` ranks; to be left unchanged."""
    return tuple(make(name, rank) for rank in range(n))


def make(name: str, rank: int) -> Any:
    """One rank's tree, in storage of its own."""
    return TREES[name](Numbers(name, rank))
