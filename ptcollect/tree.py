"""Trees of tensors behind one door: `flatten` to `{path: leaf}`, `Structure.unflatten` back.

A tree is whatever optree understands: dicts, lists, tuples, NamedTuples, dataclasses registered with optree (globally
or in the namespace ``"ptcollect"``), or one bare tensor. Leaves are tensors or ``None`` (a missing gradient).
Everything inside a pipeline works on the flat form: a plain ``dict`` from dotted path to tensor, in *natural order* of
the paths (``layers.2`` before ``layers.10``), so that the order never depends on how a dict was filled.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

Leaves: TypeAlias = "dict[str, Tensor]"
"""A flat tree: dotted path -> tensor, in natural order."""

NAMESPACE = "ptcollect"
ROOT = "<tensor>"  # the path of a tree that is one bare tensor


@dataclass(frozen=True)
class Structure:
    """What a tree looks like without its leaves: enough to put other leaves back in."""

    spec: optree.PyTreeSpec
    paths: tuple[str, ...]
    """Every leaf's path, ``None`` leaves included, in natural order."""
    order: tuple[int, ...]
    """Position of each of `paths` in optree's own flattening order."""

    def unflatten(self, leaves: Mapping[str, Tensor]) -> Any:
        """Rebuild the tree from `leaves`; a path that `leaves` lacks becomes ``None``."""
        flat: list[Tensor | None] = [None] * len(self.paths)
        for path, position in zip(self.paths, self.order, strict=True):
            flat[position] = leaves.get(path)
        return optree.tree_unflatten(self.spec, flat)


def flatten(tree: Any) -> tuple[Leaves, Structure]:
    """Split `tree` into its tensors by path and its structure.

    ``None`` leaves are in the structure's paths but not among the leaves.

    Raises:
        TypeError: a leaf is not a plain dense tensor; the message names its path and the fix.
        ValueError: two leaves would have the same dotted path.
    """
    flat, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    structure = Structure(spec, *_layout(spec))
    leaves: Leaves = {}
    for path, position in zip(structure.paths, structure.order, strict=True):
        leaf = flat[position]
        if leaf is not None:
            leaves[path] = _checked(leaf, path)
    return leaves, structure


def refuse_empty(structure: Structure) -> None:
    """Raise for a tree without leaves.

    Raises:
        ValueError: there is nothing in the tree, which is hardly what was meant.
    """
    if not structure.paths:
        raise ValueError(
            "the tree is empty: it has no leaves at all, so there is nothing to synchronise; pass the gradients, for "
            "example {name: p.grad for name, p in module.named_parameters()} (leaves may be None)"
        )


def natural_order(path: str) -> list[Any]:
    """Sort key that counts digits as numbers: ``layers.2`` before ``layers.10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", path)]


def sorted_paths(paths: Iterable[str]) -> list[str]:
    """`paths` in natural order."""
    return sorted(paths, key=natural_order)


@functools.lru_cache(maxsize=256)
def _layout(spec: optree.PyTreeSpec) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Paths in natural order and their positions; equal for dicts that were filled in different orders."""
    names = [".".join(_entry_name(entry) for entry in accessor) or ROOT for accessor in spec.accessors()]
    order = sorted(range(len(names)), key=lambda i: natural_order(names[i]))
    for before, after in itertools.pairwise(order):
        if names[before] == names[after]:
            raise ValueError(
                f"two leaves of the tree have the same path {names[after]!r} (a key with a dot in it beside a nested "
                "key, or the keys 1 and '1'); rename one: state and messages are kept by path"
            )
    return tuple(names[i] for i in order), tuple(order)


def _entry_name(entry: Any) -> str:
    # NamedTuple and dataclass entries know their field; dict and sequence entries only their key or index.
    return str(getattr(entry, "field", entry.entry))


def _checked(leaf: Any, path: str) -> Tensor:
    tensor: Tensor = leaf if type(leaf) in (Tensor, torch.nn.Parameter) else _unwrapped(leaf, path)
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"leaf {path!r}: expected a dense tensor, got layout {tensor.layout}; call .to_dense() on it first "
            "(for Embedding gradients: sparse=False)"
        )
    if tensor.is_quantized or tensor.is_nested:
        raise TypeError(
            f"leaf {path!r}: quantized and nested tensors cannot be averaged; pass .dequantize() or the parts"
        )
    return tensor


def _unwrapped(leaf: Any, path: str) -> Tensor:
    """Look through the tensor subclasses that mean a plain tensor; refuse the others by name."""
    kind = type(leaf).__name__
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"leaf {path!r}: expected a torch.Tensor or None, got {type(leaf).__module__}.{kind}; wrap numbers as "
            "torch.tensor(x), and register your own containers with optree"
        )
    if kind == "AsyncCollectiveTensor":
        waited: Tensor = leaf.wait()  # type: ignore[attr-defined]
        return waited
    if kind == "DTensor":
        raise TypeError(
            f"leaf {path!r} is a DTensor: its ranks hold shards, and a pipeline averages whole local tensors; pass "
            "leaf.to_local() with the group over which the shards are replicated"
        )
    return leaf.as_subclass(Tensor)
