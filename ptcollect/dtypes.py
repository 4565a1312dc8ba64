"""Which dtype a leaf is summed in, and how it gets in and out of the flat tensor that reducers work on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors  # one call for many leaves

from ptcollect.errors import PipelineError

_ACCUMULATION = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.uint8: torch.int64,
    torch.int8: torch.int64,
    torch.int16: torch.int64,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.complex32: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the numbers in a tensor: complex64 holds float32s; every other dtype holds itself."""
    return _REAL.get(dtype, dtype)


def accumulation_dtype(dtype: torch.dtype, path: str) -> torch.dtype:
    """The dtype in which leaves of `dtype` are summed: float32 at least, int64 for integers, real for complex.

    Raises:
        PipelineError: `dtype` has no mean (bool, uint64, packed types).
    """
    try:
        return _ACCUMULATION[dtype]
    except KeyError:
        raise PipelineError(
            f"leaf {path!r} has dtype {dtype}, which has no mean; convert it first, for example leaf.to(torch.float32)"
        ) from None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of at least float32's precision in which values of a floating or complex `dtype` are kept exactly."""
    return torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32


def flat_view(leaf: Tensor) -> Tensor | None:
    """`leaf` as one row of real numbers over the same storage, or None where only a copy could be that."""
    if not leaf.is_contiguous() or leaf.is_conj() or leaf.is_neg():
        return None
    real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    return real.reshape(-1)


def flat_copy(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """A fresh row of real numbers in `dtype` with `leaf`'s values in row-major order."""
    plain = leaf.resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = torch.empty(real.numel(), dtype=dtype, device=leaf.device)
    flat.view(real.shape).copy_(real)
    return flat


def joined_flat(leaves: list[Tensor]) -> Tensor:
    """The values of `leaves`, all of one dtype, as one flat tensor of real numbers in storage of its own."""
    if leaves[0].is_complex():
        return torch.cat([torch.view_as_real(leaf.resolve_conj()).reshape(-1) for leaf in leaves])
    flat: Tensor = _flatten_dense_tensors(leaves)  # type: ignore[no-untyped-call]
    return flat.clone() if len(leaves) == 1 else flat  # a single tensor comes back as a view


def split_flat(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """`flat`, made by `joined_flat`, as tensors of `like`'s shapes, dtypes and strides; views where they can be."""
    if like[0].is_complex():
        rows = torch.split(flat, [flat_numel(leaf) for leaf in like])
        return [from_flat(row, leaf) for row, leaf in zip(rows, like, strict=True)]
    shaped = _unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
    return [v if leaf.is_contiguous() else with_strides(v, leaf) for v, leaf in zip(shaped, like, strict=True)]


def flat_numel(leaf: Tensor) -> int:
    """How many real numbers `leaf` holds: twice its elements where it is complex."""
    return leaf.numel() * (2 if leaf.is_complex() else 1)


def from_flat(flat: Tensor, like: Tensor) -> Tensor:
    """`flat` (row-major real numbers) as a tensor of `like`'s shape, dtype and strides; shares storage where it can."""
    if flat.dtype == like.dtype and like.is_contiguous():
        return flat.view(like.shape)
    if flat.dtype != real_dtype(like.dtype):
        flat = flat.to(real_dtype(like.dtype))
    shaped = torch.view_as_complex(flat.view(*like.shape, 2)) if like.is_complex() else flat.view(like.shape)
    return restrided(shaped, like)


def restrided(value: Tensor, like: Tensor) -> Tensor:
    """`value` with the strides of `like`, copied only if it has others."""
    return value if value.stride() == like.stride() else with_strides(value, like)


def overwrite(leaf: Tensor, result: Tensor) -> Tensor:
    """Write `result`, of the same shape, over `leaf` and return it; a leaf that repeats memory is replaced instead."""
    if result.data_ptr() == leaf.data_ptr():
        return leaf
    return leaf.copy_(result) if _elements_are_apart(leaf) else result


def fresh_copy(leaf: Tensor) -> Tensor:
    """A copy of `leaf` in storage of its own, with its strides."""
    out = with_strides(leaf, leaf)
    return leaf.clone() if out is leaf else out


def with_strides(value: Tensor, like: Tensor) -> Tensor:
    """Copy `value` to fresh storage with `like`'s strides; `value` itself where separate elements cannot have them."""
    if value.numel() <= 1 or not _may_repeat(like):
        out = torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device)
        return out.copy_(value) if _elements_are_apart(like) else value
    if value.is_meta:
        return torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device)
    # An expanded leaf: keep it expanded if the mean still repeats (it does unless another rank's leaf did not).
    once = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in like.stride())]
    if torch.equal(once.expand_as(value), value):
        return with_strides(once, like[tuple(slice(0, 1) if s == 0 else slice(None) for s in like.stride())]).expand_as(
            value
        )
    return value


def _may_repeat(like: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(like.stride(), like.shape, strict=True))


def _elements_are_apart(like: Tensor) -> bool:
    """Whether no two elements of `like` share memory, judged from strides alone (a window over itself is not)."""
    extent = 1
    for stride, size in sorted(zip(like.stride(), like.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return False
            extent = stride * (size - 1) + extent
    return True
