"""What users type: pipelines, sizes, counts and shapes as text, read into values."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ptcollect as pc
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline
from ptcollect.sizes import size_in_bytes

SHORT_NAMES: Mapping[str, str] = {
    "dense": "chain(bucketize(), ring_reduce())",
    "bf16": 'chain(bucketize(), compress("bf16"), ring_reduce())',
    "int8": 'chain(error_feedback(), bucketize(), compress("int8"), ring_reduce())',
    "topk": "chain(error_feedback(), bucketize(), compress(codecs.topk(0.01)), all_to_all_avg())",
    "low_rank": "chain(error_feedback(), low_rank(4), bucketize(), ring_reduce())",
    "hierarchical": 'chain(bucketize(), shard("local"), ring_reduce(axis="node"))',
    "diloco": "chain(diloco(500), bucketize(), ring_reduce())",
}
"""What a pipeline can be called instead of being written out."""


def read_size(text: str) -> int:
    """Bytes, from text such as ``"25MiB"`` (powers of 1024) or ``"500KB"`` (powers of 1000).

    Raises:
        ValueError: not a positive size.

    >>> read_size("4KiB"), read_size("1.5MB")
    (4096, 1500000)
    """
    return size_in_bytes(text, "size")


def split(text: str) -> list[str]:
    """The parts of a list written with commas; commas inside brackets or quotes separate nothing.

    >>> split('dense, chain(bucketize("1MiB", order="forward"), ring_reduce())')
    ['dense', 'chain(bucketize("1MiB", order="forward"), ring_reduce())']
    """
    parts, depth, quote, start = [], 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
        else:
            depth += (letter in "([{") - (letter in ")]}")
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


# Pipelines ----------------------------------------------------------------------------------------------------------


def read_pipeline(text: str) -> Pipeline:
    """A pipeline, from one of `SHORT_NAMES` or a Python expression over the public names, with or without ``pc.``.

    Only calls, public names and literals are evaluated.

    Raises:
        ValueError: not such an expression, or no pipeline comes of it; the message says where and what is known.

    >>> read_pipeline("bf16")
    chain(bucketize(), compress("bf16"), ring_reduce())
    >>> read_pipeline("pc.chain(pc.bucketize('1MiB'), pc.compress(pc.codecs.topk(0.02)), pc.all_to_all_avg())")
    chain(bucketize("1MiB"), compress(topk(0.02)), all_to_all_avg())
    """
    source = SHORT_NAMES.get(text.strip(), text.strip())
    try:
        value = _evaluated(ast.parse(source, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"pipeline {text!r}: not a Python expression: {error.msg}") from None
    except (PipelineError, TypeError, ValueError) as error:
        raise ValueError(f"pipeline {text!r}: {error}") from None
    if not isinstance(value, Pipeline):
        fix = "add a reducer: chain(..., ring_reduce())" if isinstance(value, pc.Transform) else "call it, perhaps"
        raise ValueError(f"pipeline {text!r}: expected a pipeline, got {type(value).__name__}; {fix}")  # noqa: TRY004
    return value


def _evaluated(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value  # type: ignore[operator]
    if isinstance(node, (ast.List, ast.Tuple)):
        return tuple(_evaluated(part) for part in node.elts)
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {
            _evaluated(key): _evaluated(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, ast.Call) and all(keyword.arg is not None for keyword in node.keywords):
        arguments = [_evaluated(argument) for argument in node.args]
        options = {str(keyword.arg): _evaluated(keyword.value) for keyword in node.keywords}
        return _evaluated(node.func)(*arguments, **options)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _public(node)
    raise ValueError(f"{ast.unparse(node)!r} is not a call, a public name or a literal")


def _public(node: ast.expr) -> Any:
    """The public object that is called so: ``ring_reduce``, ``pc.ring_reduce``, ``codecs.int8``, ``pc.codecs.int8``."""
    name = ast.unparse(node).removeprefix("ptcollect.").removeprefix("pc.")
    head, _, tail = name.rpartition(".")
    module = pc.codecs if head == "codecs" else pc
    if head not in ("", "codecs") or tail not in module.__all__:
        known = ", ".join(SHORT_NAMES)
        raise ValueError(
            f"{name!r} is not a public name of ptcollect; "
            f"short names are {known}, everything else is written as in Python: {SHORT_NAMES['int8']}"
        )
    return getattr(module, tail)


# Models -------------------------------------------------------------------------------------------------------------


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters by name, from JSON such as ``{"fc.weight": [10, 256], "fc.bias": [10]}``.

    ``json.dump({name: list(p.shape) for name, p in model.named_parameters()}, file)`` writes one.

    Raises:
        ValueError: the file holds something else; the message names the entry.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"shapes {str(path)!r}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict) or not content:
        raise ValueError(f'shapes {str(path)!r}: expected names and shapes such as {{"fc.weight": [10, 256]}}')
    for name, shape in content.items():
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"shapes {str(path)!r}: {name!r}: expected a list of whole numbers, got {shape!r}")
    return {name: tuple(shape) for name, shape in content.items()}
