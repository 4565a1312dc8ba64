"""One process that believes to be rank 0 of n: every message it sends comes back as what its peers send.

Peers do the same as this rank does, so agreement holds and every exchange ends at once; results are wrong on purpose
(this rank's own numbers, or what memory held). What is left of a call is what the library itself does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ptcollect.process_groups import Members


@dataclass
class Posted:
    """What the library has handed to the transport."""

    sends: list[int] = field(default_factory=list)
    """Bytes of each message."""
    receives: list[int] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)


class _Done:
    """A Work that has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class _Echo:
    """In the place of `dist.ProcessGroupGloo`, as far as the engine uses it."""

    posted: Posted

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.waiting: dict[int, list[Tensor]] = {}

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Done:
        self.posted.receives.append(tensors[0].nbytes)
        if tensors[0].nbytes == RECORD:
            self.waiting.setdefault(tag, []).append(tensors[0])
        return _Done()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Done:
        self.posted.sends.append(tensors[0].nbytes)
        if tensors[0].nbytes == RECORD and self.waiting.get(tag):
            self.waiting[tag].pop(0).copy_(tensors[0])  # payload is not moved: that would be wire time
        return _Done()

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Done:
        self.posted.collectives.append(tensors[0].nbytes)
        return _Done()


RECORD = 64  # bytes of an agreement record, which peers must bring too


@contextmanager
def echo_group(n: int) -> Iterator[Posted]:
    """A default process group of `n` ranks with no peers behind it; yields what the library posts."""
    posted = Posted()
    echo = type("Echo", (_Echo,), {"posted": posted})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        with (
            mock.patch.object(dist, "ProcessGroupGloo", echo),
            mock.patch.object(dist, "get_backend", return_value="gloo"),
            mock.patch.object(Members, "timeout", timedelta(seconds=10)),  # a fake group has none
        ):
            yield posted
    finally:
        dist.destroy_process_group()
