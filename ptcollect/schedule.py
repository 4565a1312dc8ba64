"""Runs one rank's coroutines: which one goes next, and in which order requests are made.

`drive` is a generator, so it knows neither sockets nor clocks. It posts requests through the `post` it is given and
yields the handle it must wait for: always the oldest. The order in which requests are posted is therefore a function of
the program alone, never of timing, which is what NCCL demands and gloo forgives until it deadlocks.

The one exception is asked for by name: with `by_tag` a task that waits for backward does not hold up the others, so
ranks may take tasks in different orders. That needs messages matched by tag, and more: a rank that waits for an answer
must still post what has become ready, and a task must exchange with the same peers in all its rounds. Then whatever a
rank waits for was posted before what its peer waits for, on and on, and there can be no circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ptcollect.comm import AllReduce, Arrival, Begin, End, Exchange, Fork, Request
from ptcollect.errors import PipelineError

IN_FLIGHT = 4
"""How many children of a fork run at a time (benchmarks/run.py --only tuning)."""


class Handle(Protocol):
    """A posted request."""

    def result(self) -> Any:
        """The answer, or raises; called when the driver says that it is there, again for whoever else asks."""


@dataclass(eq=False)
class Task:
    """One coroutine: the pipeline itself or a child of a fork."""

    coroutine: Coroutine[Any, Any, Any]
    tag: int
    """Distinguishes the messages of concurrent tasks; a function of the program."""
    parent: _Join | None = None
    index: int = 0
    round: int = 0
    """How many requests it has made in the present stage, for the present leaf."""
    request: Request[Any] | None = None
    """What it waits for, if that is not a fork."""
    join: _Join | None = None
    """What it waits for, if that is a fork."""
    closed: bool = False


@dataclass(eq=False)
class _Join:
    """A fork under way."""

    parent: Task
    waiting: deque[Task]
    results: list[Any]
    running: list[Task] = field(default_factory=list)


Post = Callable[[Request[Any], Task], Handle]


def drive(
    main: Coroutine[Any, Any, Any], post: Post, in_flight: int = IN_FLIGHT, *, by_tag: bool = False
) -> Generator[Handle, bool | None, Any]:
    """Run `main` to its end; yields each posted handle when it is that handle's turn to be waited for.

    Sent ``False``, it is told that leaves have arrived and that the handle has not been waited for yet.

    Args:
        main: the program.
        post: makes a request and returns its handle.
        in_flight: children of a fork that run at a time.
        by_tag: messages find their receiver by tag and not by order, so that others may go on while a task waits for
            leaves from backward. Those waits still end in order.

    Returns:
        What `main` returned.

    Raises:
        PipelineError: a coroutine awaited something that is not a request of `Comm`.
    """
    return (yield from _Driver(main, post, in_flight, by_tag).run())


class _Driver:
    def __init__(self, main: Coroutine[Any, Any, Any], post: Post, in_flight: int, by_tag: bool) -> None:
        self.main = Task(main, tag=0)
        self.post = post
        self.in_flight = in_flight
        self.by_tag = by_tag
        self.tags = 1
        self.tags_used = False
        self.ready: list[tuple[Task, Any, BaseException | None]] = [(self.main, None, None)]  # a stack: depth first
        self.posted: deque[tuple[Handle, Task]] = deque()
        self.outcome: list[Any] = []

    def run(self) -> Generator[Handle, bool | None, Any]:
        try:
            while True:
                while self.ready:
                    self._advance(*self.ready.pop())
                if self.outcome:
                    return self.outcome[0]
                position = self._turn()
                handle, task = self.posted[position]
                if (yield handle) is False:
                    continue
                del self.posted[position]
                if task.closed:
                    continue  # its fork failed elsewhere; the transfer is over, nobody wants the answer
                try:
                    answer = handle.result()
                except Exception as error:
                    self.ready.append((task, None, error))
                else:
                    self.ready.append((task, answer, None))
                    del answer
                del handle  # it holds what was sent, and the next bucket is about to be packed
        finally:
            self._close(self.main)

    def _turn(self) -> int:
        """Whose turn it is to be waited for: a position in `posted`."""
        if self.by_tag:
            requests = [task.request for _, task in self.posted]
            arrived = (isinstance(each, Arrival) and each.arrivals.there(each.paths) for each in requests)
            sent = (not isinstance(each, Arrival) for each in requests)
            return next((i for flags in (arrived, sent) for i, flag in enumerate(flags) if flag), 0)
        return 0

    def _advance(self, task: Task, answer: Any, error: BaseException | None) -> None:
        try:
            request = task.coroutine.send(answer) if error is None else task.coroutine.throw(error)
        except StopIteration as end:
            self._finish(task, end.value)
        except BaseException as failure:  # to the parent first: it may close what it opened
            self._fail(task, failure)
        else:
            self._dispatch(task, request)

    def _dispatch(self, task: Task, request: Any) -> None:
        if isinstance(request, Fork):
            self._start(task, request)
        elif isinstance(request, (Exchange, AllReduce, Arrival)):
            try:
                self.posted.append((self._posted(request, task), task))
            except Exception as error:
                self.ready.append((task, None, error))
        elif isinstance(request, Begin):
            try:  # in the name of the whole program: on another rank another task may have come to it
                self.ready.append((task, self._posted(request.exchange, self.main), None))
            except Exception as error:
                self.ready.append((task, None, error))
        elif isinstance(request, End):
            task.request = request
            self.posted.append((request.ticket, task))
        else:
            where = innermost_line(task.coroutine)
            misuse = PipelineError(
                f"{where} awaits {request!r}, which is not a request of its comm; a reducer may await comm.exchange, "
                "comm.all_reduce, comm.fork and its own coroutines, nothing of asyncio or torch"
            )
            self.ready.append((task, None, misuse))

    def _posted(self, request: Request[Any], task: Task) -> Handle:
        self.tags_used = self.tags_used or task.parent is not None
        before, task.request = task.request, request
        same = before is not None and (before.stage, before.leaf) == (request.stage, request.leaf)
        task.round = task.round + 1 if same else 1
        return self.post(request, task)

    def _start(self, task: Task, fork: Fork) -> None:
        if task.parent is None and not self.tags_used:
            self.tags = 1  # what began before the ranks agreed, and differed between them, took some and sent nothing
        children = deque(Task(child, self.tags + i, index=i) for i, child in enumerate(fork.children))
        self.tags += len(children)
        if not children:
            self.ready.append((task, [], None))
            return
        join = _Join(task, children, [None] * len(children))
        task.join = join
        first = [self._next(join) for _ in range(min(self.in_flight, len(children)))]
        self.ready.extend((child, None, None) for child in reversed(first))

    def _next(self, join: _Join) -> Task:
        child = join.waiting.popleft()
        child.parent = join
        join.running.append(child)
        return child

    def _finish(self, task: Task, value: Any) -> None:
        task.closed, task.request = True, None  # a request holds what was sent
        join = task.parent
        if join is None:
            self.outcome.append(value)
            return
        join.results[task.index] = value
        join.running.remove(task)
        if join.waiting:
            self.ready.append((self._next(join), None, None))
        elif not join.running:
            join.parent.join = None
            self.ready.append((join.parent, join.results, None))

    def _fail(self, task: Task, failure: BaseException) -> None:
        task.closed = True
        join = task.parent
        if join is None:
            raise failure
        join.running.remove(task)
        parent = join.parent
        self._close_children(parent)
        self.ready = [entry for entry in self.ready if not entry[0].closed]
        self.ready.append((parent, None, failure))

    def _close(self, task: Task) -> None:
        self._close_children(task)
        if not task.closed:
            task.closed = True
            task.coroutine.close()

    def _close_children(self, task: Task) -> None:
        join, task.join = task.join, None
        if join is not None:
            for child in (*join.running, *join.waiting):
                self._close(child)


def innermost_line(coroutine: Any) -> str:
    """``file:line in function`` of the deepest coroutine that `coroutine` is suspended in, asyncio's own left out."""
    while hasattr(getattr(coroutine, "cr_await", None), "cr_frame"):
        if "asyncio" in Path(coroutine.cr_await.cr_code.co_filename).parts:
            break
        coroutine = coroutine.cr_await
    frame = coroutine.cr_frame
    if frame is None:
        return f"{coroutine.cr_code.co_filename}:{coroutine.cr_code.co_firstlineno} in {coroutine.cr_code.co_name}"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
