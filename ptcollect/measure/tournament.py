"""In which order every two ranks meet."""

from __future__ import annotations

from collections.abc import Iterator


def opponents(rank: int, n: int) -> Iterator[int | None]:
    """Whom `rank` of `n` meets in each round of a tournament in which everybody meets everybody; None: nobody.

    >>> [list(opponents(rank, 3)) for rank in range(3)]
    [[None, 1, 2], [2, 0, None], [1, None, 0]]
    """
    seats = n + n % 2
    for number in range(seats - 1):
        peer = (number - rank) % (seats - 1)
        if rank == seats - 1:
            peer = number * (seats // 2) % (seats - 1)
        elif peer == rank:
            peer = seats - 1
        yield peer if peer < n else None
