"""Requests under way: what has been handed to torch.distributed, and the waits for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ptcollect.comm import AllReduce, Arrival, Exchange, Packet, Request
from ptcollect.errors import PeerLostError
from ptcollect.process_groups import Members, PrivateGroup
from ptcollect.schedule import Task
from ptcollect.tree import Leaves

Lost: TypeAlias = "Callable[[str, Members, Request[Any]], Exception]"
"""Makes the error for a transfer that failed, of what the network said."""


class Transfer:
    """A request handed to torch.distributed."""

    def __init__(self, request: Request[Any], task: Task, group: PrivateGroup, lost: Lost) -> None:
        self.group = group
        self.members = group.members
        self.lost = lost
        self.request = request
        self.round = task.round
        self.tag = task.tag
        self.pending: list[tuple[str, int, int, Any]] = []  # what it is, its bytes, the peer (-1: all), its Work
        self.buffers: dict[int, Tensor] = {}
        self.sent: list[Tensor] = []
        self.failure: Exception | None = None

    def post(self) -> None:
        """Issue the sends and receives, or the collective."""
        group, gloo = self.group, self.group.gloo
        if gloo is None:
            raise PeerLostError(f"{self._what()}: the connection is gone")
        try:
            if isinstance(self.request, Exchange):
                self._exchange(self.request, group, gloo)
            elif isinstance(self.request, AllReduce):
                self._all_reduce(self.request, group, gloo)
        except RuntimeError as error:
            self.failure = self.lost(f"{self._what()}: {_first_line(error)}", self.members, self.request)
            raise self.failure from None

    def _exchange(self, request: Exchange, group: PrivateGroup, gloo: Any) -> None:
        if group.device_group is not None and not request.control:
            self._exchange_on_device(request, group.device_group)
            return
        for peer, (_, size) in request.receive.items():
            own = request.places.get(peer)
            buffer = own if own is not None and own.is_cpu else torch.empty(size, dtype=torch.uint8)
            self.buffers[peer] = buffer
            if size:
                self.pending.append(("receiving", size, peer, gloo.recv([buffer], peer, self.tag)))
        for peer, packet in request.send.items():
            data = packet.data.contiguous().cpu()
            self.sent.append(data)
            if data.numel():
                self.pending.append(("sending", data.numel(), peer, gloo.send([data], peer, self.tag)))

    def _exchange_on_device(self, request: Exchange, group: dist.ProcessGroup) -> None:
        operations: list[dist.P2POp] = []
        for peer, (_, size) in request.receive.items():
            own = request.places.get(peer)
            self.buffers[peer] = own if own is not None else torch.empty(size, dtype=torch.uint8, device=request.device)
            if size:
                operations.append(dist.P2POp(dist.irecv, self.buffers[peer], group=group, group_peer=peer))
        for peer, packet in request.send.items():
            self.sent.append(packet.data.contiguous())
            if packet.data.numel():
                operations.append(dist.P2POp(dist.isend, self.sent[-1], group=group, group_peer=peer))
        if operations:
            self.pending.extend(("exchanging", 0, -1, work) for work in dist.batch_isend_irecv(operations))

    def _all_reduce(self, request: AllReduce, group: PrivateGroup, gloo: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        backend = gloo if group.device_group is None else group.device_group
        work = backend.allreduce([request.tensor], options)
        self.pending.append(("all-reducing", request.tensor.numel() * request.tensor.element_size(), -1, work))

    def wait(self) -> None:
        """Block until everything is done; `result` then answers or raises."""
        trouble = self._wait_each()
        if trouble is not None:
            self.failure = self.lost(f"{self._what()}: {trouble}", self.members, self.request)
            self.forget()

    @property
    def name(self) -> str:
        """What a profile calls the wait."""
        leaf = f" of {self.request.leaf}" if self.request.leaf else ""
        return f"{self.request.stage or 'exchange'}, round {self.round}{leaf}"

    def _wait_each(self) -> str | None:
        # Returns words, not the exception: its traceback would hold the Work, and that the group.
        timeout = self.group.timeout
        while self.pending:
            doing, size, peer, work = self.pending[0]
            trouble = _wait_watching(work, timeout, self._given_up) if peer < 0 else _wait(work, timeout)
            if trouble is not None:
                return f"{doing} {size} bytes{self._toward(doing, peer)} failed: {trouble}"
            del self.pending[0]
        return None

    def _given_up(self) -> bool:
        return self.group.read_note() is not None

    def result(self) -> Any:
        """The packets received, or the reduced tensor."""
        if self.failure is not None:
            raise self.failure
        if isinstance(self.request, Exchange):
            return {peer: Packet(self._received(peer), numel) for peer, (numel, _) in self.request.receive.items()}
        assert isinstance(self.request, AllReduce)  # noqa: S101  (the driver posts nothing else)
        return self.request.tensor

    def _received(self, peer: int) -> Tensor:
        assert isinstance(self.request, Exchange)  # noqa: S101
        buffer, place = self.buffers[peer], self.request.places.get(peer)
        if place is not None:
            return place if buffer is place else place.copy_(buffer)
        return buffer if self.request.device.type == "cpu" else buffer.to(self.request.device)

    def forget(self) -> None:
        """Let go of everything that keeps the group alive."""
        self.pending.clear()

    def _what(self) -> str:
        leaf = f" of leaf {self.request.leaf!r}" if self.request.leaf else ""
        return f"{self.request.stage or 'exchange'}, round {self.round}{leaf}, on {self._named(self.members.rank)}"

    def _toward(self, doing: str, peer: int) -> str:
        if peer < 0:
            return ""
        return f" from {self._named(peer)}" if doing == "receiving" else f" to {self._named(peer)}"

    def _named(self, rank: int) -> str:
        return self.members.named(rank)


class FromBackward:
    """A wait for leaves from this rank's own backward pass."""

    def __init__(self, request: Arrival, timeout: timedelta) -> None:
        self.request = request
        self.timeout = timeout
        self.name = f"backward, {', '.join(request.paths)[:100]}"
        self.answer: Leaves = {}
        self.failure: Exception | None = None

    def wait(self) -> None:
        """Block until the leaves are there."""
        try:
            self.answer = self.request.arrivals.wait(self.request.paths, self.timeout)
        except Exception as error:
            self.failure = error

    def result(self) -> Leaves:
        """The leaves, or raises."""
        if self.failure is not None:
            raise self.failure
        return self.answer


def _wait(work: Any, timeout: timedelta) -> str | None:
    """Wait for `work`; what went wrong, in words."""
    try:
        work.wait(timeout)
    except RuntimeError as error:
        return _first_line(error)
    return None


def _wait_watching(work: Any, timeout: timedelta, given_up: Callable[[], bool]) -> str | None:
    """The same for a collective, which does not always notice that a peer has closed its connections."""
    slices = max(1, round(timeout / _SLICE))
    for _ in range(slices):
        trouble = _wait(work, _SLICE)
        if trouble is None or "timed out" not in trouble.lower():
            return trouble
        if given_up():
            return "a peer gave up"
    return f"no end within {timeout.total_seconds():g} s"


_SLICE = timedelta(seconds=0.25)


def _first_line(error: Exception) -> str:
    """What the network said, without gloo's source positions and advice."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[\S*\] ", "", text).split(". This is typically")[0]
