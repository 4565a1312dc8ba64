"""One process that believes to be rank 0 of n: every message it sends comes back as what its peers send.

Peers seem to bring the same tree, so agreement holds and every exchange ends at once. What is left of a call is what
the library itself does, and one copy of what travels.
"""

from __future__ import annotations

import ctypes
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
        (tensor,) = tensors
        self.posted.receives.append(tensor.nbytes)
        ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
        self.waiting.setdefault(tag, []).append(tensor)
        return _Done()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Done:
        (tensor,) = tensors
        self.posted.sends.append(tensor.nbytes)
        if self.waiting.get(tag):
            place = self.waiting[tag].pop(0)
            # Not by torch, so that nothing of this shows when torch's operations are counted.
            ctypes.memmove(place.data_ptr(), tensor.data_ptr(), min(place.nbytes, tensor.nbytes))
        return _Done()

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Done:
        self.posted.collectives.append(tensors[0].nbytes)
        return _Done()


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
