"""What is left of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """The middle, the ends, and everything between.

    >>> spread_of([3.0, 1.0, 2.0])
    Spread(median=2.0, lowest=1.0, highest=3.0, samples=[3.0, 1.0, 2.0])
    """

    median: float
    lowest: float
    highest: float
    samples: list[float]


def spread_of(samples: Sequence[float]) -> Spread:
    """The spread of at least one sample."""
    return Spread(median(samples), min(samples), max(samples), list(samples))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The spread of the ratios of the same round: what slows one round down slows both."""
    return spread_of([one / other for one, other in zip(ours, theirs, strict=True)])


def no_tick(doing: str) -> None:
    """Stands in for a progress bar."""
