"""Performs pipelines on torch.distributed: one `Lane` per group of the user's, one private group per dimension of it.

A call runs on the caller's thread where nothing else is under way, and on the lane's communication thread otherwise, so
that calls on one group are performed in the order in which the program made them.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ptcollect.arrivals import Arrivals
from ptcollect.call import Place, call
from ptcollect.chain import Chain
from ptcollect.comm import Arrival, Axis, Exchange, Request
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
from ptcollect.transfers import FromBackward, Transfer


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
        self.works: set[Transfer] = set()
        self.streams: list[Arrivals] = []  # of calls that are queued or under way
        self._lock = threading.Lock()  # held by whoever performs a call
        self._jobs: queue.SimpleQueue[tuple[Callable[[Lane], Any], Future[Any]]] = queue.SimpleQueue()
        self._performer: int | None = None  # the thread that performs a call
        self._queued = 0
        self._worker: threading.Thread | None = None
        self._waiting: tuple[Transfer, Future[None]] | None = None
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
                if by_tag and arrivals is not None and arrivals.open and isinstance(posted, Transfer):
                    waited = self._wait_beside(posted, arrivals)
                else:
                    waited = self._wait(posted)
                del posted  # it holds what was sent
        except StopIteration as end:
            result: tuple[Any, State] = end.value
            return result
        finally:
            steps.close()

    def _wait(self, posted: Transfer | FromBackward) -> bool:
        if self._waiting is not None and self._waiting[0] is posted:
            self._waiting[1].result()
            self._waiting = None
        else:
            with span(posted.name):
                posted.wait()
        if isinstance(posted, Transfer):
            self.works.discard(posted)
        return True

    def _wait_beside(self, posted: Transfer, arrivals: Arrivals) -> bool:
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

    def _post(self, request: Request[Any], task: Task) -> Transfer | FromBackward:
        if isinstance(request, Arrival):
            return FromBackward(request, max((members.timeout for members in self.dims.values()), default=_FOREVER))
        members = self.dims[request.axis if request.axis in self.dims else next(iter(self.dims))]
        count(request, members.rank, members.size)
        posted = Transfer(request, task, self._group(members), self.lost)
        self.works.add(posted)
        posted.post()
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


class _EarlierFailureError(Exception):
    """The private group was dropped by a peer whose previous call failed while this rank's had already ended."""


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


_FOREVER = timedelta(days=1)
_alone = Lane([])  # for pipelines that send nothing, and so need no group
