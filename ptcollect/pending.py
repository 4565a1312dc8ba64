"""What an asynchronous call gives back."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from ptcollect.compiling import eager
from ptcollect.state import State


class Pending:
    """An `update` under way on the communication thread: ``tree, state = pending.wait()``.

    >>> import torch, ptcollect as pc
    >>> pending = pc.scale(2.0).start({"w": torch.ones(2)})
    >>> tree, state = pending.wait()
    >>> tree, pending.done()
    ({'w': tensor([2., 2.])}, True)
    """

    def __init__(self, future: Future[tuple[Any, State]]) -> None:
        self._future = future

    @eager
    def wait(self) -> tuple[Any, State]:
        """Block until the call has ended; returns what `Pipeline.update` returns, or raises what it raises."""
        return self._future.result()

    def done(self) -> bool:
        """Whether `wait` would return at once. Never let what ranks send depend on it: ranks differ in timing."""
        return self._future.done()
