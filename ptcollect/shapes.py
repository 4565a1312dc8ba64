"""Parameters without values, for plans: trees of meta tensors from shapes, modules or a count."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ptcollect.tree import NAMESPACE

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_VOCABULARY = 50_257


def without_values(params: Any, dtype: torch.dtype = torch.float32) -> Any:
    """`params` as a tree of meta tensors: a tree of tensors or of shapes, a module, or how many there are in all.

    Raises:
        ValueError: a count that is none.
        TypeError: a leaf is neither a tensor nor a shape.
    """
    if isinstance(params, torch.nn.Module):
        params = dict(params.named_parameters())
    if isinstance(params, (int, str)) and not isinstance(params, bool):
        return {path: torch.empty(shape, dtype=dtype, device="meta") for path, shape in of_size(params).items()}
    return _tree(params, dtype)


def _tree(params: Any, dtype: torch.dtype) -> Any:
    return optree.tree_map(
        lambda leaf: _leaf(leaf, dtype), params, is_leaf=_is_shape, none_is_leaf=True, namespace=NAMESPACE
    )


def _is_shape(node: Any) -> bool:
    return isinstance(node, torch.Size) or (
        type(node) in (tuple, list) and bool(node) and all(isinstance(size, int) for size in node)
    )


def _leaf(leaf: Any, dtype: torch.dtype) -> Tensor | None:
    if leaf is None:
        return None
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    if _is_shape(leaf):
        return torch.empty(tuple(leaf), dtype=dtype, device="meta")
    raise TypeError(f"params: expected tensors or shapes such as (768, 768), got {type(leaf).__name__}: {leaf!r}")


def count(params: int | str) -> int:
    """How many parameters ``"124M"`` or ``"1B"`` means.

    Raises:
        ValueError: it is no such number.
    """
    if isinstance(params, int) and params > 0:
        return params
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMBGT]?)\s*", str(params).upper())
    number = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if number <= 0:
        raise ValueError(f'params: expected how many there are, such as 124_000_000, "124M" or "1B", got {params!r}')
    return number


def of_size(params: int | str) -> Mapping[str, Sequence[int]]:
    """Path -> shape of a decoder-only transformer with exactly so many parameters.

    Width and depth grow together as in the GPT-2 and GPT-3 families; what the blocks and the embedding do not use up
    is one vector. Fewer than a million parameters are one leaf.
    """
    total = count(params)
    if total < 1_000_000:
        return {"weight": (total,)}
    width = 128
    while _of_blocks(width + 128, _depth(width + 128)) + (width + 128) * min(_VOCABULARY, width * 40) <= total:
        width += 128
    vocabulary = min(_VOCABULARY, width * 40)
    depth = max(1, (total - vocabulary * width - 2 * width) // _of_blocks(width, 1))
    shapes: dict[str, Sequence[int]] = {"embedding.weight": (vocabulary, width)}
    for block in range(depth):
        for name, shape in _block(width).items():
            shapes[f"blocks.{block}.{name}"] = shape
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    rest = total - _of_blocks(width, depth) - vocabulary * width - 2 * width
    if rest < 0:  # too few for one block of that width
        return {"weight": (total // 128, 128), **({"bias": (total % 128,)} if total % 128 else {})}
    return {**shapes, "positions.weight": (rest,)} if rest else shapes


def _depth(width: int) -> int:
    return max(1, width // 64)


def _of_blocks(width: int, depth: int) -> int:
    return depth * (12 * width * width + 13 * width)


def _block(width: int) -> dict[str, Sequence[int]]:
    return {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attention.qkv.weight": (3 * width, width),
        "attention.qkv.bias": (3 * width,),
        "attention.out.weight": (width, width),
        "attention.out.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "mlp.up.weight": (4 * width, width),
        "mlp.up.bias": (4 * width,),
        "mlp.down.weight": (width, 4 * width),
        "mlp.down.bias": (width,),
    }
