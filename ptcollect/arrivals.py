"""Gradients that arrive while the call that synchronises them is already under way.

A backward pass delivers leaves on its own thread; the call waits for them on the communication thread, and only for
those it needs next. So the first buckets travel while later gradients are still being computed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from ptcollect.dtypes import with_strides
from ptcollect.errors import PeerLostError, PipelineError
from ptcollect.tree import Leaves, sorted_paths


class Arrivals:
    """What one backward pass has delivered so far."""

    def __init__(self, like: Leaves, expected: Iterable[str], *, certain: bool) -> None:
        self.like = like
        """Path -> a tensor of the shape, dtype, device and strides of the leaf to come, for every leaf there may be."""
        self.expected = frozenset(expected)
        """The leaves that the call sets out with, the same on all ranks."""
        self.certain = certain
        """Whether all of them come on every rank; else the ranks compare at the end which ones did."""
        self.used = self.expected
        """The leaves that came on some rank, once the call has ended."""
        self._here: Leaves = {}
        self._over = False
        self.failure: Exception | None = None
        """Why the pass failed on this rank, if it did."""
        self._graph_tasks: dict[int, _GraphTask] = {}
        self._changed = threading.Condition()
        self._news = self._seen = 0

    # On the backward thread.

    def watch(self) -> None:
        """Notice if the autograd graph task that runs now breaks off; with reentrant checkpoints a pass has several."""
        number = torch._C._current_graph_task_id()
        if number not in self._graph_tasks and number != -1:
            self._graph_tasks[number] = _GraphTask()

    def deliver(self, leaves: Mapping[str, Tensor]) -> None:
        """`leaves` have their values; they stay as they are until the call has ended."""
        for leaf in leaves.values():
            if not leaf.is_cpu:  # the communication thread has a stream of its own
                torch.accelerator.current_stream(leaf.device).synchronize()
        with self._changed:
            self._here |= leaves
            self._news += 1
            self._changed.notify_all()

    def finish(self) -> None:
        """Nothing more comes: what has not arrived counts as zeros here."""
        with self._changed:
            self._over = True
            self._news += 1
            self._changed.notify_all()

    def abort(self, failure: Exception) -> None:
        """The pass has failed: whoever waits for leaves gets `failure`."""
        with self._changed:
            self.failure = self.failure or failure
            self._news += 1
            self._changed.notify_all()

    @property
    def delivered(self) -> frozenset[str]:
        """The leaves that have arrived."""
        with self._changed:
            return frozenset(self._here)

    @property
    def complete(self) -> bool:
        """Whether every leaf that was expected has arrived."""
        return self.expected <= self.delivered

    @property
    def broke_off(self) -> bool:
        """Whether autograd has given the pass up, because something in it raised."""
        return any(task.broke_off for task in list(self._graph_tasks.values()))

    # On the communication thread.

    def there(self, paths: Iterable[str]) -> bool:
        """Whether `wait` would return at once."""
        return self._over or self.failure is not None or all(path in self._here for path in paths)

    def wait(self, paths: Iterable[str], timeout: timedelta) -> Leaves:
        """Block until `paths` have arrived or the pass is over.

        Returns:
            Path -> leaf, zeros for one that did not arrive.

        Raises:
            PipelineError: the pass broke off.
            PeerLostError: they did not arrive within `timeout`.
        """
        wanted = list(paths)
        end = monotonic() + timeout.total_seconds()
        with self._changed:
            while not self._changed.wait_for(lambda: self.there(wanted), _LOOK_AGAIN):
                if self.broke_off:
                    self.failure = PipelineError("the backward pass on this rank broke off before its end")
                elif monotonic() > end:
                    raise self._late(wanted, timeout)
            if self.failure is not None:
                raise self.failure
        return {path: self._value(path) for path in wanted}

    @property
    def open(self) -> bool:
        """Whether something may still arrive."""
        return not (self._over or self.failure is not None or self.like.keys() <= self._here.keys())

    def wait_beside(self, job: Future[Any]) -> bool:
        """Block until `job` is done (True) or something has arrived since the last call (False)."""
        with self._changed:
            self._changed.wait_for(lambda: job.done() or self._news > self._seen, _LOOK_AGAIN)
            if job.done():
                return True
            self._seen = self._news
            return False

    def wake(self, _: object = None) -> None:
        """Have `wait_beside` look again."""
        with self._changed:
            self._changed.notify_all()

    def exactly(self, used: Iterable[str]) -> Leaves:
        """The leaves `used` after the pass is over, in natural order."""
        return {path: self._value(path) for path in sorted_paths(used)}

    def _value(self, path: str) -> Tensor:
        like = self.like[path]
        here = self._here.get(path)
        return (
            with_strides(torch.zeros(like.shape, dtype=like.dtype, device=like.device), like) if here is None else here
        )

    def _late(self, wanted: list[str], timeout: timedelta) -> PeerLostError:
        absent = [path for path in wanted if path not in self._here]
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        return PeerLostError(
            f"no gradient of {absent[0]!r}{others} arrived from backward within {timeout.total_seconds():g} s; under "
            "DDP give the DDP module itself to as_ddp_hook, which knows what it manages"
        )


_LOOK_AGAIN = 0.2  # seconds


class _GraphTask:
    """One run of the autograd engine; the engine drops its callbacks unrun if the run breaks off."""

    def __init__(self) -> None:
        ended = self._ended = threading.Event()

        def end() -> None:
            ended.set()

        self._callback = weakref.ref(end)
        at_end_of_backward(end)

    @property
    def broke_off(self) -> bool:
        return self._callback() is None and not self._ended.is_set()


def at_end_of_backward(function: Callable[[], Any]) -> None:
    """Have the autograd engine call `function` when the graph task that runs now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
