"""State is data: nested dicts with string keys, keyed by stage name at the top, flat by parameter path below.

A pipeline's state is ``{"step": int, stage: {...}, ...}``; where a stage occurs twice the later one, reading from the
left, gets the suffix ``_1``. A pipeline inside another sees the same layout without ``step`` and with its own
numbering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

State: TypeAlias = "dict[str, Any]"
"""``{"step": int, stage name: {...}}``: strings, tensors and ints only, so that ``weights_only=True`` loads it."""


def numbered(names: Sequence[str]) -> list[str]:
    """State keys for stages called `names`, in order.

    >>> numbered(["momentum", "error_feedback", "momentum"])
    ['momentum', 'error_feedback', 'momentum_1']
    """
    seen: Counter[str] = Counter()
    keys = []
    for name in names:
        keys.append(f"{name}_{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return keys


def part(state: State, names: Sequence[str], start: int, stop: int) -> State:
    """The state of stages ``names[start:stop]`` alone, under the keys they have on their own."""
    keys = numbered(names)[start:stop]
    return {local: state[key] for local, key in zip(numbered(names[start:stop]), keys, strict=True)}


def joined(names: Sequence[str], parts: Sequence[State]) -> State:
    """The state of stages `names`, put together from consecutive `parts`."""
    values = [value for state in parts for value in state.values()]
    return dict(zip(numbered(names), values, strict=True))
