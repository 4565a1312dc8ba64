"""What stages and codecs have in common: frozen dataclasses that print as the code that builds them."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, ClassVar

import optree
from torch import Tensor

from ptcollect.errors import PipelineError


class Value:
    """Base of every stage and codec: subclass as ``@dataclass(frozen=True, repr=False)``.

    Gives a ``repr`` that is source code (the first field positional, defaults left out); dataclasses give the rest:
    ``==``, ``hash``, pickling and deep copies.
    """

    name: ClassVar[str] = ""
    """What the value is called in source code and in state: the class's own name unless set."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def __repr__(self) -> str:
        parts = []
        positional = True
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if not field.init or not field.repr:
                continue
            value = getattr(self, field.name)
            if value != field.default:
                shown = self._show(field.name, value)
                parts.append(shown if positional else f"{field.name}={shown}")
            positional = False  # what follows the first option is keyword-only
        return f"{self.name}({', '.join(parts)})"

    def as_option(self) -> str:
        """How it reads as an option of another value."""
        return repr(self)

    def _show(self, field: str, value: Any) -> str:
        """How one option reads in source code."""
        if isinstance(value, Value):
            return value.as_option()
        return f'"{value}"' if isinstance(value, str) else getattr(value, "__qualname__", None) or repr(value)


def canonical(value: Any) -> str:
    """`value` as text that is equal wherever it means the same: by qualified names, never `repr` or `hash`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = (f"{f.name}={canonical(getattr(value, f.name))}" for f in dataclasses.fields(value) if f.compare)
        return f"{kind.__module__}.{kind.__qualname__}({','.join(fields)})"
    if isinstance(value, dict):
        return "{" + ",".join(f"{canonical(k)}:{canonical(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ",".join(canonical(v) for v in value) + ")"
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, (str, int, bool)):
        return repr(value)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    kind = type(value)
    return (
        f"{kind.__module__}.{kind.__qualname__}:{value}"
        if kind.__module__ == "torch"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def fingerprint(text: str) -> bytes:
    """16 bytes that two texts share only if they are equal."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree)


def refuse_factory(stage: str, value: Any) -> None:
    """Raise for a factory of ours that was not called.

    Raises:
        PipelineError: `value` is such a factory; the message shows the call.
    """
    ours = getattr(value, "__module__", "").startswith("ptcollect.") and callable(value)
    if getattr(value, "is_factory", False) or (ours and not isinstance(value, Value)):
        name = value.__name__
        raise PipelineError(f"{stage}(...) was given {name} itself; call it: {name}()")


def refuse_tree(stage: str, option: str, value: Any) -> None:
    """Raise the error for `value` being a tree or a function where the option of a stage was meant.

    Raises:
        PipelineError: always helpful, only if `value` is a tensor, a container with tensors, or a function.
    """
    if isinstance(value, Tensor) or (
        isinstance(value, (dict, list, tuple)) and any(isinstance(leaf, Tensor) for leaf in _leaves(value))
    ):
        raise PipelineError(
            f"{stage}(...) was given a tree as its option {option!r}; options come first, the tree afterwards: "
            f"{stage}()(grads) for a reducer, chain({stage}(), ring_reduce())(grads) for a transform"
        )
    refuse_factory(stage, value)
    if callable(value) and not isinstance(value, Value):
        raise PipelineError(
            f"{stage}(...) was given the function {getattr(value, '__qualname__', value)} as its option {option!r}; "
            f"a function of the whole tree joins a chain as stateless(f)"
        )


def whole_number(option: str, value: Any, *, least: int = 1, multiple_of: int = 1) -> int:
    """`value` if it is an int from `least` on, and a multiple of `multiple_of`; `option` is what messages call it.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or value % multiple_of:
        of = f" and a multiple of {multiple_of}" if multiple_of != 1 else ""
        raise ValueError(f"{option}: expected a whole number from {least} on{of}, got {value!r}")
    return value
