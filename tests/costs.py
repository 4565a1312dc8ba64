"""Counts what a call costs, with no clock: bytes allocated, bytes copied, function calls.

The calls run on rank 0 of a group whose peers are an echo (benchmarks/echo_transport.py): everything of the library
runs, no socket is there, and nothing depends on timing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # last: it has a ranks.py of its own

from echo_transport import Posted, echo_group

__all__ = ["Memory", "Posted", "calls", "echo_group", "memory"]

COPIES = ("copy_", "clone", "cat", "_to_copy", "stack", "index_select", "index_put_")


@dataclass
class Memory:
    """What torch operations did while it was watched."""

    allocated: int = 0
    """Bytes of all new storages, also of those that were freed at once."""
    copied: int = 0
    """Bytes written by operations that only move numbers, conversions included."""
    by_operation: Counter[str] = field(default_factory=Counter)
    """Allocated, by operation: for a failing test to tell."""


class _Watch(TorchDispatchMode):
    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        before = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        name = function.overloadpacket.__name__
        if name == "copy_" and args[0].data_ptr() == args[1].data_ptr():
            return out  # onto itself: torch moves nothing
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            if _storage(tensor) not in before:
                self.memory.allocated += tensor.untyped_storage().nbytes()
                self.memory.by_operation[name] += tensor.untyped_storage().nbytes()
            if name in COPIES:
                self.memory.copied += tensor.nbytes
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def memory() -> Iterator[Memory]:
    """Watch what operations of this thread allocate and copy."""
    seen = Memory()
    with _Watch(seen):
        yield seen


def calls(run: Callable[[], object]) -> int:
    """How many functions are called while `run` runs, Python's and C's."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
