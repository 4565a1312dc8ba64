"""Packing of narrow codes: 1, 2 and 4 bits to a byte, without a pass per bit."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def pack_bits(bits: Tensor) -> Tensor:
    """A flat bool tensor as ceil(n/8) bytes, the first element in the lowest bit."""
    bytes_of_eight = _filled(bits.view(torch.uint8), 8).view(torch.int64)
    # Multiplying eight 0/1 bytes by this number moves byte i's bit to bit 56 + i: all eight meet in the top byte.
    return ((bytes_of_eight * 0x0102040810204080) >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """What `pack_bits` packed, as bool."""
    return _bit_table(packed.device)[packed.long()].view(-1)[:numel]


def pack_pairs(codes: Tensor) -> Tensor:
    """A flat uint8 tensor of codes 0 to 3 as ceil(n/4) bytes, the first code in the lowest bits."""
    four = _filled(codes, 4).view(torch.int32)
    return (four | four >> 6 | four >> 12 | four >> 18).to(torch.uint8)


def unpack_pairs(packed: Tensor, numel: int) -> Tensor:
    """What `pack_pairs` packed, as uint8."""
    wide = packed.to(torch.int32)
    four = (wide | wide << 6 | wide << 12 | wide << 18) & 0x03030303
    return four.view(torch.uint8)[:numel]


def pack_nibbles(codes: Tensor) -> Tensor:
    """A flat int8 tensor of codes -8 to 7 as ceil(n/2) bytes, the first code in the lower half."""
    two = _filled(codes.view(torch.uint8) & 0x0F, 2).view(torch.int16)
    return (two | two >> 4).to(torch.uint8)


def unpack_nibbles(packed: Tensor, numel: int) -> Tensor:
    """What `pack_nibbles` packed, as int8."""
    low = packed.view(torch.int8) << 4 >> 4  # arithmetic shifts carry the sign
    high = packed.view(torch.int8) >> 4
    return torch.stack((low, high), dim=1).view(-1)[:numel]


def _filled(codes: Tensor, multiple: int) -> Tensor:
    """`codes` with zeros appended up to a multiple of `multiple` elements."""
    short = -codes.numel() % multiple
    return torch.nn.functional.pad(codes, (0, short)) if short else codes.contiguous()


@functools.lru_cache(maxsize=8)
def _bit_table(device: torch.device) -> Tensor:
    """Row b: the eight bits of byte b, lowest first."""
    numbers = torch.arange(256, device=device).unsqueeze(1)
    return (numbers >> torch.arange(8, device=device) & 1).bool()
