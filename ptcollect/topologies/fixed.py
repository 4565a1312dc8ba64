"""Topologies that are the same at every step: complete, ring, torus, hypercube, static exponential."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ptcollect.topologies.topology import Part, Regular, Topology, Turn, Undirected, circle_partner, circle_rounds
from ptcollect.value import whole_number


@dataclass(frozen=True, repr=False)
class complete(Regular):
    r"""Everybody meets everybody: the mean in one step of n-1 rounds (n where n is odd, and everybody idles once).

    .. math:: W_{ij} = 1/n

    Source: rounds by the circle method, Kirkman 1847.

    >>> import ptcollect as pc
    >>> pc.spectral_gap(pc.topologies.complete(), 5)
    1.0
    """

    def partners(self, n: int, rank: int) -> Sequence[int | None]:
        return [circle_partner(n, round_, rank) for round_ in range(circle_rounds(n))]


@dataclass(frozen=True, repr=False)
class ring(Regular):
    r"""Each rank meets its two neighbours, in two rounds; in three where n is odd, each rank idling in one of them.

    .. math:: W_{ii} = W_{i,i \pm 1} = 1/3

    Source: Lian et al. 2017, Can decentralized algorithms outperform centralized algorithms?, section 4.

    >>> import ptcollect as pc
    >>> round(pc.spectral_gap(pc.topologies.ring(), 16), 6)
    0.050747
    """

    def partners(self, n: int, rank: int) -> Sequence[int | None]:
        return _ring_partners(n, rank)


def _ring_partners(n: int, rank: int) -> list[int | None]:
    """Edge (i, i+1) in round i mod 2; of an odd ring the last edge, (n-1, 0), in a round of its own."""
    if n <= 2:
        return [1 - rank] if n == 2 else []
    rounds = 2 + n % 2
    partners: list[int | None] = [None] * rounds
    for left in ((rank - 1) % n, rank):
        round_ = 2 if n % 2 and left == n - 1 else left % 2
        partners[round_] = (left + 1) % n if left == rank else left
    return partners


@dataclass(frozen=True, repr=False)
class torus(Regular):
    r"""A grid whose rows and columns are rings: up to four neighbours. Ranks are numbered row by row.

    .. math:: W_{ii} = W_{ij} = 1/5 \quad\text{for the neighbours } j \text{ of } i

    Args:
        rows: rows of the grid, a divisor of n; None: the largest divisor up to the square root of n (1, and so a ring,
            where n is prime).

    >>> import ptcollect as pc
    >>> round(pc.spectral_gap(pc.topologies.torus(), 16), 6), round(pc.spectral_gap(pc.topologies.torus(rows=2), 16), 6)
    (0.4, 0.146447)
    """

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            whole_number("torus(rows)", self.rows)

    def check(self, n: int) -> None:
        if self.rows is not None and n % self.rows:
            raise ValueError(f"{self!r}: {n} ranks do not make {self.rows} equal rows; rows=None finds some that do")

    def partners(self, n: int, rank: int) -> Sequence[int | None]:
        rows = self.rows or max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
        columns = n // rows
        row, column = divmod(rank, columns)
        along = [None if c is None else row * columns + c for c in _ring_partners(columns, column)]
        across = [None if r is None else r * columns + column for r in _ring_partners(rows, row)]
        return [*along, *across]


@dataclass(frozen=True, repr=False)
class hypercube(Undirected):
    r"""Ranks whose numbers differ in one binary digit meet, digit by digit; where n is no power of two some idle.

    .. math:: W_{ii} = W_{ij} = \frac{1}{1 + \log_2 n}, \qquad j = i \oplus 2^k

    For other n the edges to ranks that do not exist are left out; the graph stays connected, and weights are Metropolis
    and Hastings'.

    >>> import ptcollect as pc
    >>> round(pc.spectral_gap(pc.topologies.hypercube(), 16), 6)
    0.4
    """

    def partners(self, n: int, rank: int) -> Sequence[int | None]:
        flipped = [rank ^ (1 << k) for k in range((n - 1).bit_length())]
        return [peer if peer < n else None for peer in flipped]


@dataclass(frozen=True, repr=False)
class exponential(Topology):
    r"""Each rank sends to those 1, 2, 4, ... places on and hears from those as far back, one distance a round.

    .. math:: W_{ii} = W_{i,\,i - 2^k \bmod n} = \frac{1}{1 + \lceil \log_2 n \rceil},
        \qquad 0 \le k < \lceil \log_2 n \rceil

    A directed graph that is doubly stochastic: in a round all ranks send one way and receive the other.

    Source: Ying et al. 2021, Exponential graph is provably efficient for decentralized deep training, section 3.

    >>> import ptcollect as pc
    >>> round(pc.spectral_gap(pc.topologies.exponential(), 16), 6)
    0.4
    """

    def part(self, n: int, step: int, rank: int) -> Part:
        distances = [1 << k for k in range((n - 1).bit_length())]
        weight = 1 / (1 + len(distances))
        return Part(weight, tuple([Turn((rank + d) % n, (rank - d) % n, weight) for d in distances]))
