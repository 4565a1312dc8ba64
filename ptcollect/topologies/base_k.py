"""Base-(k+1) graph: the exact mean after O(log n) steps, with at most k peers in each, for every world size."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ptcollect.topologies.topology import IDLE, Part, Topology, Turn, circle_partner, circle_rounds, own_weight
from ptcollect.value import whole_number

Ranks = Sequence[int]
Meeting = tuple[int, int, int, float]
"""Two ranks, the round in which they meet, and the weight of the other's tensor on both sides."""
Step = list[Meeting]


@dataclass(frozen=True, repr=False)
class base_k(Topology):
    r"""At most k peers a step, and the exact mean after at most 2 log(n) / log(k+1) + 2 steps, for every n.

    .. math:: W^{(m)} \cdots W^{(2)} W^{(1)} = \tfrac1n \mathbf 1 \mathbf 1^\top, \qquad m \le 2 \log_{k+1} n + 2

    Where n has prime factors up to k+1 only, groups of those sizes average in turn, digit by digit. Otherwise n is
    written in base k+1; the parts that stand for the digits average inside, the smaller parts take their share from
    each larger part in turn, and what that left behind averages inside again. The two combine over the factors of n
    where that is shorter. Ranks that have nothing to do in a step idle.

    Args:
        k: most peers of a rank in a step, from 1.

    Source: Takezawa et al. 2023, Beyond exponential graph, algorithms 1 to 3, theorem 1.

    >>> import ptcollect as pc
    >>> [pc.topologies.base_k(k).period(6) for k in (1, 2, 5)]
    [4, 2, 1]
    >>> pc.rounds_to_consensus(pc.topologies.base_k(), 6, tol=1e-12)
    4
    """

    k: int = 1

    varies = True

    def __post_init__(self) -> None:
        whole_number("base_k(k)", self.k)

    def period(self, n: int) -> int | None:
        return max(1, len(_steps(n, self.k)))

    def part(self, n: int, step: int, rank: int) -> Part:
        return _parts(n, self.k, step % (self.period(n) or 1))[rank]


@functools.lru_cache(maxsize=64)
def _parts(n: int, k: int, number: int) -> list[Part]:
    """What every rank does in one step of the period."""
    steps = _steps(n, k)
    step = steps[number] if steps else []
    rounds = 1 + max((round_ for _, _, round_, _ in step), default=-1)
    turns = [[IDLE] * rounds for _ in range(n)]
    for i, j, round_, weight in step:
        turns[i][round_], turns[j][round_] = Turn(j, j, weight), Turn(i, i, weight)
    return [Part(own_weight(mine), tuple(mine)) for mine in turns]


@functools.lru_cache(maxsize=32)
def _steps(n: int, k: int) -> list[Step]:
    """Algorithm 3: simple graphs inside p groups of q ranks, then averages across the groups; or one simple graph."""
    p = math.prod(_factors(n, k)[0])
    q = n // p
    simple = _simple(range(n), k)
    if p == 1 or q == 1:
        return simple
    inside = [_simple(range(g * q, (g + 1) * q), k) for g in range(p)]
    across = [_cube(range(i, n, q), k) for i in range(q)]
    if len(simple) < len(inside[0]) + len(across[0]):
        return simple
    return _together(inside) + _together(across)


def _cube(ranks: Ranks, k: int) -> list[Step]:
    """Algorithm 1: the exact mean of `ranks`, whose number has factors up to k+1 only, one factor a step."""
    steps, distance = [], 1
    for size in _factors(len(ranks), k)[0]:
        starts = [i for i in range(len(ranks)) if i // distance % size == 0]
        groups = [[ranks[start + j * distance] for j in range(size)] for start in starts]
        steps.append([meeting for group in groups for meeting in _averaged(group)])
        distance *= size
    return steps


def _averaged(group: Ranks) -> Iterator[Meeting]:
    """Every rank of `group` gets its mean."""
    for round_ in range(circle_rounds(len(group))):
        for i in range(len(group)):
            j = circle_partner(len(group), round_, i)
            if j is not None and i < j:
                yield group[i], group[j], round_, 1 / len(group)


def _simple(ranks: Ranks, k: int) -> list[Step]:
    """Algorithm 2: the exact mean of any number of ranks."""
    n = len(ranks)
    if _factors(n, k)[1] == 1:
        return _cube(ranks, k)
    parts = _digits(ranks, k + 1)  # lists of blocks, a power of k+1 ranks in each, the largest first
    sizes = [sum(map(len, blocks)) for blocks in parts]
    whole = [_cube([rank for block in blocks for rank in block], k) for blocks in parts]
    steps = [_together([[cube[m % len(cube)]] for cube in whole if cube])[0] for m in range(len(whole[0]))]

    # Every rank of a smaller part meets one rank of each block of part `large`, and takes what is its share of the
    # mean; those it met have in turn what makes the mean of their block right.
    exchanges: list[Step] = []
    for large, blocks in enumerate(parts[:-1]):
        share = sizes[large] / sum(sizes[large:]) / len(blocks)
        smaller = [rank for later in parts[large + 1 :] for block in later for rank in block]
        exchanges.append(
            [
                (blocks[colour][place], rank, colour, share)
                for place, rank in enumerate(smaller)
                for colour in range(len(blocks))
            ]
        )
    # Then each block of it averages inside, while smaller parts go on.
    settling = [_together([_cube(block, k) for block in blocks]) for blocks in parts]
    after = [exchanges[m] if m < len(exchanges) else [] for m in range(1 + len(settling[0]))]
    for large, cubes in enumerate(settling[:-1]):
        for m, step in enumerate(cubes, start=large + 1):
            after[m] = after[m] + step
    return steps + after


def _digits(ranks: Ranks, base: int) -> list[list[Ranks]]:
    """`ranks` split by the digits of their number in `base`: digit times blocks of a power of it, largest first."""
    power = 1
    while power * base <= len(ranks):
        power *= base
    parts, start = [], 0
    while start < len(ranks):
        digit = (len(ranks) - start) // power
        if digit:
            parts.append([ranks[start + i * power : start + (i + 1) * power] for i in range(digit)])
            start += digit * power
        power //= base
    return parts


def _together(groups: Sequence[list[Step]]) -> list[Step]:
    """Steps of groups that share no rank, side by side."""
    longest = max(map(len, groups), default=0)
    return [[meeting for steps in groups if m < len(steps) for meeting in steps[m]] for m in range(longest)]


def _factors(n: int, k: int) -> tuple[list[int], int]:
    """As few factors from 2 to k+1 as make the largest divisor of n that has such factors only; and the rest of n."""
    smooth, rest = 1, n
    for prime in range(2, k + 2):
        while rest % prime == 0:
            smooth, rest = smooth * prime, rest // prime
    return _fewest(smooth, k), rest


@functools.lru_cache(maxsize=1024)
def _fewest(smooth: int, k: int) -> list[int]:
    if smooth == 1:
        return []
    options = [[*_fewest(smooth // size, k), size] for size in range(min(k + 1, smooth), 1, -1) if smooth % size == 0]
    return min(options, key=len)
