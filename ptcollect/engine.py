"""Performs pipelines on torch.distributed: one `Lane` per group of the user's, one private group per dimension of it.

A call runs on the caller's thread where nothing else is under way, and on the lane's communication thread otherwise, so
that calls on one group are performed in the order in which the program made them.
"""

from __future__ import annotations

import atexit
import queue
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ptcollect.arrivals import Arrivals
from ptcollect.call import Place, call
from ptcollect.chain import Chain
from ptcollect.comm import AllReduce, Arrival, Axis, Exchange, Packet, Request
from ptcollect.errors import PeerLostError, PipelineError
from ptcollect.options import Options
from ptcollect.pending import Pending
from ptcollect.pipeline import Pipeline, Wrapped
from ptcollect.process_groups import Members, PrivateGroup, exists, members_of
from ptcollect.profiling import span
from ptcollect.reducers.reducer import Reducer
from ptcollect.schedule import Task, drive
from ptcollect.state import State
from ptcollect.traffic import count
from ptcollect.tree import Leaves


def run(pipeline: Pipeline, tree: Any, state: State | None, options: Mapping[str, Any]) -> tuple[Any, State]:
    """Perform one call and wait for it."""
    read = Options.read(options)
    result: tuple[Any, State] = _lane(pipeline, read).run(lambda lane: lane.perform(pipeline, tree, state, read))
    return result


def start(pipeline: Pipeline, tree: Any, state: State | None, options: Mapping[str, Any]) -> Pending:
    """Perform one call on the communication thread."""
    read = Options.read(options)
    return Pending(_lane(pipeline, read).submit(lambda lane: lane.perform(pipeline, tree, state, read)))


def stream(
    pipeline: Pipeline, arrivals: Arrivals, state: State | None, options: Mapping[str, Any]
) -> Future[tuple[Any, State]]:
    """Perform one call on the communication thread, on leaves that a backward pass delivers meanwhile."""
    read = Options.read(options)
    tree = {path: like if path in arrivals.expected else None for path, like in arrivals.like.items()}
    lane = _lane(pipeline, read)
    lane.streams.append(arrivals)
    job = lane.submit(lambda lane: lane.perform(pipeline, tree, state, read, arrivals))
    job.add_done_callback(lambda _: lane.streams.remove(arrivals))
    return job


_lanes: dict[Any, Lane] = {}
_lanes_lock = threading.Lock()


def _lane(pipeline: Pipeline, options: Options) -> Lane:
    if not pipeline.communicates and options.weight is None:
        return _alone
    dims = members_of(options.group)
    key = tuple((members.axis, members.group) for members in dims)
    with _lanes_lock:
        if key not in _lanes:
            _forget_destroyed_groups()
            _lanes[key] = Lane(dims)
        return _lanes[key]


def _forget_destroyed_groups() -> None:
    for key, lane in list(_lanes.items()):
        if not all(exists(members.group) for members in lane.dims.values()):
            lane.close()
            del _lanes[key]


class Lane:
    """Where the calls on one group are performed, in order."""

    def __init__(self, dims: list[Members]) -> None:
        self.dims = {members.axis: members for members in dims}
        axes: dict[str | None, Axis] = {axis: Axis(members.rank, members.size) for axis, members in self.dims.items()}
        self.place = Place(axes or {None: Axis(0, 1)}, _place_name(dims))
        self.private: dict[str | None, PrivateGroup] = {}
        self.generations: dict[str | None, int] = {}
        self.calls = 0
        self.works: set[_Posted] = set()
        self.streams: list[Arrivals] = []  # of calls that are queued or under way
        self._lock = threading.Lock()  # held by whoever performs a call
        self._jobs: queue.SimpleQueue[tuple[Callable[[Lane], Any], Future[Any]]] = queue.SimpleQueue()
        self._performer: int | None = None  # the thread that performs a call
        self._queued = 0
        self._worker: threading.Thread | None = None
        self._waiting: tuple[_Posted, Future[None]] | None = None
        self._count_lock = threading.Lock()

    # Order: the caller's thread if idle, the communication thread otherwise.

    def run(self, job: Callable[[Lane], Any]) -> Any:
        """Perform `job` after everything submitted before it."""
        if any(arrivals.open and not arrivals.broke_off for arrivals in list(self.streams)):
            raise PipelineError(
                "a pipeline was called while gradients of the same group are still expected from backward, and would "
                "wait for them forever; call handle.wait() of overlap first, or use another group"
            )
        with self._count_lock:
            busy = self._queued > 0
        if self._performer == threading.get_ident():
            raise PipelineError(
                "a pipeline was called inside a stage of another on the same group, where it would wait for itself; "
                "compose the two with chain(...), or await inner.apply(...) in a Transform"
            )
        if busy:
            return self.submit(job).result()
        return self._do(job)

    def _do(self, job: Callable[[Lane], Any]) -> Any:
        with self._lock:
            self._performer = threading.get_ident()
            try:
                return job(self)
            finally:
                self._performer = None

    def submit(self, job: Callable[[Lane], Any]) -> Future[Any]:
        """Queue `job` for the communication thread."""
        future: Future[Any] = Future()
        with self._count_lock:
            self._queued += 1
            if self._worker is None:
                self._worker = threading.Thread(
                    target=_work, args=(weakref.ref(self), self._jobs), name="ptcollect", daemon=True
                )
                self._worker.start()
        self._jobs.put((job, future))
        return future

    def finish(self, job: Callable[[Lane], Any], future: Future[Any]) -> None:
        """Perform a queued job (on the communication thread)."""
        try:
            outcome, failure = self._do(job), None
        except BaseException as error:
            outcome, failure = None, error
        with self._count_lock:
            self._queued -= 1
        if failure is None:
            future.set_result(outcome)
        else:
            future.set_exception(failure)

    # One call.

    def perform(
        self,
        pipeline: Pipeline,
        tree: Any,
        state: State | None,
        options: Options,
        arrivals: Arrivals | None = None,
    ) -> tuple[Any, State]:
        """Run the call's program; on a failure that peers cannot know of, tell them and drop the private groups."""
        self.calls += 1
        while True:
            self.place.unanimous = None
            try:
                with torch.no_grad():
                    return self._drive(pipeline, tree, state, options, arrivals)
            except _EarlierFailureError:
                self._drop("an earlier call failed")  # known by now to all; this call can still be made, on a new group
            except BaseException as error:
                if error is not self.place.unanimous:
                    self.place.last_failed = bool(self.private)  # without any connection nothing can have begun
                    self._drop(_reason(error))
                raise

    def _drive(
        self, pipeline: Pipeline, tree: Any, state: State | None, options: Options, arrivals: Arrivals | None
    ) -> tuple[Any, State]:
        by_tag = arrivals is not None and self._matches_by_tag and _exchanges_only(pipeline)
        steps: Any = drive(call(pipeline, tree, state, self.place, options, arrivals), self._post, by_tag=by_tag)
        waited: bool | None = None
        try:
            while True:
                posted = steps.send(waited)
                if by_tag and arrivals is not None and arrivals.open and isinstance(posted, _Posted):
                    waited = self._wait_beside(posted, arrivals)
                else:
                    waited = self._wait(posted)
                del posted  # it holds what was sent
        except StopIteration as end:
            result: tuple[Any, State] = end.value
            return result
        finally:
            steps.close()

    def _wait(self, posted: _Posted | _Awaited) -> bool:
        if self._waiting is not None and self._waiting[0] is posted:
            self._waiting[1].result()
            self._waiting = None
        else:
            with span(posted.name):
                posted.wait()
        return True

    def _wait_beside(self, posted: _Posted, arrivals: Arrivals) -> bool:
        """Wait for a peer on a thread of its own, so as to post what backward delivers meanwhile."""
        if self._waiting is None or self._waiting[0] is not posted:
            job: Future[None] = Future()
            job.add_done_callback(arrivals.wake)
            # A daemon: the process may end although a peer never answers.
            threading.Thread(target=_perform, args=(posted.wait, job), name="ptcollect wait", daemon=True).start()
            self._waiting = (posted, job)
        return arrivals.wait_beside(self._waiting[1]) and self._wait(posted)

    @property
    def _matches_by_tag(self) -> bool:
        return len(self.dims) == 1 and all(dist.get_backend(members.group) == "gloo" for members in self.dims.values())

    def _post(self, request: Request[Any], task: Task) -> _Posted | _Awaited:
        if isinstance(request, Arrival):
            return _Awaited(request, max((members.timeout for members in self.dims.values()), default=_FOREVER))
        members = self.dims[request.axis if request.axis in self.dims else next(iter(self.dims))]
        count(request, members.rank, members.size)
        posted = _Posted(self, members, request, task)
        self.works.add(posted)
        posted.post(self._group(members))
        return posted

    def _group(self, members: Members) -> PrivateGroup:
        if members.axis not in self.private:
            # A mesh and its slices are lanes of their own, though they share groups.
            owner = "+".join(axis or "" for axis in self.dims)
            group = PrivateGroup(members, owner, self.generations.get(members.axis, 0) + 1)
            self.private[members.axis] = group
            self.generations[members.axis] = group.generation
        return self.private[members.axis]

    def lost(self, text: str, members: Members, request: Request[Any]) -> Exception:
        """The error for a transfer that failed: what a peer left word of, or else what the network said."""
        note = self.private[members.axis].read_note() if members.axis in self.private else None
        if note is None:
            error = PeerLostError(
                f"{text}; that rank may have exited, been killed, or been silent for longer than the timeout"
            )
            error.gone = True
            return error
        if note.call < self.calls and isinstance(request, Exchange) and request.control:
            return _EarlierFailureError()
        return PeerLostError(f"{note.who} failed: {note.why} ({text})")

    def _drop(self, why: str) -> None:
        for private in self.private.values():
            private.write_note(self.calls, self.place.name, why)
        self.close()

    def close(self) -> None:
        """Drop the private groups; the next call makes new ones."""
        for posted in list(self.works):  # copies: the communication thread may be at work on a group that is gone
            posted.forget()  # a Work keeps its group alive, and tracebacks keep frames with Works alive
        self.works.clear()
        for private in list(self.private.values()):
            private.drop()
        self.private.clear()


@atexit.register
def _close_all() -> None:
    """Close private groups while the interpreter is whole: gloo's threads abort a process that ends before them."""
    for lane in list(_lanes.values()):
        lane.close()


def _perform(function: Callable[[], None], outcome: Future[None]) -> None:
    try:
        function()
        outcome.set_result(None)
    except BaseException as error:
        outcome.set_exception(error)


def _exchanges_only(pipeline: Pipeline) -> bool:
    """Whether `drive` may go `by_tag`: tasks only send messages with tags of their own, always to the same peers.

    A native collective is matched by order; where forks are inside forks, their tags depend on which began first.
    """
    for stage in pipeline.walk():
        if isinstance(stage, Reducer):
            if not stage.factory.same_peers:
                return False
        elif not isinstance(stage, (Chain, Wrapped)):
            return False
    return True


class _Awaited:
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


class _EarlierFailureError(Exception):
    """The private group was dropped by a peer whose previous call failed while this rank's had already ended."""


class _Posted:
    """A request handed to torch.distributed."""

    def __init__(self, lane: Lane, members: Members, request: Request[Any], task: Task) -> None:
        self.lane = lane
        self.members = members
        self.request = request
        self.round = task.round
        self.tag = task.tag
        self.pending: list[tuple[str, int, int, Any]] = []  # what it is, its bytes, the peer (-1: all), its Work
        self.buffers: dict[int, Tensor] = {}
        self.sent: list[Tensor] = []
        self.failure: Exception | None = None

    def post(self, group: PrivateGroup) -> None:
        """Issue the sends and receives, or the collective."""
        gloo = group.gloo
        if gloo is None:
            raise PeerLostError(f"{self._what()}: the connection is gone")
        try:
            if isinstance(self.request, Exchange):
                self._exchange(self.request, group, gloo)
            elif isinstance(self.request, AllReduce):
                self._all_reduce(self.request, group, gloo)
        except RuntimeError as error:
            self.failure = self.lane.lost(f"{self._what()}: {_first_line(error)}", self.members, self.request)
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
            self.failure = self.lane.lost(f"{self._what()}: {trouble}", self.members, self.request)
            self.forget()
        self.lane.works.discard(self)

    @property
    def name(self) -> str:
        """What a profile calls the wait."""
        leaf = f" of {self.request.leaf}" if self.request.leaf else ""
        return f"{self.request.stage or 'exchange'}, round {self.round}{leaf}"

    def _wait_each(self) -> str | None:
        # Returns words, not the exception: its traceback would hold the Work, and that the group.
        timeout = self.lane.private[self.members.axis].timeout
        while self.pending:
            doing, size, peer, work = self.pending[0]
            trouble = _wait_watching(work, timeout, self._given_up) if peer < 0 else _wait(work, timeout)
            if trouble is not None:
                return f"{doing} {size} bytes{self._toward(doing, peer)} failed: {trouble}"
            del self.pending[0]
        return None

    def _given_up(self) -> bool:
        return self.lane.private[self.members.axis].read_note() is not None

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
_FOREVER = timedelta(days=1)


def _work(lane: weakref.ref[Lane], jobs: queue.SimpleQueue[tuple[Callable[[Lane], Any], Future[Any]]]) -> None:
    """The communication thread; ends with the lane, when the user's group is gone."""
    while True:
        try:
            job, future = jobs.get(timeout=10)
        except queue.Empty:
            if lane() is None:
                return
            continue
        owner = lane()
        if owner is None:
            future.set_exception(PipelineError("the process group was destroyed before this call ran"))
            continue
        owner.finish(job, future)
        del job, future, owner


def _place_name(dims: list[Members]) -> str:
    if len(dims) == 1:
        return dims[0].named(dims[0].rank)
    if not dims:
        return "this rank"
    coordinate = ", ".join(f"{members.axis}={members.rank}" for members in dims)
    return f"rank ({coordinate}; global rank {dims[0].global_ranks[dims[0].rank]})"


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, PeerLostError) else f"{type(error).__name__}: {error}"


def _first_line(error: Exception) -> str:
    """What the network said, without gloo's source positions and advice."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[\S*\] ", "", text).split(". This is typically")[0]


_alone = Lane([])  # for pipelines that send nothing, and so need no group
