"""Packing of narrow codes: 1, 2 and 4 bits to a byte, without a pass per bit."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int, *, row: int | None = None) -> Tensor:
    """The lowest `bits` of a flat int8 tensor of codes, as ceil(n * bits / 8) bytes; overwrites `codes`.

    The row is cut into 8 / bits equal parts, filled up with zeros, and byte i holds number i of each, the first part's
    in the lowest bits: whole parts at a time cost a few passes, where neighbours in one byte would need one per number.
    Longer ones are packed in rows of `row` codes, of which there are whole ones only.
    """
    parts = 8 // bits
    rows = codes.numel() // row if row is not None and codes.numel() > row else 1
    short = -(codes.numel() // rows) % parts
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    first, *others = codes.view(rows, parts, -1).unbind(1)
    packed = first.bitwise_and((1 << bits) - 1)
    for place, part in enumerate(others, 1):
        part = part if place == parts - 1 else part.bitwise_and_((1 << bits) - 1)  # the last one's others fall off
        packed.add_(part, alpha=1 << place * bits)
    return packed.view(torch.uint8).view(-1)


def pack_marks(marks: Tensor, place: Tensor) -> None:
    """Rows of floating zeros and ones, each packed as `pack` does with 1 bit, into the bytes of `place`."""
    rows, numel = marks.shape
    if numel % 8:
        marks = torch.nn.functional.pad(marks, (0, -numel % 8))
    values = _mark_places(marks.dtype, marks.device).expand(rows, 1, 8)
    # Exact: whole numbers from -128 to 127. As int8, since conversions to uint8 are not vectorised.
    place.view(torch.int8).copy_(torch.bmm(values, marks.view(rows, 8, -1)).view(-1))


def unpack(packed: Tensor, bits: int, numel: int, *, row: int | None = None) -> Tensor:
    """What `pack` packed, as int8, with the highest bit of each code as its sign: 4 bits are numbers from -8 to 7."""
    rows = numel // row if row is not None and numel > row else 1
    # Shifted to the top by a multiplication, and down by an arithmetic shift, which carries the sign.
    top = packed.view(torch.int8).view(rows, 1, -1) * _shifts(bits, packed.device)
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
