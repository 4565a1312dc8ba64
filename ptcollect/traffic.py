"""Counts what this process sends: ``with pc.traffic() as t: ...``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ptcollect.averaging import split_evenly
from ptcollect.comm import AllReduce, Exchange, Request

_lock = threading.Lock()
_active: list[Traffic] = []


@dataclass
class Traffic:
    """What one rank sent, counted where it is handed to the network.

    >>> import ptcollect as pc
    >>> with pc.traffic() as t:
    ...     pass
    >>> t
    Traffic(bytes=0, messages=0, rounds=0, agreement_bytes=0)
    """

    bytes: int = 0
    """Payload bytes sent. A native all-reduce is counted as a ring, whatever the backend does inside."""
    messages: int = 0
    """Payload messages sent; transfers of nothing are not messages."""
    rounds: int = 0
    """Exchanges and collectives that carried payload, summed over leaves or buckets."""
    agreement_bytes: int = 0
    """Bytes of the records that ranks compare before traffic."""

    def count(self, request: Request[object], rank: int, size: int) -> None:
        """Add what `rank` of `size` sends for one request."""
        if isinstance(request, Exchange):
            sizes = [packet.data.numel() for packet in request.send.values() if packet.data.numel()]
            if request.control:
                self.agreement_bytes += sum(sizes)
            else:
                self.bytes += sum(sizes)
                self.messages += len(sizes)
                self.rounds += 1
        elif isinstance(request, AllReduce):
            start, stop = split_evenly(request.tensor.numel(), size)[rank]
            self.bytes += 2 * (request.tensor.numel() - (stop - start)) * request.tensor.element_size()
            self.messages += 2 * (size - 1)
            self.rounds += 1


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count everything that pipelines of this process send while the block runs, on any thread.

    Returns:
        A context manager that gives a `Traffic`, whose numbers grow as calls are made. They equal those of `simulate`
        exactly.

    >>> import torch, ptcollect as pc
    >>> with pc.traffic() as t:
    ...     _ = pc.scale(2.0)(torch.ones(3))
    >>> t.bytes
    0
    """
    counter = Traffic()
    with _lock:
        _active.append(counter)
    try:
        yield counter
    finally:
        with _lock:
            _active[:] = [other for other in _active if other is not counter]


def count(request: Request[object], rank: int, size: int) -> None:
    """Tell every open `traffic` block of one request."""
    with _lock:
        for counter in _active:
            counter.count(request, rank, size)
