"""Performs pipelines on n virtual ranks in one thread, without a process group, bit-equal to the engine."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ptcollect.averaging import split_evenly
from ptcollect.call import Place, call
from ptcollect.clock import Clock, Label, Wait
from ptcollect.comm import AllReduce, Axis, Exchange, Observer, Packet, Request
from ptcollect.errors import PeerLostError, PipelineError
from ptcollect.link import Link
from ptcollect.options import Options
from ptcollect.pipeline import Pipeline
from ptcollect.schedule import Handle, Task, drive
from ptcollect.speed import CodecSpeed, Speeds
from ptcollect.state import State
from ptcollect.timeline import Span, Timeline
from ptcollect.traffic import Traffic


@dataclass(frozen=True)
class Simulation:
    """What every rank ended with, and what it sent; lists by rank.

    >>> import torch, ptcollect as pc
    >>> run = pc.simulate(pc.ring_reduce(), [torch.tensor([1.0, 10.0]), torch.tensor([3.0, 30.0])])
    >>> run.trees[1], run.bytes[1], run.messages[1], run.rounds[1]
    (tensor([ 2., 20.]), 8, 2, 2)
    """

    trees: list[Any]
    """The synchronised trees."""
    states: list[State]
    """The states for the next step."""
    bytes: list[int]
    """Payload bytes sent."""
    messages: list[int]
    """Payload messages sent."""
    rounds: list[int]
    """Exchanges and collectives made."""
    agreement_bytes: list[int]
    """Bytes of the records compared before traffic."""
    seconds: list[float] | None = None
    """When each rank would have ended, with a `link`."""
    stages: list[dict[str, float]] | None = None
    """Where each rank's seconds go, with a `link`: to waiting, by stage, and to work, by codec; they add up."""
    timeline: Timeline | None = None
    """When everything would have happened, with a `link`."""


def simulate(
    pipeline: Pipeline,
    trees: Sequence[Any],
    states: Sequence[State] | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    weights: Sequence[float] | None = None,
    missing: Literal["error", "zeros"] = "error",
    check: Literal["every_step", "off"] = "every_step",
    link: Link | None = None,
    codec_speed: CodecSpeed | str | Path | None = None,
) -> Simulation:
    """Run `pipeline` on ``len(trees)`` virtual ranks in this process.

    The ranks run the same code as under torch.distributed, agreement included, and end with the same bits (native
    collectives, `all_reduce`: the same to rounding). Nothing needs to be initialised.

    Args:
        pipeline: what to run.
        trees: one tree per rank; left unchanged.
        states: one state per rank, from `Pipeline.init` or an earlier simulation; by default the first state.
        axes: dims of a mesh and their sizes, outermost first, as in ``{"node": 2, "local": 4}``; ranks are numbered
            row by row. None: one unnamed dim.
        weights: samples behind each rank's tree; None: equal.
        missing: as in `RunOptions`.
        check: as in `RunOptions`.
        link: what joins the ranks; messages then take time on a virtual clock, as in `plan`. None: no clock.
        codec_speed: as in `plan`, for the work between messages.

    Returns:
        A `Simulation`.

    Raises:
        ValueError: no trees, or lengths that do not fit together.
        PipelineError: the ranks wait for each other in a circle (the message says who waits for whom in which round),
            or a message is not as long as its receiver expects.
        PtcollectError: whatever the call raises on a real rank; the first rank's that is not about another's failure.

    >>> import torch, ptcollect as pc
    >>> pc.simulate(pc.ring_reduce(), [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]).trees[0]
    {'w': tensor([0.5000, 0.5000])}
    """
    n = len(trees)
    shape = dict(axes) if axes is not None else {None: n}
    if n == 0:
        raise ValueError("simulate: expected one tree per rank, got none")
    if math.prod(shape.values()) != n:
        raise ValueError(f"simulate: axes {dict(axes or {})} make {math.prod(shape.values())} ranks, got {n} trees")
    for name, values in (("states", states), ("weights", weights)):
        if values is not None and len(values) != n:
            raise ValueError(f"simulate: expected {n} {name}, one per tree, got {len(values)}")
    if states is None:
        states = [pipeline.init(tree) for tree in trees]
    network = _Network(shape)
    same = {"missing": missing, "check": check}
    options = [Options.read({**same, "weight": None if weights is None else weights[r]}) for r in range(n)]
    clock = speeds = None
    if link is not None:
        link.check(n)
        clock, speeds = Clock(link, Timeline(n)), Speeds(codec_speed)
    elif codec_speed is not None:
        raise ValueError("simulate: codec_speed is for the clock that a link gives; pass link=Link(...) too")
    ranks = [_Rank(network, r, pipeline, trees[r], states[r], options[r], clock, speeds) for r in range(n)]
    with torch.no_grad():
        _run(ranks, clock)
    results = [rank.result for rank in ranks]
    return Simulation(
        trees=[tree for tree, _ in results],
        states=[state for _, state in results],
        bytes=[rank.traffic.bytes for rank in ranks],
        messages=[rank.traffic.messages for rank in ranks],
        rounds=[rank.traffic.rounds for rank in ranks],
        agreement_bytes=[rank.traffic.agreement_bytes for rank in ranks],
        seconds=None if clock is None else [rank.time for rank in ranks],
        stages=None if clock is None else [dict(rank.stages) for rank in ranks],
        timeline=None if clock is None else clock.timeline,
    )


def _run(ranks: Sequence[_Rank], clock: Clock | None) -> None:
    """Let every rank go on as far as it can, until all have ended, one fails, or none can go on."""
    try:
        if clock is not None:
            for rank in ranks:
                clock.at(0.0, rank.go_on)
            clock.run()
        while any(not rank.ended for rank in ranks):
            moved = [rank.advance() for rank in ranks]
            failures = [rank.failure for rank in ranks if rank.failure is not None]
            if failures and not any(moved):
                raise next((error for error in failures if not isinstance(error, PeerLostError)), failures[0])
            if not any(moved):
                waiting = "\n".join(f"  {rank.waits_for()}" for rank in ranks)
                raise PipelineError(f"deadlock: no rank can go on\n{waiting}")
        for rank in ranks:
            if rank.failure is not None:
                raise next(
                    (r.failure for r in ranks if r.failure and not isinstance(r.failure, PeerLostError)), rank.failure
                )
    finally:
        for rank in ranks:
            rank.steps.close()


class _Network:
    """Mailboxes between ranks, and the collectives under way."""

    def __init__(self, shape: Mapping[Any, int]) -> None:
        self.shape = dict(shape)
        self.mail: defaultdict[tuple[Any, ...], deque[Packet]] = defaultdict(deque)
        self.collectives: defaultdict[tuple[Any, ...], dict[int, Tensor]] = defaultdict(dict)
        self.sums: dict[tuple[Any, ...], Tensor] = {}
        self.waiting: defaultdict[tuple[Any, ...], dict[int, Wait]] = defaultdict(dict)

    def coordinate(self, rank: int) -> dict[Any, int]:
        """Where `rank` stands on each axis."""
        place: dict[Any, int] = {}
        for axis, size in reversed(self.shape.items()):
            rank, place[axis] = divmod(rank, size)
        return place

    def row(self, rank: int, axis: Any) -> tuple[Any, ...]:
        """Names the group of ranks that `rank` belongs to along `axis`."""
        others = tuple(sorted((str(name), place) for name, place in self.coordinate(rank).items() if name != axis))
        return (axis, others)

    def members(self, rank: int, axis: Any) -> range:
        """The group of ranks that `rank` belongs to along `axis`, in order."""
        names = list(self.shape)
        stride = math.prod(self.shape[name] for name in names[names.index(axis) + 1 :])
        first = rank - self.coordinate(rank)[axis] * stride
        return range(first, first + self.shape[axis] * stride, stride)


class _Rank(Observer):
    """One virtual rank; `time` is what its own clock shows, where there is one."""

    def __init__(
        self,
        network: _Network,
        rank: int,
        pipeline: Pipeline,
        tree: Any,
        state: State | None,
        options: Options,
        clock: Clock | None,
        speeds: Speeds | None,
    ) -> None:
        self.network = network
        self.rank = rank
        self.place_on = network.coordinate(rank)
        axes: dict[str | None, Axis] = {axis: Axis(self.place_on[axis], size) for axis, size in network.shape.items()}
        self.traffic = Traffic()
        self.started: defaultdict[Any, int] = defaultdict(int)
        self.clock = clock
        self.speeds = speeds
        self.time = 0.0
        self.stages: defaultdict[str, float] = defaultdict(float)
        place = Place(axes, f"rank {rank}", observer=None if clock is None else self)
        self.steps: Generator[Handle, None, Any] = drive(call(pipeline, tree, state, place, options), self._post)
        self.handle: _Waiting | None = None
        self.ended = False
        self.result: Any = None
        self.failure: Exception | None = None

    def advance(self) -> bool:
        """Go on as far as possible; whether anything happened."""
        moved = False
        while not self.ended and (self.handle is None or self.handle.ready()):
            moved = True
            try:
                self.handle = next(self.steps)  # type: ignore[assignment]
            except StopIteration as end:
                self.ended, self.result = True, end.value
            except Exception as error:
                self.ended, self.failure = True, error
        return moved

    def go_on(self) -> None:
        """The same by the clock: until something is not done yet."""
        assert self.clock is not None  # noqa: S101
        while not self.ended:
            if self.handle is not None:
                wait = self.handle.wait
                if wait.done_at is None:
                    wait.then = lambda time: self.clock.at(max(time, self.time), self.go_on)  # type: ignore[union-attr]
                    return
                self._waited(self.handle, wait.done_at)
            try:
                self.handle = next(self.steps)  # type: ignore[assignment]
            except StopIteration as end:
                self.ended, self.result = True, end.value
            except Exception as error:
                self.ended, self.failure = True, error

    def _waited(self, handle: _Waiting, until: float) -> None:
        if until > self.time:
            stage = handle.request.stage
            self.stages[stage] += until - self.time
            self._record(until, f"{stage}, round {handle.round}", waits=True)
            self.time = until

    def works(self, what: str, numbers: int) -> None:
        """Let time pass for work."""
        seconds = self.speeds.seconds(what, numbers) if self.speeds is not None else 0.0
        if seconds:
            self.stages[what] += seconds
            self._record(self.time + seconds, what, waits=False)
            self.time += seconds

    def _record(self, end: float, name: str, *, waits: bool) -> None:
        if self.clock is not None and self.clock.timeline is not None:
            self.clock.timeline.spans.append(Span(self.rank, self.time, end, name, waits))

    def waits_for(self) -> str:
        """What this rank is waiting for, in words."""
        return (
            f"rank {self.rank} waits for {self.handle.describe()}"
            if self.handle and not self.ended
            else f"rank {self.rank} has ended"
        )

    def _post(self, request: Request[Any], task: Task) -> _Waiting:
        axis = request.axis if request.axis in self.network.shape else next(iter(self.network.shape))
        me, size = self.place_on[axis], self.network.shape[axis]
        self.traffic.count(request, me, size)
        row = self.network.row(self.rank, axis)
        if isinstance(request, Exchange):
            for peer, packet in request.send.items():
                if packet.data.numel():
                    self.network.mail[row, me, peer, task.tag].append(Packet(packet.data.clone(), packet.numel))
            mail = _WaitingForMail(self.network, request, task, row, me)
            if self.clock is not None:
                self._time_exchange(mail, request, task, self.network.members(self.rank, axis), row, me)
            return mail
        assert isinstance(request, AllReduce)  # noqa: S101  (the driver posts nothing else)
        number = self.started[row]
        self.started[row] += 1
        self.network.collectives[row, number][me] = request.tensor.clone()
        everyone = _WaitingForAll(self.network, request, task, (row, number), size)
        if self.clock is not None:
            self._time_all_reduce(everyone, request, self.network.members(self.rank, axis), (row, number), me)
        return everyone

    def _time_exchange(
        self, handle: _WaitingForMail, request: Exchange, task: Task, members: range, row: Any, me: int
    ) -> None:
        assert self.clock is not None  # noqa: S101
        sending = {peer: packet.data.numel() for peer, packet in request.send.items() if packet.data.numel()}
        handle.wait = Wait(len(sending) + len(handle.boxes), self.time)
        for box in handle.boxes.values():
            self.clock.receive(box, self.time, handle.wait.part)
        label = Label(request.stage, request.leaf, task.round)
        # Connections share a port; one after another, around the ranks from here, messages take as long altogether.
        for peer in sorted(sending, key=lambda peer: (peer - me) % len(members)):
            box, size = (row, me, peer, task.tag), sending[peer]
            self.clock.send(box, self.rank, members[peer], size, self.time, label, handle.wait.part)

    def _time_all_reduce(self, handle: _WaitingForAll, request: AllReduce, members: range, key: Any, me: int) -> None:
        clock = self.clock
        assert clock is not None  # noqa: S101
        handle.wait = Wait(1, self.time)
        waiting = self.network.waiting[key]

        def join() -> None:
            waiting[me] = handle.wait
            if len(waiting) == len(members):
                numbers, width = request.tensor.numel(), request.tensor.element_size()
                sizes = [(stop - start) * width for start, stop in split_evenly(numbers, len(members))]
                done = [waiting[place].part for place in range(len(members))]
                clock.ring(members, sizes, Label(request.stage, request.leaf, 1), done)

        clock.at(self.time, join)


class _Waiting:
    def __init__(self, network: _Network, request: Request[Any], task: Task) -> None:
        self.network = network
        self.request = request
        self.round = task.round
        self.tag = task.tag
        self.wait = Wait(1, 0.0)

    def ready(self) -> bool:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError

    def result(self) -> Any:
        raise NotImplementedError

    def _where(self) -> str:
        leaf = f", leaf {self.request.leaf!r}" if self.request.leaf else ""
        return f"in round {self.round}{leaf}, at {self.request.origin}"


class _WaitingForMail(_Waiting):
    def __init__(self, network: _Network, request: Exchange, task: Task, row: Any, me: int) -> None:
        super().__init__(network, request, task)
        self.receive = request.receive
        self.places = request.places
        self.received: dict[int, Packet] | None = None
        self.boxes = {peer: (row, peer, me, task.tag) for peer, (_, size) in request.receive.items() if size}

    def ready(self) -> bool:
        return self.received is not None or all(self.network.mail[box] for box in self.boxes.values())

    def describe(self) -> str:
        silent = [f"rank {peer}" for peer, box in self.boxes.items() if not self.network.mail[box]]
        return f"{', '.join(silent)} {self._where()}"

    def result(self) -> dict[int, Packet]:
        if self.received is None:
            self.received = self._taken()
        return self.received

    def _taken(self) -> dict[int, Packet]:
        received = {}
        for peer, (numel, size) in self.receive.items():
            data = self.network.mail[self.boxes[peer]].popleft().data if size else torch.empty(0, dtype=torch.uint8)
            if data.numel() != size:
                raise PipelineError(
                    f"rank {peer} sent {data.numel()} bytes where {size} bytes ({numel} numbers) are expected "
                    f"{self._where()}; both sides must compute the same size"
                )
            if peer in self.places:
                data = self.places[peer].copy_(data)
            received[peer] = Packet(data, numel)
        return received


class _WaitingForAll(_Waiting):
    def __init__(self, network: _Network, request: AllReduce, task: Task, key: Any, size: int) -> None:
        super().__init__(network, request, task)
        self.key = key
        self.size = size
        self.tensor = request.tensor

    def ready(self) -> bool:
        return len(self.network.collectives[self.key]) == self.size

    def describe(self) -> str:
        silent = [f"rank {peer}" for peer in range(self.size) if peer not in self.network.collectives[self.key]]
        return f"the all-reduce of {', '.join(silent)} {self._where()}"

    def result(self) -> Tensor:
        if self.key not in self.network.sums:
            parts = self.network.collectives[self.key]
            total = parts[0].clone()
            for rank in range(1, self.size):
                total += parts[rank]
            self.network.sums[self.key] = total
        return self.tensor.copy_(self.network.sums[self.key])
