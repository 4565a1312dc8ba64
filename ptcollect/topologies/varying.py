"""Topologies with one peer a step, another one in the next: one-peer exponential, random matching, bipartite."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from ptcollect.topologies.topology import IDLE, Part, Topology, Turn


@dataclass(frozen=True, repr=False)
class one_peer_exponential(Topology):
    r"""One peer a step, at the distances 1, 2, 4, ... in turn: the mean itself after log2 n steps if n is a power of 2.

    .. math:: W^{(t)}_{ii} = W^{(t)}_{i,\,i - 2^k \bmod n} = \frac12, \qquad k = t \bmod \lceil \log_2 n \rceil

    One message of each rank a step, whatever n. Each rank sends 2^k places on and receives from as far back. For other
    n the mean is only approached.

    Source: Ying et al. 2021, Exponential graph is provably efficient for decentralized deep training, section 4.

    >>> import ptcollect as pc
    >>> pc.rounds_to_consensus(pc.topologies.one_peer_exponential(), 16, tol=1e-12)
    4
    """

    varies = True

    def period(self, n: int) -> int | None:
        return max(1, (n - 1).bit_length())

    def part(self, n: int, step: int, rank: int) -> Part:
        if n == 1:
            return _alone()
        distance = 1 << step % (n - 1).bit_length()
        return Part(0.5, (Turn((rank + distance) % n, (rank - distance) % n, 0.5),))


@dataclass(frozen=True, repr=False)
class random_matching(Topology):
    r"""At each step a random perfect matching, drawn from the seed and the step alone; of an odd n one rank idles.

    .. math:: W^{(t)}_{ii} = W^{(t)}_{ij} = \frac12 \quad\text{for } j \text{ matched with } i

    Args:
        seed: another one gives other matchings; the same on all ranks. The global random state is never touched.

    Source: Boyd et al. 2006, Randomized gossip algorithms.

    >>> import ptcollect as pc
    >>> pc.topologies.random_matching(seed=3).part(5, 7, rank=0) == pc.topologies.random_matching(3).part(5, 7, rank=0)
    True
    """

    seed: int = 0

    varies = True

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"random_matching(seed): expected a whole number, got {self.seed!r}")

    def period(self, n: int) -> int | None:
        return None if n > 2 else 1

    def part(self, n: int, step: int, rank: int) -> Part:
        peer = _matching(self.seed, n, step)[rank]
        return _pair(peer) if peer is not None else _idle(n)


@functools.lru_cache(maxsize=64)
def _matching(seed: int, n: int, step: int) -> tuple[int | None, ...]:
    """Whom every rank meets."""
    draw = random.Random(f"{seed}/{n}/{step}").random  # the one method that Python promises never to change
    order = [rank for _, rank in sorted((draw(), rank) for rank in range(n))]
    peers: list[int | None] = [None] * n
    for i in range(0, n - 1, 2):
        peers[order[i]], peers[order[i + 1]] = order[i + 1], order[i]
    return tuple(peers)


@dataclass(frozen=True, repr=False)
class bipartite(Topology):
    r"""Even ranks meet odd ranks only, one a step, at growing distances; of an odd n one even rank idles.

    .. math:: W^{(t)}_{ii} = W^{(t)}_{ij} = \frac12, \qquad i = 2a, \; j = 2\,(a + s_t \bmod m) + 1,
        \qquad s_t \in (0, 1, 2, 4, \dots)

    with m the number of pairs and s through the powers of two below it in turn. Two ranks of one side never wait for
    each other, which asynchronous schemes need.

    Source: Lian et al. 2018, Asynchronous decentralized parallel stochastic gradient descent, section 3 (the bipartite
    graph); Assran et al. 2019, Stochastic gradient push, appendix A (one peer, powers of two).

    >>> import ptcollect as pc
    >>> [pc.topologies.bipartite().part(6, step, rank=0).turns[0].to for step in range(4)]
    [1, 3, 5, 1]
    """

    varies = True

    def period(self, n: int) -> int | None:
        return len(_shifts(n))

    def part(self, n: int, step: int, rank: int) -> Part:
        shifts, side = _shifts(n), (n + 1) // 2  # places on either side; of an odd n the last odd one stays empty
        shift = shifts[step % len(shifts)]
        place, odd = divmod(rank, 2)
        peer = 2 * ((place - shift) % side) if odd else 2 * ((place + shift) % side) + 1
        return _pair(peer) if peer < n else _idle(n)


def _shifts(n: int) -> list[int]:
    return [0, *(1 << k for k in range(max(0, ((n + 1) // 2 - 1).bit_length())))]


def _pair(peer: int) -> Part:
    return Part(0.5, (Turn(peer, peer, 0.5),))


def _idle(n: int) -> Part:
    return Part(1.0, (IDLE,)) if n > 1 else _alone()


def _alone() -> Part:
    return Part(1.0, ())
