"""The extension point for topologies: who talks to whom in a step, as a pure function of (world size, step, rank)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ptcollect.value import Value


class Turn(NamedTuple):
    """One rank's part in one round: at most one peer that it sends to, and one that it receives from.

    >>> import ptcollect as pc
    >>> pc.topologies.ring().part(4, 0, rank=1).turns[0]
    Turn(to=0, source=0, weight=0.3333333333333333)
    """

    to: int | None
    source: int | None
    weight: float
    """Of what comes from `source`."""


IDLE = Turn(None, None, 0.0)


class Part(NamedTuple):
    """One rank's row of the mixing matrix, and in which rounds the other entries of it arrive.

    >>> import ptcollect as pc
    >>> pc.topologies.one_peer_exponential().part(4, 1, rank=0)
    Part(own=0.5, turns=(Turn(to=2, source=2, weight=0.5),))
    """

    own: float
    """The weight of the rank's own tensor."""
    turns: tuple[Turn, ...]
    """One for each round of the step; a rank without a peer in a round idles."""


@dataclass(frozen=True, repr=False)
class Topology(Value):
    """A peer schedule: for every world size, step and rank the peers, their weights, and the round of each.

    Subclass as a frozen dataclass and write `part`; with a schedule that changes from step to step set ``varies =
    True`` and write `period` too. All ranks of a step have the same number of rounds, and what one rank sends in a
    round another must receive in the same round.

    >>> import torch, ptcollect as pc
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, repr=False)
    ... class star(pc.topologies.Topology):
    ...     '''Every rank meets rank 0, one after the other.'''
    ...
    ...     def part(self, n, step, rank):
    ...         from ptcollect.topologies import Part, Turn
    ...
    ...         meets = [(r if rank == 0 else 0) if rank in (0, r) else None for r in range(1, n)]
    ...         turns = tuple(Turn(peer, peer, 0.0 if peer is None else 1 / n) for peer in meets)
    ...         return Part(1 - sum(turn.weight for turn in turns), turns)
    >>> star()
    star()
    >>> pc.simulate(pc.gossip_avg(star()), [torch.tensor([float(rank)]) for rank in range(4)]).trees
    [tensor([1.5000]), tensor([0.7500]), tensor([1.5000]), tensor([2.2500])]
    """

    varies: ClassVar[bool] = False
    """Whether the schedule changes from step to step."""

    def check(self, n: int) -> None:
        """Raise a ValueError if there is no such topology of `n` ranks."""

    def period(self, n: int) -> int | None:
        """After how many steps the schedule repeats; None: never."""
        return 1

    def part(self, n: int, step: int, rank: int) -> Part:
        """What `rank` of `n` does in `step`."""
        raise NotImplementedError(f"{type(self).__qualname__}.part")

    @property
    def unbalanced(self) -> str | None:
        """What to say where ranks lose or gain weight, so that only `push_sum` finds the mean; None: none does."""
        return None

    def as_option(self) -> str:
        """How it reads as an option of a stage: by name where it has its defaults."""
        plain = type(self).__module__.startswith("ptcollect.") and repr(self) == f"{self.name}()"
        return f'"{self.name}"' if plain else repr(self)


@dataclass(frozen=True, repr=False)
class Undirected(Topology):
    """A fixed graph whose edges carry messages both ways, coloured: in each round a rank meets one partner at most.

    Weights are Metropolis and Hastings', 1 / (1 + larger degree): symmetric whatever the degrees, and the same for a
    rank and all its neighbours where all degrees are equal.
    """

    def partners(self, n: int, rank: int) -> Sequence[int | None]:
        """Whom `rank` meets in each round."""
        raise NotImplementedError(f"{type(self).__qualname__}.partners")

    def degree(self, n: int, rank: int) -> int:
        """How many neighbours `rank` has."""
        return sum(partner is not None for partner in self.partners(n, rank))

    def part(self, n: int, step: int, rank: int) -> Part:
        mine = self.degree(n, rank)
        turns = [
            IDLE if peer is None else Turn(peer, peer, 1 / (1 + max(mine, self.degree(n, peer))))
            for peer in self.partners(n, rank)
        ]
        largest = all(turn == IDLE or turn.weight == 1 / (1 + mine) for turn in turns)
        return Part(1 / (1 + mine) if largest else own_weight(turns), tuple(turns))


@dataclass(frozen=True, repr=False)
class Regular(Undirected):
    """An undirected graph in which all degrees are equal."""

    def part(self, n: int, step: int, rank: int) -> Part:
        partners = self.partners(n, rank)
        weight = 1 / (1 + sum(partner is not None for partner in partners))
        return Part(weight, tuple([IDLE if peer is None else Turn(peer, peer, weight) for peer in partners]))


def own_weight(turns: Sequence[Turn]) -> float:
    """What is left of 1, for the rank's own tensor."""
    return max(0.0, 1.0 - math.fsum(turn.weight for turn in turns))


def circle_partner(n: int, round_: int, rank: int) -> int | None:
    """Whom `rank` of `n` meets in a round of the circle method, by which all meet once in n rounds (n-1 if n is even).

    Source: Kirkman 1847, On a problem in combinations: ranks i and j meet in round (i + j) mod m, m odd; with one rank
    more, that one meets whoever would idle.
    """
    m = n - 1 if n % 2 == 0 else n
    if rank == m:  # the rank more: it meets i with 2 i = round (mod m), and (m + 1) / 2 is the inverse of 2
        return round_ * (m + 1) // 2 % m
    partner = (round_ - rank) % m
    if partner != rank:
        return partner
    return m if n % 2 == 0 else None


def circle_rounds(n: int) -> int:
    """Rounds in which all of `n` ranks meet once."""
    return n - 1 if n % 2 == 0 else n if n > 1 else 0
