r"""How fast the links between ranks are, as messages of the process group see them.

The model: a message of m bytes takes :math:`latency + message\_overhead + m / bandwidth`, and occupies its sender for
all of that but the latency.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from ptcollect.measure.spread import no_tick
from ptcollect.measure.tournament import opponents

SMALL = 8  # bytes
BURST = 64  # messages
FIRST_LARGE, LAST_LARGE = 1 << 20, 16 << 20  # bytes
LONG_ENOUGH = 0.05  # seconds: a shaped link lets the first megabyte pass as a burst
ALL_AT_A_TIME = 16  # ranks up to which pairs have the network to themselves

Matrix = list[list[float | None]]
"""``matrix[source][destination]``, None on the diagonal."""


@dataclass(frozen=True)
class MeasuredLink:
    """What `plan` needs to know of the network."""

    bandwidth: Matrix
    """Bytes per second, one way, with nothing coming back; medians."""
    latency: Matrix
    """Seconds; medians."""
    message_overhead: float
    """Seconds by which each further small message delays those behind it; the median over all pairs."""
    one_pair_at_a_time: bool
    """Whether each pair had the network to itself; else as many pairs as could sent at once."""

    def limit(self, rank_bytes: list[int]) -> float:
        """The least seconds in which every rank can send so many bytes, each over the fastest of its links."""
        rates = [max(rate for rate in row if rate is not None) for row in self.bandwidth]
        return max(sent / rate for sent, rate in zip(rank_bytes, rates, strict=True))

    @property
    def slowest(self) -> float:
        """Bytes per second between the two ranks that are worst connected."""
        return min(rate for row in self.bandwidth for rate in row if rate is not None)


def rounds(n: int) -> int:
    """How many times `measure_link` ticks on `n` ranks."""
    return n * (n - 1) // 2 if n <= ALL_AT_A_TIME else n - 1 + n % 2


def measure_link(repeats: int = 5, tick: Callable[[str], None] = no_tick) -> MeasuredLink:
    """Measure every pair of ranks of the default group; all ranks call this, and all get the result.

    Args:
        repeats: how many times large messages are timed, and a quarter of how many times small ones are.
        tick: called as each round begins.

    Returns:
        A `MeasuredLink`.

    Raises:
        ValueError: the world is one rank.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    if n < 2:
        raise ValueError("measure_link: there is no link in a world of one rank")
    # bandwidth, latency and overhead, of this rank's own messages; the other rows stay 0
    tables = torch.zeros(3, n, n, dtype=torch.float64)
    for peer in _peers(rank, n):
        tick("link")
        dist.barrier()
        if peer is not None:
            tables[:, rank, peer] = torch.tensor(_measure_pair(peer, repeats), dtype=torch.float64)
    dist.all_reduce(tables)
    bandwidth, latency, overheads = tables
    off_diagonal = ~torch.eye(n, dtype=torch.bool)
    return MeasuredLink(
        _matrix(bandwidth), _matrix(latency), float(overheads[off_diagonal].median()), n <= ALL_AT_A_TIME
    )


def _peers(rank: int, n: int) -> Iterator[int | None]:
    """Whom this rank measures in each round; None: it waits."""
    if n > ALL_AT_A_TIME:
        yield from opponents(rank, n)
        return
    for pair in itertools.combinations(range(n), 2):
        yield (pair[0] + pair[1] - rank) if rank in pair else None


def _matrix(table: Tensor) -> Matrix:
    return [[None if i == j else number for j, number in enumerate(row)] for i, row in enumerate(table.tolist())]


# One pair -----------------------------------------------------------------------------------------------------------


def _measure_pair(peer: int, repeats: int) -> tuple[float, float, float]:
    """Bandwidth, latency and overhead of messages from this rank to `peer`, who calls this at the same time."""
    first = dist.get_rank() < peer
    result = (0.0, 0.0, 0.0)
    for mine in (first, not first):
        if mine:
            result = _lead(peer, repeats)
        else:
            _follow(peer)
    return result


def _lead(peer: int, repeats: int) -> tuple[float, float, float]:
    """Say what comes, send it, and wait for the answer."""
    _ask(peer, SMALL, 1)  # the first one wakes both sides up
    singles = [_ask(peer, SMALL, 1) for _ in range(4 * repeats)]
    bursts = [_ask(peer, SMALL, BURST) for _ in range(4 * repeats)]
    size = FIRST_LARGE
    while (seconds := _ask(peer, size, 1)) < LONG_ENOUGH and size < LAST_LARGE:
        size *= 4
    seconds = median([seconds, *(_ask(peer, size, 1) for _ in range(repeats - 1))])
    _announce(peer, 0, 0)
    # Differences of the least: a wake-up that takes a millisecond now and then would drown a message's microseconds.
    overhead = max(0.0, (min(bursts) - min(singles)) / (BURST - 1))
    # There and back is latency + overhead each way, and the bytes once.
    return size / max(seconds - min(singles), 1e-9), max(0.0, median(singles) / 2 - overhead), overhead


def _ask(peer: int, size: int, count: int) -> float:
    """Seconds from sending `count` messages of `size` bytes until the answer is there."""
    _announce(peer, size, count)
    content = torch.ones(size, dtype=torch.uint8)
    answer = torch.empty(SMALL, dtype=torch.uint8)
    dist.recv(answer, peer)  # the receiver is ready
    start = time.perf_counter()
    works = [dist.isend(content, peer) for _ in range(count)]
    for work in works:
        if work is not None:
            work.wait()
    dist.recv(answer, peer)
    return time.perf_counter() - start


def _announce(peer: int, size: int, count: int) -> None:
    dist.send(torch.tensor([size, count]), peer)


def _follow(peer: int) -> None:
    """Receive what is announced, and answer, until nothing more is."""
    told = torch.zeros(2, dtype=torch.int64)
    answer = torch.zeros(SMALL, dtype=torch.uint8)
    while True:
        dist.recv(told, peer)
        size, count = told.tolist()
        if count == 0:
            return
        # Written to before, as the engine's scratch is: page faults on fresh memory cost more than a fast link.
        buffers = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
        works = [dist.irecv(buffer, peer) for buffer in buffers]
        dist.send(answer, peer)
        for work in works:
            if work is not None:
                work.wait()
        dist.send(answer, peer)
