"""Local maps: pipelines that send nothing and change each rank's tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.dtypes import fresh_copy, restrided, wide_dtype
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline
from ptcollect.state import State
from ptcollect.tree import Leaves, flatten
from ptcollect.value import refuse_tree


def scale(factor: float) -> Pipeline:
    r"""Multiply every leaf by `factor`.

    .. math:: y = \text{factor} \cdot x

    Args:
        factor: a finite number; leaves keep their dtype, so integers need an integer factor.

    Returns:
        A Pipeline that sends nothing.

    Raises:
        ValueError: `factor` is not a finite number.

    >>> import torch, ptcollect as pc
    >>> pc.scale(0.5)({"w": torch.tensor([2.0, 4.0])})
    {'w': tensor([1., 2.])}
    """
    refuse_tree("scale", "factor", factor)
    return _Scale(_finite("scale", "factor", factor))


def clip_by_value(limit: float) -> Pipeline:
    r"""Clamp every element to [-limit, limit].

    .. math:: y_i = \max(-\text{limit}, \min(\text{limit}, x_i))

    Args:
        limit: positive bound, in the units of the gradient. Complex leaves: real and imaginary part each.

    Returns:
        A Pipeline that sends nothing.

    Raises:
        ValueError: `limit` is not a positive finite number.

    >>> import torch, ptcollect as pc
    >>> pc.clip_by_value(1.0)({"w": torch.tensor([-3.0, 0.5])})
    {'w': tensor([-1.0000,  0.5000])}
    """
    refuse_tree("clip_by_value", "limit", limit)
    return _ClipByValue(_positive("clip_by_value", "limit", limit))


def clip_by_global_norm(max_norm: float) -> Pipeline:
    r"""Scale the whole tree down to Euclidean norm `max_norm` where it is larger.

    .. math:: y = x \cdot \min(1, \text{max\_norm} / \|x\|_2), \qquad \|x\|_2^2 = \sum_\text{leaves} \sum_i |x_i|^2

    The norm is over all floating and complex leaves, summed in float64 leaf by leaf in natural order of their paths, so
    that all ranks clip alike. Integer leaves pass unchanged. A norm that is not finite gives NaN leaves, as in
    `torch.nn.utils.clip_grad_norm_`.

    Args:
        max_norm: positive bound, in the units of the gradient.

    Returns:
        A Pipeline that sends nothing.

    Raises:
        ValueError: `max_norm` is not a positive finite number.

    Source: Pascanu et al. 2013, On the difficulty of training recurrent neural networks, section 3.2.

    >>> import torch, ptcollect as pc
    >>> pc.clip_by_global_norm(1.0)({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    {'a': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    refuse_tree("clip_by_global_norm", "max_norm", max_norm)
    return _ClipByGlobalNorm(_positive("clip_by_global_norm", "max_norm", max_norm))


def stateless(function: Callable[[Any], Any]) -> Pipeline:
    """Any pure function of the whole tree as a stage.

    .. math:: y = f(x)

    Args:
        function: takes the tree in the structure that the user passed to the pipeline, ``None`` for leaves that are
            missing, and returns one of the same structure, shapes and dtypes. It must be pure: it may not change
            its argument, and ranks must agree on what it does.

    Returns:
        A Pipeline that sends nothing. Two are equal if their functions are the same object; only functions that can be
        imported by name can be pickled.

    Raises:
        TypeError: `function` is not callable.
        PipelineError: while running, if another structure, shape or dtype comes back.

    >>> import torch, ptcollect as pc
    >>> def without_mean(tree):
    ...     return {"w": tree["w"] - tree["w"].mean()}
    >>> pc.stateless(without_mean)({"w": torch.tensor([1.0, 3.0])})
    {'w': tensor([-1.,  1.])}
    """
    if isinstance(function, (Pipeline, Tensor)) or not callable(function):
        raise TypeError(f"stateless(function): expected a function of the tree, got {type(function).__name__}")
    return _Stateless(function)


class _Map(Pipeline):
    @property
    def fresh(self) -> bool:
        return True

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        return self.map(tree), state

    def map(self, tree: Leaves) -> Leaves:
        raise NotImplementedError


class _Leafwise(_Map):
    @property
    def leafwise(self) -> bool:
        return True


@dataclass(frozen=True, repr=False)
class _Scale(_Leafwise):
    name = "scale"
    factor: float

    def map(self, tree: Leaves) -> Leaves:
        return {path: scaled(leaf, self.factor, path) for path, leaf in tree.items()}


@dataclass(frozen=True, repr=False)
class _ClipByValue(_Leafwise):
    name = "clip_by_value"
    limit: float

    def map(self, tree: Leaves) -> Leaves:
        return {path: restrided(self._clamped(leaf), leaf) for path, leaf in tree.items()}

    def _clamped(self, leaf: Tensor) -> Tensor:
        if leaf.is_complex():
            real = torch.view_as_real(leaf.resolve_conj().resolve_neg())
            return torch.view_as_complex(real.clamp(-self.limit, self.limit))
        if leaf.dtype.itemsize == 1 and leaf.dtype.is_floating_point:  # float8 has no arithmetic of its own
            return leaf.to(torch.float32).clamp(-self.limit, self.limit).to(leaf.dtype)
        if not leaf.is_floating_point():
            held = torch.iinfo(leaf.dtype)  # bounds as ints of that dtype: floats would make the leaf one of floats
            return leaf.clamp(max(-int(self.limit), held.min), min(int(self.limit), held.max))
        return leaf.clamp(-self.limit, self.limit)


@dataclass(frozen=True, repr=False)
class _ClipByGlobalNorm(_Map):
    name = "clip_by_global_norm"
    max_norm: float

    def map(self, tree: Leaves) -> Leaves:
        norms = [_norm(leaf) for leaf in tree.values() if _has_norm(leaf)]
        if not norms:
            return {path: fresh_copy(leaf) for path, leaf in tree.items()}
        norm = torch.stack([norm.to(norms[0].device) for norm in norms]).norm()
        factor = (self.max_norm / norm).clamp(max=1.0)  # NaN stays NaN
        return {
            path: scaled(leaf, factor.to(leaf.device), path) if _has_norm(leaf) else fresh_copy(leaf)
            for path, leaf in tree.items()
        }


@dataclass(frozen=True, repr=False)
class _Stateless(Pipeline):
    name = "stateless"
    function: Callable[[Any], Any]
    where: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        code = getattr(self.function, "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.function)
        object.__setattr__(self, "where", where)

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        if comm.structure is None:
            raise PipelineError("stateless(f) needs the structure of the user's tree, and this comm has none")
        result, structure = flatten(self.function(comm.structure.unflatten(tree)))
        if structure.paths != comm.structure.paths or result.keys() != tree.keys():
            raise PipelineError(
                f"{self!r} ({self.where}) changed the structure: went in {list(tree)}, came out {list(result)}"
            )
        for path, leaf in result.items():
            if leaf.shape != tree[path].shape or leaf.dtype != tree[path].dtype:
                raise PipelineError(
                    f"{self!r} ({self.where}) changed leaf {path!r}: went in {tuple(tree[path].shape)} "
                    f"{tree[path].dtype}, came out {tuple(leaf.shape)} {leaf.dtype}"
                )
        return {path: restrided(leaf, tree[path]) for path, leaf in result.items()}, state


def scaled(leaf: Tensor, factor: float | Tensor, path: str) -> Tensor:
    """`leaf` times `factor`, multiplied in float32 at least, in `leaf`'s dtype and strides."""
    if leaf.is_floating_point() or leaf.is_complex():
        wide = wide_dtype(leaf.dtype)
        if isinstance(factor, Tensor):
            factor = factor.to(wide.to_real())
        return restrided((leaf.to(wide) * factor).to(leaf.dtype), leaf)
    if isinstance(factor, float) and not factor.is_integer():
        raise PipelineError(
            f"leaf {path!r} is {leaf.dtype} and cannot be multiplied by {factor:g}: it holds no fractions; "
            "convert it to a float dtype first"
        )
    return restrided(leaf.mul(int(factor)), leaf)


def _has_norm(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _norm(leaf: Tensor) -> Tensor:
    """The Euclidean norm in float64; zero for an empty leaf."""
    real = torch.view_as_real(leaf.resolve_conj().resolve_neg()) if leaf.is_complex() else leaf
    if real.dtype.itemsize == 1:
        real = real.to(torch.float32)
    norm: Tensor = torch.linalg.vector_norm(real, dtype=torch.float64)
    return norm


def _finite(stage: str, option: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{stage}({option}): expected a finite number, got {value!r}")
    return float(value)


def _positive(stage: str, option: str, value: float) -> float:
    if _finite(stage, option, value) <= 0:
        raise ValueError(f"{stage}({option}): expected a positive number, got {value!r}")
    return float(value)
