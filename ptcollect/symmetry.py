"""Plans of large worlds from one rank of each kind, where the ranks of a dim do the same but for a rotation.

A reducer's program is recorded on one rank, on a stand-in for the leaf that cuts into equal chunks, as what is sent to
which offset: chunk number ``rank + i`` of the leaf, or all of it. What that means for another rank and another leaf is
arithmetic, so every rank's bytes and messages are exact. It is checked, not assumed: other ranks' programs are
recorded on a leaf with a rest and compared message by message. A program that is no rotation is counted rank by rank.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptcollect.averaging import split_evenly
from ptcollect.call import Place, call
from ptcollect.comm import AllReduce, Axis, Comm, Exchange, Observer, Packet, Request
from ptcollect.link import Link, TwoLevel
from ptcollect.options import Options
from ptcollect.pipeline import Pipeline
from ptcollect.reducers.reducer import Reducer
from ptcollect.schedule import Task, drive
from ptcollect.speed import Speeds
from ptcollect.state import State
from ptcollect.traffic import Traffic

_PROBE = 1 << 10  # numbers in a chunk of the stand-in
_RANK_BY_RANK = 300_000  # the most requests that are recorded to count rank by rank


class NotSymmetricError(Exception):
    """The ranks do not do the same; the text says which stage shows it."""


class Sent(NamedTuple):
    """A message by its offset along the dim: chunk number ``rank + chunk``, or the whole leaf where that is None."""

    offset: int
    chunk: int | None


class Step(NamedTuple):
    """What a rank does up to a request, and the request: the messages it sends, or a native all-reduce."""

    works: tuple[tuple[str, int], ...]
    """What is done, on how many numbers of the stand-in."""
    sends: tuple[Sent, ...]
    native: int | None = None
    """Bytes of a number, for a native all-reduce."""


class Ready:
    """An answer that is there at once."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def result(self) -> Any:
        """The answer."""
        return self.answer


# One reducer on one leaf ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Reductions that differ in nothing but the size of the leaf."""

    reducer: Reducer = field(compare=False)
    comm: Comm = field(compare=False)
    """Some leaf's comm, for codec and dtype."""
    about: tuple[Any, ...]
    """Which reducer it is, and what of that comm matters."""

    @staticmethod
    def of(reducer: Reducer, comm: Comm) -> Kind:
        """The kind that a reduction with this comm is."""
        books = comm.residuals is not None and comm.leaf in comm.residuals
        # By identity and as text: options and codecs of the user's may not be hashable.
        about = (id(reducer), comm.axis, comm.size, repr(comm.codec), comm.dtype, comm.compressed, books)
        return Kind(reducer, comm, about)

    @property
    def size(self) -> int:
        """Ranks on its dim."""
        return self.comm.size

    def wire_bytes(self, numbers: int) -> int:
        """Bytes of a packet."""
        return self.comm.codec.wire_bytes(numbers) if self.comm.codec is not None else 0

    def record(self, rank: int, numbers: int) -> _Recorder:
        """The program of `rank` on a leaf of so many numbers."""
        recorder = _Recorder(self, rank, numbers)
        recorder.run()
        return recorder


class _Recorder(Observer):
    """Runs a reducer on one rank without the others; they answer with packets of the size that is expected."""

    def __init__(self, kind: Kind, rank: int, numbers: int) -> None:
        self.kind, self.rank, self.numbers = kind, rank, numbers
        self.steps: list[Step] = []
        self.sizes: list[tuple[tuple[int, int], ...]] = []  # per request: offset and bytes of each message
        self.traffic = Traffic()
        self.rotates = True  # whether what is received could be what is sent, seen from another rank
        self.chunk = -(-numbers // kind.size)
        self.works_since: list[tuple[str, int]] = []
        self.chunks: dict[int, int | None] = {}  # by packet: which chunk it is, counted from the own rank on
        self.packets: list[Packet] = []  # kept, since they are known by their id

    def run(self) -> None:
        comm, kind = self.kind.comm, self.kind
        axes = {**comm.axes, comm.axis: Axis(self.rank, kind.size)}
        books = comm.residuals is not None and comm.leaf in comm.residuals
        x = torch.empty(self.numbers, dtype=comm.dtype, device="meta")
        residuals = {comm.leaf: torch.empty_like(x)} if books else None
        comm = comm.replace(axes=axes, observer=self, residuals=residuals, gate=None, _hop=0, _booked=[])
        options = dict(kind.reducer.options)
        del options["axis"]
        for _ in drive(kind.reducer.factory.function(x, comm, **options), self._post):
            pass

    def works(self, what: str, numbers: int) -> None:
        self.works_since.append((what, numbers))

    def encodes(self, packet: Packet, at: int) -> None:
        self._is_chunk(packet, (at // self.chunk - self.rank) % self.kind.size if at % self.chunk == 0 else None)

    def _is_chunk(self, packet: Packet, chunk: int | None) -> Packet:
        self.chunks[id(packet)] = chunk
        self.packets.append(packet)
        return packet

    def _post(self, request: Request[Any], task: Task) -> Ready:
        self.traffic.count(request, self.rank, self.kind.size)
        works, self.works_since = tuple(self.works_since), []
        self.rotates &= task.parent is None
        if isinstance(request, AllReduce):
            self.steps.append(Step(works, (), request.tensor.element_size()))
            self.sizes.append(())
            return Ready(request.tensor)
        if not isinstance(request, Exchange):
            raise NotSymmetricError(f"{self.kind.reducer!r} asks for {type(request).__name__}")
        n = self.kind.size
        sends: dict[int, Sent] = {}
        for peer, packet in request.send.items():
            whole = packet.numel == self.numbers
            chunk = None if whole else self.chunks.get(id(packet))
            self.rotates &= whole or (chunk is not None and packet.numel == self.chunk)
            offset = (peer - self.rank) % n
            sends[offset] = Sent(offset, chunk)
        self.steps.append(Step(works, tuple(sends.values())))
        self.sizes.append(tuple(((peer - self.rank) % n, packet.data.numel()) for peer, packet in request.send.items()))
        received = {}
        for peer, (numbers, size) in request.receive.items():
            packet = Packet(torch.empty(size, dtype=torch.uint8, device="meta"), numbers)
            same = sends.get((self.rank - peer) % n)  # what that peer sends here, if it does as this rank does
            if same is None or (same.chunk is None) != (numbers == self.numbers):
                self.rotates = False
            elif same.chunk is not None:
                self._is_chunk(packet, (same.chunk + peer - self.rank) % n)
            received[peer] = packet
        self.rotates &= len(request.receive) == len(sends)
        return Ready(received)


@dataclass(frozen=True)
class Counts:
    """Per rank of the dim."""

    bytes: list[int]
    messages: list[int]
    rounds: list[int]


class Program:
    """What one kind of reduction does on every rank."""

    def __init__(self, kind: Kind, numbers: int) -> None:
        self.kind = kind
        n = kind.size
        probe = kind.record(0, n * _PROBE)
        self.steps = probe.steps
        self.works_at_end = tuple(probe.works_since)
        self.rotates = probe.rotates and all(self._predicts(rank, numbers) for rank in {1, n // 2, n - 1})
        self._counted: dict[int, Counts] = {}
        if self.rotates:
            self.times_sent = Counter(sent.chunk for step in self.steps for sent in step.sends)

    @property
    def messages(self) -> int:
        """About how many messages a rank sends, one at least for each request."""
        rounds = 2 * (self.kind.size - 1)
        return sum(max(1, len(step.sends), 0 if step.native is None else rounds) for step in self.steps)

    def _predicts(self, rank: int, numbers: int) -> bool:
        """Whether the steps say what `rank` really sends of a leaf that does not cut into equal chunks."""
        n = self.kind.size
        if numbers % n == 0 or numbers < n:
            numbers = max(numbers, n) // n * n + max(1, n // 3)
        sizes = [self.kind.wire_bytes(stop - start) for start, stop in split_evenly(numbers, n)]
        whole = self.kind.wire_bytes(numbers)
        expected = [
            tuple((s.offset, whole if s.chunk is None else sizes[(rank + s.chunk) % n]) for s in step.sends)
            for step in self.steps
        ]
        record = self.kind.record(rank, numbers)
        got = [tuple(sent) for sent in record.sizes]
        return [sorted(each) for each in got] == [sorted(each) for each in expected]

    def counts(self, numbers: int) -> Counts:
        """What each rank of the dim sends for a leaf of so many numbers."""
        if numbers not in self._counted:
            self._counted[numbers] = self._rotated(numbers) if self.rotates else self._one_by_one(numbers)
        return self._counted[numbers]

    def _rotated(self, numbers: int) -> Counts:
        n = self.kind.size
        chunks = [stop - start for start, stop in split_evenly(numbers, n)]
        longer, shorter = chunks[0], chunks[-1]
        # How many of the chunks that a rank sends, counted from its own number on, are longer ones.
        times = torch.tensor([self.times_sent[i] for i in range(n)], dtype=torch.int64)
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat([times, times]).cumsum(0)])
        count = sum(size == longer for size in chunks)  # chunks 0 to count - 1, which are i = -rank to count - 1 - rank
        first = torch.arange(n).neg().remainder(n)
        of_longer = sums[first + count] - sums[first]
        of_shorter = sums[n] - of_longer
        whole, whole_size = self.times_sent[None], self.kind.wire_bytes(numbers)
        big, small = self.kind.wire_bytes(longer), self.kind.wire_bytes(shorter)
        sent = of_longer * big + of_shorter * small + whole * whole_size
        messages = of_longer * bool(big) + of_shorter * bool(small) + whole * bool(whole_size)
        for step in self.steps:
            if step.native is not None:
                sent += torch.tensor([2 * (numbers - size) * step.native for size in chunks])
                messages += 2 * (n - 1)
        return Counts(sent.tolist(), messages.tolist(), [len(self.steps)] * n)

    def _one_by_one(self, numbers: int) -> Counts:
        n = self.kind.size
        if n * len(self.steps) > _RANK_BY_RANK:
            raise NotSymmetricError(f"{self.kind.reducer!r} does something else on every rank, in many rounds")
        each = [self.kind.record(rank, numbers).traffic for rank in range(n)]
        return Counts([t.bytes for t in each], [t.messages for t in each], [t.rounds for t in each])


# One rank of all ----------------------------------------------------------------------------------------------------


class Programs:
    """Programs, each recorded once."""

    def __init__(self) -> None:
        self._known: dict[Kind, Program] = {}

    def of(self, kind: Kind, numbers: int) -> Program:
        """The program of a kind; `numbers` of a leaf to check it on, the first time."""
        if kind not in self._known:
            self._known[kind] = Program(kind, numbers)
        return self._known[kind]


class OneRank(Observer):
    """A call on one rank: its own requests answered as by ranks that do the same, reducers known by their programs."""

    def __init__(self, shape: Mapping[Any, int], coordinate: Mapping[Any, int], programs: Programs) -> None:
        self.shape, self.coordinate, self.programs = shape, coordinate, programs
        self.traffic = Traffic()
        self.reductions: Counter[tuple[Kind, int]] = Counter()
        self.dims: set[Any] = set()
        """Dims along which a stage that is no reducer sends payload."""
        self.messages = 0
        """About how many messages this rank sends."""

    def run(self, pipeline: Pipeline, tree: Any, state: State | None, check: str) -> None:
        """Perform the call."""
        axes = {axis: Axis(self.coordinate[axis], size) for axis, size in self.shape.items()}
        place = Place(axes, "the planned rank", observer=self)
        self.perform(drive(call(pipeline, tree, state, place, Options(check=check)), self._post))

    def perform(self, steps: Generator[Any, Any, Any]) -> None:
        """Let it run to its end."""
        for _ in steps:
            pass

    def reduces(self, reducer: Reducer, x: Tensor, comm: Comm) -> Awaitable[Tensor]:
        kind = Kind.of(reducer, comm)
        self.reductions[kind, x.numel()] += 1
        program = self.programs.of(kind, x.numel())
        self.messages += program.messages
        return self.stands_in(program, x, comm)

    async def stands_in(self, program: Program, x: Tensor, comm: Comm) -> Tensor:
        """What is done in place of a reducer."""
        await comm.allowed()
        return x

    def _post(self, request: Request[Any], task: Task) -> Any:
        axis = request.axis if request.axis in self.shape else next(iter(self.shape))
        me, size = self.coordinate[axis], self.shape[axis]
        self.traffic.count(request, me, size)
        self.messages += max(1, len(request.send) if isinstance(request, Exchange) else 2 * (size - 1))
        if isinstance(request, AllReduce):
            self.dims.add(axis)
            return self.timed(request, axis, (), request.tensor)
        if not isinstance(request, Exchange):
            raise NotSymmetricError(f"{request.stage} asks for {type(request).__name__}")
        if not request.control:
            self.dims.add(axis)
        sends = {(peer - me) % size: packet for peer, packet in request.send.items()}
        received = {}
        for peer, (numbers, expected) in request.receive.items():
            same = sends.get((me - peer) % size)
            if same is None and expected:
                raise NotSymmetricError(f"{request.stage} does something else on every rank ({request.origin})")
            if request.control and same is not None and same.data.numel() == expected:
                received[peer] = same  # others say what this rank says
            else:
                received[peer] = Packet(torch.empty(expected, dtype=torch.uint8, device="meta"), numbers)
        messages = tuple((offset, packet.data.numel()) for offset, packet in sends.items() if packet.data.numel())
        return self.timed(request, axis, messages, received)

    def timed(self, request: Request[Any], axis: Any, messages: Sequence[tuple[int, int]], answer: Any) -> Any:
        """The handle of a request."""
        return Ready(answer)


class _Replay(Exchange):
    """A step of a recorded program; the same object for all steps that are alike."""

    def __init__(self, like: Comm, messages: tuple[tuple[int, int], ...], works: tuple[tuple[str, float], ...]) -> None:
        self.axis, self.leaf, self.stage = like.axis, like.leaf, like.stage
        self.messages, self.works = messages, works
        self.native: int | None = None

    def worked(self, like: Comm) -> _Replay:
        """The same when what comes before it has been done."""
        rest = _Replay(like, self.messages, ())
        rest.native = self.native
        return rest

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)


class _Handle:
    """Done at a time that is known, or that the flows will tell."""

    __slots__ = ("answer", "done_at", "stage")

    def __init__(self, stage: str, done_at: float | None, answer: Any) -> None:
        self.stage, self.done_at, self.answer = stage, done_at, answer

    def result(self) -> Any:
        return self.answer


class _Flow:
    """A native all-reduce under way: a round after the other."""

    def __init__(self, handle: _Handle, axis: Any, ready: float, rounds: int, size: int) -> None:
        self.handle, self.axis, self.ready, self.rounds, self.size = handle, axis, ready, rounds, size


class TimedRank(OneRank):
    """The same with a clock: what this rank receives comes as what it sends would arrive elsewhere."""

    def __init__(self, shape: Mapping[Any, int], programs: Programs, link: Link, speeds: Speeds) -> None:
        super().__init__(shape, dict.fromkeys(shape, 0), programs)
        self.link, self.speeds = link, speeds
        self.time = 0.0
        self.stages: defaultdict[str, float] = defaultdict(float)
        self._free: defaultdict[str, float] = defaultdict(float)
        self._routes: dict[tuple[Any, int], _MeanRoute] = {}
        self._flows: list[_Flow] = []
        self._replays: dict[Any, list[_Replay]] = {}
        self._behind = 0.0  # how long after this rank's last message another one's leaves a port that they share

    def perform(self, steps: Generator[Any, Any, Any]) -> None:
        for handle in steps:
            if handle.done_at is None:
                self._let_flow(until=handle)
            if handle.done_at > self.time:
                self.stages[handle.stage] += handle.done_at - self.time
                self.time = handle.done_at
        if self._behind:
            self.stages["shared ports"] += self._behind
            self.time += self._behind

    def works(self, what: str, numbers: int) -> None:
        seconds = self.speeds.seconds(what, numbers)
        if seconds:
            self.stages[what] += seconds
            self.time += seconds

    async def stands_in(self, program: Program, x: Tensor, comm: Comm) -> Tensor:
        if not program.rotates:
            raise NotSymmetricError(f"{program.kind.reducer!r} does something else on every rank")
        chunk = -(-x.numel() // comm.size)
        key = (program.kind, chunk, x.numel(), comm.stage)
        if key not in self._replays:
            self._replays[key] = list(self._compiled(program, x.numel(), chunk, comm))
        for replay in self._replays[key]:
            if comm.gate is None or comm.gate.open:
                await replay
            else:  # the first message is made before it has to wait
                self._work(replay)
                await comm.allowed()
                await replay.worked(comm)
        for what, numbers in program.works_at_end:
            self.works(what, numbers * chunk // _PROBE)
        return x

    def _work(self, replay: _Replay) -> None:
        for what, seconds in replay.works:
            self.stages[what] += seconds
            self.time += seconds

    def _compiled(self, program: Program, numbers: int, chunk: int, comm: Comm) -> Any:
        """The steps with the size of the longest chunk in all messages, which is what the slowest rank waits for."""
        sizes = {True: program.kind.wire_bytes(numbers), False: program.kind.wire_bytes(chunk)}
        known: dict[Any, _Replay] = {}
        for step in program.steps:
            messages = tuple(sorted((sent.offset, sizes[sent.chunk is None]) for sent in step.sends))
            like = (step.works, messages, step.native)
            if like not in known:
                works = [(what, self.speeds.seconds(what, count * chunk // _PROBE)) for what, count in step.works]
                replay = known[like] = _Replay(comm, messages, tuple(each for each in works if each[1]))
                replay.native = None if step.native is None else chunk * step.native
            yield known[like]

    def _post(self, request: Request[Any], task: Task) -> Any:
        if not isinstance(request, _Replay):
            return super()._post(request, task)
        self._work(request)
        if request.native is not None:
            return self._flow(request, request.native)
        if self._flows:
            self._let_flow(self.time)
        return _Handle(request.stage, self._sent(request.axis, request.messages, self.time), None)

    def timed(self, request: Request[Any], axis: Any, messages: Sequence[tuple[int, int]], answer: Any) -> Any:
        if isinstance(request, AllReduce):
            handle = self._flow(request, -(-request.tensor.numel() // self.shape[axis]) * request.tensor.element_size())
            handle.answer = answer
            return handle
        self._let_flow(self.time)
        return _Handle(request.stage, self._sent(axis, sorted(messages), self.time), answer)

    def _sent(self, axis: Any, messages: Sequence[tuple[int, int]], at: float) -> float:
        """When the last of these messages, ready at `at`, arrives; by symmetry also the last of those to come."""
        done = at
        for offset, size in messages:
            route = self._routes.get((axis, offset)) or self._route(axis, offset)
            start = max(at, self._free[route.port])
            busy = route.port_overhead + size * route.port_seconds_per_byte
            self._free[route.port] = start + busy
            if route.sharing > 1:
                self._behind = busy * (1 - 1 / route.sharing)
            done = max(done, start + route.overhead + size * route.seconds_per_byte)
        return done

    def _flow(self, request: Request[Any], size: int) -> _Handle:
        handle = _Handle(request.stage, None, None)
        rounds = 2 * (self.shape[request.axis] - 1)
        self._flows.append(_Flow(handle, request.axis, self.time, rounds, size))
        return handle

    def _let_flow(self, time: float = math.inf, until: _Handle | None = None) -> None:
        """Native all-reduces go on, the one that is ready first at first, up to `time` or until one is done."""
        while self._flows and (until is None or until.done_at is None):
            flow = min(self._flows, key=lambda flow: flow.ready)
            if flow.ready > time:
                return
            flow.ready = self._sent(flow.axis, ((1, flow.size),), flow.ready)
            flow.rounds -= 1
            if not flow.rounds:
                flow.handle.done_at = flow.ready
                self._flows.remove(flow)

    def _route(self, axis: Any, offset: int) -> _MeanRoute:
        route = self._routes[axis, offset] = mean_route(self.link, self.shape, axis, offset)
        return route


class _MeanRoute(NamedTuple):
    """A message to an offset, on the rank where its port is busiest."""

    port: str
    sharing: int
    """How many ranks send by the port at a time."""
    port_overhead: float
    """How long it occupies the port, those of ranks that share it included."""
    port_seconds_per_byte: float
    overhead: float
    """How long it takes, latency included, on average along the way around the dim: round after round it goes there."""
    seconds_per_byte: float


def mean_route(link: Link, shape: Mapping[Any, int], axis: Any, offset: int) -> _MeanRoute:
    """What messages of all ranks to this offset along a dim meet.

    Raises:
        NotSymmetricError: the link is another one between any two ranks.
    """
    if not isinstance(link, TwoLevel):
        if not link.alike:
            raise NotSymmetricError("the link differs from rank to rank")
        return _same(link, "rank", 1, 1.0, None)
    total = math.prod(shape.values())
    names = list(shape)
    stride = math.prod(shape[name] for name in names[names.index(axis) + 1 :])
    ranks = torch.arange(total)
    places = ranks // stride % shape[axis]
    peers = ranks + ((places + offset) % shape[axis] - places) * stride
    nodes, theirs = ranks // link.ranks_per_node, peers // link.ranks_per_node
    crossing = nodes != theirs
    if not bool(crossing.any()):
        return _same(link.inside, "inside", 1, 1.0, None)
    sharing = int(torch.bincount(nodes[crossing]).max()) if link.shared_uplink else 1
    return _same(link.between, "between", sharing, float(crossing.double().mean()), link.inside)


def _same(link: Link, port: str, sharing: int, part: float, otherwise: Link | None) -> _MeanRoute:
    latency, overhead, per_byte = link.latency, link.message_overhead, 1 / link.bandwidth
    mean, mean_per_byte = latency + overhead, per_byte
    if otherwise is not None:
        mean = part * mean + (1 - part) * (otherwise.latency + otherwise.message_overhead)
        mean_per_byte = part * per_byte + (1 - part) / otherwise.bandwidth
    return _MeanRoute(port, sharing, sharing * overhead, sharing * per_byte, mean, mean_per_byte)
