"""`auto_reduce`: which algorithm a size gets, what that costs, and where the order of summation shows."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

import ptcollect as pc


def trees(n: int, numel: int) -> list[torch.Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(n)]


@pytest.mark.parametrize("n", range(2, 18))
def test_a_small_tensor_takes_the_fewest_rounds(n):
    numel, m = 7, 2 ** int(math.log2(n))
    run = pc.simulate(pc.auto_reduce(), trees(n, numel))
    paired = [int(math.log2(m)) + 2 * (rank < n - m) for rank in range(m)]
    assert run.rounds == paired + [2] * (n - m)
    sends = [int(math.log2(m)) + (rank < n - m) for rank in range(m)] + [1] * (n - m)
    assert run.messages == sends
    assert run.bytes == [each * numel * 4 for each in sends]


@pytest.mark.parametrize("n", range(2, 18))
def test_pairs_are_added_as_a_tree(n):
    """The oracle: ranks from m on are added to those below, then neighbours, then pairs of neighbours and so on."""
    values = [tree.double() for tree in trees(n, 5)]
    m = 2 ** int(math.log2(n))
    sums = [v + values[m + i] if i < n - m else v for i, v in enumerate(values[:m])]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    for tree in pc.simulate(pc.auto_reduce(), [v.clone() for v in values]).trees:
        assert torch.equal(tree, sums[0] / n), "float64 sums of scaled parts, and the same on every rank"


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("numel", "same_as"),
    [(64 * 256 + 1, pc.all_to_all_avg()), (2**18, pc.all_to_all_avg()), (2**18 + 1, pc.ring_reduce())],
)
def test_larger_ones_are_those_reducers_bit_for_bit(n, numel, same_as):
    inputs = trees(n, numel)
    found, expected = pc.simulate(pc.auto_reduce(), inputs), pc.simulate(same_as, inputs)
    assert all(map(torch.equal, found.trees, expected.trees))
    assert (found.bytes, found.messages, found.rounds) == (expected.bytes, expected.messages, expected.rounds)


def test_bytes_count_after_compression():
    inputs = trees(4, 2**15)  # 128 KiB of float32, 64 KiB of bf16
    assert pc.simulate(pc.auto_reduce(), inputs).messages == [6] * 4
    assert pc.simulate(pc.chain(pc.compress("bf16"), pc.auto_reduce()), inputs).messages == [2] * 4
    assert pc.simulate(pc.chain(pc.compress("bf16"), pc.auto_reduce(doubling="32KiB")), inputs).messages == [6] * 4


@pytest.mark.parametrize("codec", ["int8", pc.codecs.topk(0.5), pc.codecs.randk(0.5)], ids=repr)
def test_packets_that_may_differ_between_ranks_go_directly(codec):
    inputs = trees(4, 40)
    packed = pc.chain(pc.compress(codec), pc.auto_reduce())
    direct = pc.chain(pc.compress(codec), pc.all_to_all_avg())
    for found, expected in zip(pc.simulate(packed, inputs).trees, pc.simulate(direct, inputs).trees, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("n", [2, 3, 5, 6, 8])
def test_40000_stays_40000(n):
    full = [torch.full((3,), 40000.0, dtype=torch.float16)] * n
    assert all(torch.equal(tree, full[0]) for tree in pc.simulate(pc.auto_reduce(), full).trees)


@pytest.mark.parametrize("n", [3, 6, 8])
def test_integers_are_exact(n):
    inputs = [torch.tensor([2**40 + rank, rank]) for rank in range(n)]
    mean = torch.tensor([oracle_mean([2**40 + rank for rank in range(n)]), oracle_mean(list(range(n)))])
    assert all(torch.equal(tree, mean) for tree in pc.simulate(pc.auto_reduce(), inputs).trees)


def oracle_mean(values: list[int]) -> int:
    """Rounded to the nearest, halves to the even one."""
    return round(Fraction(sum(values), len(values)))


@pytest.mark.parametrize("option", ["doubling", "direct"])
def test_a_size_that_is_none(option):
    with pytest.raises(
        ValueError, match=rf"auto_reduce\({option}=\.\.\.\): expected bytes as an int or a size.*'lots'"
    ):
        pc.auto_reduce(**{option: "lots"})
    with pytest.raises(ValueError, match="positive size or 0, got -1"):
        pc.auto_reduce(**{option: -1})
