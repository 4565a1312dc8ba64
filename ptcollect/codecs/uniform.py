"""Uniform quantisation in blocks: int8, int4 and fp8 with one scale per block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ptcollect.codecs.bits import pack, unpack
from ptcollect.codecs.codec import BLOCK, Codec, Key, random_fractions
from ptcollect.value import whole_number


def int8(block: int = 256, *, stochastic: bool = False, seed: int = 0) -> Codec:
    r"""8 bits per element: integers from -127 to 127 times one float32 scale per block.

    .. math::
        C(x)_i = \frac{s}{127} \, \text{round}\Big(\frac{127 x_i}{s}\Big), \qquad s = \max_{j \in \text{block}} |x_j|

    so the error is at most s/254 per element. With `stochastic` the rounding is random and unbiased (QSGD with 127
    levels and the maximum norm): variance :math:`(s/127)^2 \, p (1 - p)` with p the fractional part of :math:`127 |x_i|
    / s`.

    Args:
        block: elements per scale; packets are numel + 4 ceil(numel / block) bytes.
        stochastic: round at random, unbiased, by a generator of its own for each packet.
        seed: of those generators.

    Returns:
        A codec for `compress`; also known as ``"int8"``.

    Raises:
        ValueError: `block` is not positive.

    Source: Alistarh et al. 2017, QSGD, section 3.1; Dettmers et al. 2022, 8-bit optimizers via block-wise quantization.

    >>> import torch, ptcollect as pc
    >>> codec = pc.codecs.int8()
    >>> packet = codec.encode(torch.tensor([127.0, -1.0, 0.4]), pc.codecs.Key(0, "w", 0, 0))
    >>> codec.decode(packet, 3, torch.float32), codec.wire_bytes(3)
    (tensor([127.,  -1.,   0.]), 7)
    """
    return _Int8(whole_number("int8(block)", block), stochastic, seed)


def int4(block: int = 64, *, stochastic: bool = False, seed: int = 0) -> Codec:
    r"""4 bits per element: integers from -7 to 7 times one float32 scale per block, two to the byte.

    .. math:: C(x)_i = \frac{s}{7} \, \text{round}\Big(\frac{7 x_i}{s}\Big), \qquad s = \max_{j \in \text{block}} |x_j|

    Args:
        block: elements per scale; packets are ceil(numel / 2) + 4 ceil(numel / block) bytes.
        stochastic: round at random, unbiased, as for `int8`.
        seed: of the generators.

    Returns:
        A codec for `compress`; also known as ``"int4"``.

    Raises:
        ValueError: `block` is not positive.

    Source: as for `int8`.

    >>> import torch, ptcollect as pc
    >>> codec = pc.codecs.int4()
    >>> packet = codec.encode(torch.tensor([7.0, -1.0, 0.4]), pc.codecs.Key(0, "w", 0, 0))
    >>> codec.decode(packet, 3, torch.float32), codec.wire_bytes(3)
    (tensor([ 7., -1.,  0.]), 6)
    """
    return _Int4(whole_number("int4(block)", block), stochastic, seed)


def fp8(block: int = 256) -> Codec:
    r"""8 bits per element: float8 e4m3 times one float32 scale per block, which keeps small values better than `int8`.

    .. math::
        C(x)_i = \frac{s}{448} \, \text{e4m3}\Big(\frac{448 x_i}{s}\Big), \qquad s = \max_{j \in \text{block}} |x_j|

    so the relative error is at most 1/16 down to s/28672.

    Args:
        block: elements per scale; packets are numel + 4 ceil(numel / block) bytes.

    Returns:
        A codec for `compress`; also known as ``"fp8"``.

    Raises:
        ValueError: `block` is not positive.

    Source: Micikevicius et al. 2022, FP8 formats for deep learning, section 3.

    >>> import torch, ptcollect as pc
    >>> codec = pc.codecs.fp8()
    >>> packet = codec.encode(torch.tensor([448.0, 1.0, -0.26]), pc.codecs.Key(0, "w", 0, 0))
    >>> codec.decode(packet, 3, torch.float32), codec.wire_bytes(3)
    (tensor([ 4.4800e+02,  1.0000e+00, -2.5000e-01]), 7)
    """
    return _Fp8(whole_number("fp8(block)", block))


class _Scaled(Codec):
    """A packet is the scales of all blocks, as float32, then one code per element."""

    block: int
    levels: float
    """The largest code."""
    unit: ClassVar[float] = 1.0
    """What the numbers that `read` gives must be multiplied by."""

    def wire_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + self.code_bytes(numel)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes alone."""
        return numel

    def encode(self, x: Tensor, key: Key) -> Tensor:
        numel = x.numel()
        block = self._width(numel)
        step = _step(block)
        packet = torch.empty(self.wire_bytes(numel), dtype=torch.uint8, device=x.device)
        if not numel:
            return packet
        groups = [_padded(part, block) for part in torch.split(x, step * block)]
        whole = torch.empty_like(groups[0])
        rooms = [whole] * (len(groups) - 1) + [whole[: len(groups[-1])]]
        # All scales first, then all codes: what is done once per block is then done in a few calls in all.
        largest = x.new_empty(-(-numel // self.block))
        for group, room, row in zip(groups, rooms, torch.split(largest, step), strict=True):
            # (Not by vector_norm: with dim it takes 50 times as long as abs and amax.)
            torch.amax(torch.abs(group, out=room), 1, out=row)
        # In float32: a scale that is smaller than its smallest number becomes 0, and the block with it.
        scale = self._scale(largest)
        scales, places = self._parts(packet, numel)
        scales.copy_(scale)
        divisor = torch.where(scale == 0, torch.inf, scale).to(x.dtype).unsqueeze(1)
        # Scales this small or large are rounded by more than a code.
        extreme = bool(((largest < 1e-30) & (largest > 0) | (largest > 1e38)).any())
        quantise = self.quantiser(key, x.device)
        rest = x.numel() - (len(groups) - 1) * whole.numel()  # numbers in the last group, padding left out
        flat = [whole.view(-1)] * (len(groups) - 1) + [whole.view(-1)[:rest]]
        for group, room, codes, by, place in zip(groups, rooms, flat, torch.split(divisor, step), places, strict=True):
            torch.div(group, by, out=room)
            if extreme:
                room.clamp_(-self.levels, self.levels)
            quantise(room)
            self.write(place, codes)
        return packet

    def _parts(self, packet: Tensor, numel: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The scales in a packet of `numel` numbers, and the codes of each group of blocks."""
        scales, codes = packet.tensor_split([4 * -(-numel // self.block)])
        block = self._width(numel)
        return scales.view(torch.float32), torch.split(codes, self.code_bytes(_step(block) * block))

    def _width(self, numel: int) -> int:
        """Elements per row while working: no row is longer than the tensor."""
        return min(self.block, max(1, numel))

    def _scale(self, largest: Tensor) -> Tensor:
        """Scales for blocks with these largest magnitudes; rounded so that no code times its scale overflows."""
        scale = (largest / self.levels).to(torch.float32)
        most = torch.finfo(torch.float32).max / self.levels * (1 - 2**-23)
        return torch.where(torch.isfinite(largest), scale.clamp(max=most), scale)

    def decode(self, packet: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(numel, dtype=dtype, device=packet.device)
        self.accumulate(packet, out, 0.0, 1.0)
        return out

    def accumulate(self, packet: Tensor, into: Tensor, keep: float, alpha: float) -> None:
        numel = into.numel()
        if not numel:
            return
        block = self._width(numel)
        step = _step(block)
        packed, places = self._parts(packet, numel)
        scales = packed.to(into.dtype).unsqueeze(1)
        if alpha * self.unit != 1:
            scales = scales * (alpha * self.unit)
        for part, scale, place in zip(torch.split(into, step * block), torch.split(scales, step), places, strict=True):
            codes = self.read(place, part.numel())
            if keep == 0 and part.numel() % block == 0:
                part.copy_(codes).view(-1, block).mul_(scale)
                continue
            values = _padded(codes.to(into.dtype), block).mul_(scale).view(-1)[: part.numel()]
            if keep == 0:
                part.copy_(values)
            else:
                (part if keep == 1 else part.mul_(keep)).add_(values)

    def quantiser(self, key: Key, device: torch.device) -> Callable[[Tensor], Tensor]:
        """What rounds numbers between -levels and levels, in place, to those that are codes."""
        raise NotImplementedError

    def write(self, place: Tensor, codes: Tensor) -> None:
        """Store `codes`, still as numbers, in the bytes of `place`."""
        raise NotImplementedError

    def read(self, place: Tensor, count: int) -> Tensor:
        """The `count` codes in the bytes of `place`, as numbers of some dtype."""
        raise NotImplementedError


class _Integer(_Scaled):
    stochastic: bool
    seed: int

    def quantiser(self, key: Key, device: torch.device) -> Callable[[Tensor], Tensor]:
        if not self.stochastic:
            return lambda numbers: numbers.round_()
        generator = key.generator(self.seed, device)
        return lambda numbers: (
            numbers.add_(random_fractions(numbers, generator)).floor_().clamp_(-self.levels, self.levels)
        )


@dataclass(frozen=True, repr=False)
class _Int8(_Integer):
    name = "int8"
    levels = 127.0
    block: int = 256
    stochastic: bool = False
    seed: int = 0

    def write(self, place: Tensor, codes: Tensor) -> None:
        place.view(torch.int8).copy_(codes)

    def read(self, place: Tensor, count: int) -> Tensor:
        return place.view(torch.int8)


@dataclass(frozen=True, repr=False)
class _Int4(_Integer):
    name = "int4"
    levels = 7.0
    block: int = 64
    stochastic: bool = False
    seed: int = 0

    def code_bytes(self, numel: int) -> int:
        return -(-numel // 2)

    def write(self, place: Tensor, codes: Tensor) -> None:
        place.copy_(pack(codes.to(torch.int8).bitwise_and_(15), 4))

    def read(self, place: Tensor, count: int) -> Tensor:
        return unpack(place, 4, count)


@dataclass(frozen=True, repr=False)
class _Fp8(_Scaled):
    name = "fp8"
    levels = 448.0
    unit = 256.0
    block: int = 256

    def quantiser(self, key: Key, device: torch.device) -> Callable[[Tensor], Tensor]:
        return lambda numbers: numbers  # `write` rounds

    def write(self, place: Tensor, codes: Tensor) -> None:
        place.view(torch.float8_e4m3fn).copy_(codes)

    def read(self, place: Tensor, count: int) -> Tensor:
        # torch converts float8 number by number. The same bits 7 places up are a float16 with 1/256 of the value,
        # subnormal numbers included; bit 14, a copy of the sign, is cleared.
        wide = place.view(torch.int8).to(torch.int16)
        return wide.mul_(128).bitwise_and_(~(1 << 14)).view(torch.float16)


def _step(block: int) -> int:
    """How many blocks are worked on at a time: about as much as stays in cache, and even, so that nibbles pair up."""
    return max(2, BLOCK // block // 2 * 2)


def _padded(row: Tensor, block: int) -> Tensor:
    """`row` as a matrix with `block` columns, the last row filled up with zeros."""
    short = -row.numel() % block
    return (torch.nn.functional.pad(row, (0, short)) if short else row).view(-1, block)
