"""Under `torch.compile` a call that communicates is one graph break, and runs as it is."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keep the compiler out of `function` and all that it calls.

    `torch.compiler.disable` does that too, but takes a second to import the compiler. Here that is left to those who
    have imported it.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not disabled and "torch._dynamo" in sys.modules:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return (disabled[0] if disabled else function)(*args, **kwargs)

    seen_by_compiler: Any = call
    seen_by_compiler._torchdynamo_disable = True
    seen_by_compiler._torchdynamo_disable_msg = "ptcollect communicates, which no graph holds"
    return call
