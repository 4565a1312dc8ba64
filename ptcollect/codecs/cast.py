"""Codecs that send numbers in another float dtype: bf16, fp16, and each leaf's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ptcollect.codecs.codec import Codec, Key, accumulate, book


@dataclass(frozen=True, repr=False)
class Cast(Codec):
    """Numbers rounded to `dtype`, to nearest even; `dtype` equal to the accumulation dtype costs nothing."""

    dtype: torch.dtype

    @property
    def sum_dtype(self) -> torch.dtype:  # type: ignore[override]
        """Cast packets are numbers: native collectives may sum them."""
        return self.dtype

    def wire_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, x: Tensor, key: Key) -> Tensor:
        return x.to(self.dtype).view(torch.uint8)

    def decode(self, packet: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return packet.view(self.dtype).to(dtype)

    def accumulate(self, packet: Tensor, into: Tensor, keep: float, alpha: float) -> None:
        accumulate(packet.view(self.dtype), into, keep, alpha)

    def book(self, packet: Tensor, x: Tensor, into: Tensor, keep: float, alpha: float) -> None:
        book(packet.view(self.dtype), x, into, keep, alpha)


@dataclass(frozen=True, repr=False)
class _Bf16(Cast):
    name = "bf16"
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, repr=False)
class _Fp16(Cast):
    name = "fp16"
    dtype: torch.dtype = torch.float16


def bf16() -> Codec:
    r"""bfloat16: 2 bytes per element, 8 bits of precision, the range of float32.

    .. math:: |C(x) - x| \le 2^{-9} |x|

    Returns:
        A codec for `compress`; also known as ``"bf16"``.

    >>> import ptcollect as pc
    >>> pc.codecs.bf16().wire_bytes(3)
    6
    """
    return _Bf16()


def fp16() -> Codec:
    r"""IEEE half precision: 2 bytes per element, 11 bits of precision, overflows to inf beyond 65504.

    .. math:: |C(x) - x| \le 2^{-11} |x| \quad\text{for } 2^{-14} \le |x| \le 65504

    Returns:
        A codec for `compress`; also known as ``"fp16"``.

    >>> import ptcollect as pc
    >>> pc.codecs.fp16().wire_bytes(3)
    6
    """
    return _Fp16()
