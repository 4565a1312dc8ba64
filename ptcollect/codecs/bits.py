"""Packing of narrow codes: 1, 2 and 4 bits to a byte, without a pass per bit."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """A flat int8 tensor of codes from 0 to 2**bits - 1 as ceil(n * bits / 8) bytes.

    The row is cut into 8 / bits equal parts, filled up with zeros, and byte i holds number i of each, the first part's
    in the lowest bits: whole parts at a time cost a few passes, where neighbours in one byte would need one per number.
    """
    parts = 8 // bits
    short = -codes.numel() % parts
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    return (codes.view(parts, -1) * _places(bits, codes.device)).sum(0, dtype=torch.int8).view(torch.uint8)


def pack_marks(marks: Tensor, place: Tensor) -> None:
    """A flat floating tensor of zeros and ones, packed into the bytes of `place` as `pack` does with 1 bit."""
    short = -marks.numel() % 8
    if short:
        marks = torch.nn.functional.pad(marks, (0, short))
    places = _mark_places(marks.dtype, marks.device)
    # Exact: whole numbers from -128 to 127. As int8, since conversions to uint8 are not vectorised.
    place.view(torch.int8).copy_(torch.mm(places, marks.view(8, -1)).view(-1))


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """What `pack` packed, as int8, with the highest bit of each code as its sign: 4 bits are numbers from -8 to 7."""
    # Shifted to the top by a multiplication, and down by an arithmetic shift, which carries the sign.
    top = packed.view(torch.int8) * _shifts(bits, packed.device)
    return top.bitwise_right_shift_(8 - bits).view(-1)[:numel]


@functools.lru_cache(maxsize=32)
def _mark_places(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of the bits of an int8, in a row."""
    return torch.tensor([[*(1 << bit for bit in range(7)), -128]], dtype=dtype, device=device)


@functools.lru_cache(maxsize=32)
def _places(bits: int, device: torch.device) -> Tensor:
    """The values of the lowest bit of each code in a byte, as int8, in a column."""
    values = [1 << shift for shift in range(0, 8, bits)]
    return torch.tensor(values, dtype=torch.uint8, device=device).view(torch.int8).unsqueeze(1)


@functools.lru_cache(maxsize=32)
def _shifts(bits: int, device: torch.device) -> Tensor:
    """What each code of a byte must be multiplied by to stand at the top of it."""
    return _places(bits, device).flip(0)
