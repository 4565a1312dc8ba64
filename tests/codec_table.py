"""What the tests of compression run over: every codec, the reducers that report what they lost, a tree, and the books.

A new codec joins `CODECS`; `test_codecs.py` fails while one is missing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

import ptcollect as pc

C = pc.codecs

CODECS = (
    C.bf16(),
    C.fp16(),
    C.fp8(),
    C.int8(),
    C.int8(stochastic=True),
    C.int4(),
    C.int4(stochastic=True),
    C.sign(),
    C.ternary(),
    C.ternary(stochastic=True),
    C.topk(0.2),
    C.topk(0.2, values="int8"),
    C.randk(0.3),
)
REDUCERS = (pc.ring_reduce(), pc.all_to_all_avg(), pc.all_gather_avg(), pc.auto_reduce())

KEY = C.Key(step=0, path="w", rank=0, hop=0)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors here are tiny: a second thread only waits (a QR of 6 x 2 took 0.02 ms on one, 3 ms on two busy cores)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def round_trip(codec: pc.Codec, x: Tensor, key: C.Key = KEY) -> Tensor:
    return codec.decode(codec.encode(x, key), x.numel(), x.dtype)


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """One rank's gradients at one step; low_rank(2) makes thin matrices of three of them."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank}/{step}".encode()))

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "conv": new(5, 2, 3),
        "double": new(4, dtype=torch.float64),
        "empty": new(0, 3),
        "half": new(6, 6, dtype=torch.bfloat16),
        "matrix": new(7, 6).T,
        "scalar": new(),
        "steps": torch.randint(-9, 10, (3,), generator=generator),
        "strided": new(19)[::2],
    }


def residuals(state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Every residual in a state, with its parameter's path."""
    found: list[tuple[str, Tensor]] = []
    for key, value in state.items():
        if key == "residual":
            found += value.items()
        elif isinstance(value, dict):
            found += residuals(value)
    return found


def same_data(one: object, other: object) -> bool:
    """Whether two states, or trees in lists and dicts, are equal bit for bit."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_data, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_data(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and oracle.bits(one) == oracle.bits(other)
    return type(one) is type(other) and one == other


@dataclass
class Books:
    """Adds up, in float64, what went in, what came out n times, and how large the numbers were on the way.

    The law: n * sum of results + sum of residuals = sum of gradients. Its bound: let S be the sum over ranks of the
    largest |gradient| + |residual| of the step. What is rounded on the way, in units of sums of inputs, is a partial
    sum, a decoded one, or the difference of the two, so at most 2 S. An element meets at most n encodings before the
    result's, and each costs a subtraction, a booking, and up to two additions of what was decoded: 8n roundings of half
    an eps of S; adding the residuals costs 1; division, subtraction, booking and decoding of the result cost 8; what a
    narrow leaf cannot hold 2. That makes (8n + 11) eps/2 S per step, and steps add.

    Under low_rank the numbers on the way are those of Q, at most sqrt(rows) times as large, and each of the products
    P Q^T is summed over `rank` columns with rank + 1 roundings.
    """

    n: int
    rank: int = 0
    given: dict[str, Tensor] = field(default_factory=dict)
    arrived: dict[str, Tensor] = field(default_factory=dict)
    sizes: float = 0.0

    def step(self, trees: Sequence[Mapping[str, Tensor]], states: Sequence[Any], results: Sequence[Any]) -> None:
        """Book one step: gradients and states before it, results after it."""
        for path, leaf in results[0].items():
            if leaf.dtype.is_floating_point:
                total = sum(tree[path].double() for tree in trees)
                self.given[path] = self.given.get(path, 0) + total
                self.arrived[path] = self.arrived.get(path, 0) + self.n * leaf.double()
        for tree, state in zip(trees, states, strict=True):
            self.sizes += max(float(leaf.abs().max()) for leaf in tree.values() if leaf.numel())
            self.sizes += max([float(leaf.abs().max()) for _, leaf in residuals(state) if leaf.numel()], default=0.0)

    def bound(self, leaf: Tensor) -> float:
        dtype = torch.float64 if leaf.dtype == torch.float64 else torch.float32
        growth = self.rank * (self.rank + 1) * 7**0.5 if self.rank else 1.0  # 7: rows of the tallest matrix, at most
        return (8 * self.n + 11) * oracle.eps(dtype) / 2 * self.sizes * growth

    def gap(self, states: Sequence[Any]) -> dict[str, Tensor]:
        """By path, how far the books are from balancing."""
        gaps = {path: self.arrived[path] - self.given[path] for path in self.given}
        for state in states:
            for path, leaf in residuals(state):
                gaps[path] = gaps[path] + leaf.double()
        return gaps

    def check(self, states: Sequence[Any], like: Mapping[str, Tensor]) -> None:
        for path, gap in self.gap(states).items():
            off = float(gap.abs().max()) if gap.numel() else 0.0
            assert off <= self.bound(like[path]), f"{path}: off by {off:.3g}, allowed {self.bound(like[path]):.3g}"


def run(
    pipeline: pc.Pipeline,
    n: int,
    steps: int,
    books: Books | None = None,
    states: list[Any] | None = None,
    *,
    first: int = 0,
    make: Any = gradients,
    axes: Mapping[str, int] | None = None,
) -> tuple[list[Any], Books]:
    """Steps `first` to `first + steps` on `n` virtual ranks; all ranks must agree bit for bit, integers be exact."""
    books = Books(n) if books is None else books
    states = [pipeline.init(make(rank, 0)) for rank in range(n)] if states is None else states
    for step in range(first, first + steps):
        trees = [make(rank, step) for rank in range(n)]
        ran = pc.simulate(pipeline, trees, states, axes=axes)
        books.step(trees, states, ran.trees)
        states = ran.states
        for rank in range(1, n):
            assert oracle.same_bits(ran.trees[rank], ran.trees[0]), f"rank {rank} ends with other bits in step {step}"
        for path, leaf in ran.trees[0].items():
            if not leaf.dtype.is_floating_point:
                sums = sum(tree[path] for tree in trees)
                assert leaf.tolist() == [round(float(total) / n) for total in sums.tolist()]
    return states, books
