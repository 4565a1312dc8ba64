"""What a right answer is, computed without the library: a list of ranks, float64, exact integers, and an error bound.

A `World` is a list over ranks of lists of `Leaf`, the leaves in optree's order. Each step of a pipeline has a function
here from World to World, so a row of the table of pipelines says what it means as a list of such functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import optree
import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaf:
    """A leaf's right value and how far from it an answer may be, element by element."""

    value: Tensor
    """float64, the parts of complex numbers side by side; int64 for integers."""
    bound: Tensor
    dtype: torch.dtype
    """The numbers' own dtype: float32 for complex64."""

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point


World = list[list["Leaf | None"]]
Step = Callable[[World], World]


def leaves(tree: Any) -> list[Tensor | None]:
    """The leaves of `tree` in optree's order, ``None`` among them."""
    return optree.tree_leaves(tree, none_is_leaf=True, namespace="ptcollect")


def structure(tree: Any) -> optree.PyTreeSpec:
    """What `tree` is without its leaves."""
    return optree.tree_structure(tree, none_is_leaf=True, namespace="ptcollect")


def numbers(leaf: Tensor) -> Tensor:
    """The leaf's numbers in float64 (int64 for integers), complex ones as pairs."""
    leaf = leaf.detach().resolve_conj().resolve_neg()
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf.contiguous())
    return leaf.to(torch.float64 if leaf.dtype.is_floating_point else torch.int64).contiguous()


def number_dtype(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def world(trees: Sequence[Any]) -> World:
    """The ranks' trees as they are, known exactly."""
    return [[None if leaf is None else _exact(leaf) for leaf in leaves(tree)] for tree in trees]


def _exact(leaf: Tensor) -> Leaf:
    value = numbers(leaf)
    return Leaf(value, torch.zeros(value.shape, dtype=torch.float64), number_dtype(leaf.dtype))


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def subnormal(dtype: torch.dtype) -> float:
    """The smallest positive number of `dtype`."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


# Steps that mix ranks -----------------------------------------------------------------------------------------------


def mean(codec: torch.dtype | None = None, encodings: Callable[[int], int] = lambda n: 0) -> Step:
    """Every rank gets the mean.

    Lossless: within n * eps of the leaf's dtype relative to the largest input, plus n subnormals. With a codec each
    of the `encodings(n)` roundings that an element goes through adds half an eps of the codec's dtype and half a
    subnormal.
    """
    return lambda ranks: _everywhere(ranks, lambda column: _mean(column, codec, encodings(len(ranks))))


def total(codec: torch.dtype | None = None, encodings: Callable[[int], int] = lambda n: 0) -> Step:
    """Every rank gets the sum; n times the mean and n times its bound."""

    def summed(column: list[Leaf]) -> Leaf:
        n = len(column)
        if not column[0].floating:
            return Leaf(torch.stack([leaf.value for leaf in column]).sum(0), column[0].bound, column[0].dtype)
        whole = _mean(column, codec, encodings(n))
        return Leaf(whole.value * n, whole.bound * n, whole.dtype)

    return lambda ranks: _everywhere(ranks, summed)


def mean_at(root: int, codec: torch.dtype | None = None, encodings: Callable[[int], int] = lambda n: 0) -> Step:
    """The root gets the mean, the others keep what they have."""

    def step(ranks: World) -> World:
        where = root % len(ranks)
        return [mean(codec, encodings)(ranks)[where] if rank == where else ranks[rank] for rank in range(len(ranks))]

    return step


def copy_of(root: int, codec: torch.dtype | None = None) -> Step:
    """Every rank gets the root's, after one encoding."""

    def copied(column: list[Leaf]) -> Leaf:
        leaf = column[root]
        return _encoded(leaf, codec, 1) if len(column) > 1 and leaf.floating else leaf

    return lambda ranks: _everywhere(ranks, copied)


def gossip(weights: Callable[[int], list[list[Fraction]]], codec: torch.dtype | None = None) -> Step:
    """Every rank gets its own weighted mean, with exact weights that sum to 1 in every row.

    With a codec own and received numbers are each rounded once.
    """

    def mixed(column: list[Leaf], row: list[Fraction]) -> Leaf:
        values, dtype = torch.stack([leaf.value for leaf in column]), column[0].dtype
        if not column[0].floating:
            sums = [
                round(sum(w * v for w, v in zip(row, numbers, strict=True)))
                for numbers in zip(*values.reshape(len(row), -1).tolist(), strict=True)
            ]
            return Leaf(torch.tensor(sums, dtype=torch.int64).reshape(values.shape[1:]), column[0].bound, dtype)
        value = sum((float(w) * leaf.value for w, leaf in zip(row, column, strict=True)), torch.zeros_like(values[0]))
        n, largest = len(row), values.abs().amax(0)
        bound = torch.stack([leaf.bound for leaf in column]).amax(0)
        leaf = Leaf(value, bound + (n * eps(dtype) * largest + n * subnormal(dtype) if n > 1 else 0), dtype)
        return _encoded(leaf, codec, 2, largest) if n > 1 else leaf

    def step(ranks: World) -> World:
        matrix, columns = weights(len(ranks)), list(zip(*ranks, strict=True))
        return [
            [None if column[0] is None else mixed([leaf for leaf in column if leaf], row) for column in columns]
            for row in matrix
        ]

    return step


def _everywhere(ranks: World, combine: Callable[[list[Leaf]], Leaf]) -> World:
    columns = zip(*ranks, strict=True)
    result = [None if column[0] is None else combine([leaf for leaf in column if leaf]) for column in columns]
    return [list(result) for _ in ranks]


def _mean(column: list[Leaf], codec: torch.dtype | None, encodings: int) -> Leaf:
    n, dtype = len(column), column[0].dtype
    values = torch.stack([leaf.value for leaf in column])
    if not column[0].floating:
        return Leaf(_integer_mean(values), column[0].bound, dtype)
    bound = torch.stack([leaf.bound for leaf in column]).mean(0)
    if n == 1:
        return Leaf(values[0], bound, dtype)
    largest = values.abs().amax(0) + torch.stack([leaf.bound for leaf in column]).amax(0)
    bound = bound + n * eps(dtype) * largest + n * subnormal(dtype)
    result = Leaf((values / n).sum(0), bound, dtype)  # the sum may be too large for float64
    return _encoded(result, codec, encodings, largest)


def _encoded(leaf: Leaf, codec: torch.dtype | None, encodings: int, largest: Tensor | None = None) -> Leaf:
    if codec is None:
        return leaf
    largest = leaf.value.abs() + leaf.bound if largest is None else largest
    # 1.01: roundings of values that are themselves off by roundings.
    loss = 1.01 * encodings * (eps(codec) / 2 * largest + subnormal(codec) / 2)
    return Leaf(leaf.value, leaf.bound + loss + eps(leaf.dtype) * largest, leaf.dtype)


def _integer_mean(values: Tensor) -> Tensor:
    """The exact mean of integers, rounded to the nearest, halves to the even one."""
    n = len(values)
    sums = [sum(column) for column in zip(*values.reshape(n, -1).tolist(), strict=True)]
    rounded = [round(Fraction(number, n)) for number in sums]  # Fraction rounds halves to even
    return torch.tensor(rounded, dtype=torch.int64).reshape(values.shape[1:])


# Steps on each rank by itself ---------------------------------------------------------------------------------------


def scaled(factor: float) -> Step:
    def one(leaf: Leaf) -> Leaf:
        if not leaf.floating:
            return Leaf(leaf.value * int(factor), leaf.bound, leaf.dtype)
        value = leaf.value * factor
        return Leaf(value, abs(factor) * leaf.bound + _one_rounding(value, leaf), leaf.dtype)

    return lambda ranks: [[leaf and one(leaf) for leaf in rank] for rank in ranks]


def clamped(limit: float) -> Step:
    """To [-limit, limit], a number that every dtype of the table has."""

    def one(leaf: Leaf) -> Leaf:
        return Leaf(leaf.value.clamp(-int(limit), int(limit)), leaf.bound, leaf.dtype)

    return lambda ranks: [[leaf and one(leaf) for leaf in rank] for rank in ranks]


def clipped(max_norm: float) -> Step:
    """The whole tree of each rank to Euclidean norm `max_norm` at most; integers pass."""

    def tree(rank: list[Leaf | None]) -> list[Leaf | None]:
        floating = [leaf for leaf in rank if leaf and leaf.floating]
        norm = sum(float((leaf.value**2).sum()) for leaf in floating) ** 0.5
        slack = sum(float((leaf.bound**2).sum()) for leaf in floating) ** 0.5
        factor, most, least = (_factor(max_norm, length) for length in (norm, norm - slack, norm + slack))
        return [leaf and (one(leaf, factor, most - least) if leaf.floating else leaf) for leaf in rank]

    def one(leaf: Leaf, factor: float, off: float) -> Leaf:
        value = leaf.value * factor
        bound = (factor + off) * leaf.bound + off * leaf.value.abs() + 4 * _one_rounding(value, leaf)
        return Leaf(value, bound, leaf.dtype)  # 4: norm, quotient and product are rounded, here in float64 too

    return lambda ranks: [tree(rank) for rank in ranks]


def same(ranks: World) -> World:
    """The identity."""
    return ranks


def _factor(max_norm: float, norm: float) -> float:
    return min(1.0, max_norm / norm) if norm > 0 else 1.0


def _one_rounding(value: Tensor, leaf: Leaf) -> Tensor:
    return eps(leaf.dtype) * (value.abs() + leaf.bound) + subnormal(leaf.dtype)


# Comparison ---------------------------------------------------------------------------------------------------------


def expected(steps: Sequence[Step], trees: Sequence[Any]) -> World:
    """What the ranks end with."""
    ranks = world(trees)
    for step in steps:
        ranks = step(ranks)
    return ranks


def complaint(got: Tensor, leaf: Leaf) -> str | None:
    """Why `got` is not a right answer, or None if it is one."""
    value = numbers(got)
    if value.shape != leaf.value.shape:
        return f"shape {tuple(value.shape)}, expected {tuple(leaf.value.shape)}"
    off = (value - leaf.value).abs().to(torch.float64)
    wrong = ~(off <= leaf.bound)  # NaN is wrong
    if not wrong.any():
        return None
    where = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements; the first at {where}: expected {leaf.value[where].item()!r}, "
        f"got {value[where].item()!r}, off by {off[where].item():.3g}, allowed {leaf.bound[where].item():.3g}"
    )


def bits(leaf: Tensor) -> bytes:
    """The leaf's elements as bytes in row-major order."""
    plain = leaf.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees have the same structure, shapes, dtypes and bits."""
    return structure(one) == structure(other) and all(
        (a is None and b is None)
        or (a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b))
        for a, b in zip(leaves(one), leaves(other), strict=True)
    )
