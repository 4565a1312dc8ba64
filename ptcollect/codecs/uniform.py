"""Uniform quantisation in blocks: int8, int4 and fp8 with one scale per block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ptcollect.codecs.bits import pack, unpack
from ptcollect.codecs.blocks import Grouped
from ptcollect.codecs.codec import BLOCK, STEP, Codec, Key, parts, random_fractions
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


class _Scaled(Grouped):
    """A packet is the scales of all blocks, as float32, then one code per element, in pieces of about `BLOCK`."""

    block: int
    levels: float
    """The largest code."""
    unit: ClassVar[float] = 1.0
    """What the numbers that `read` gives must be multiplied by."""
    draws: bool = False
    """Whether codes are rounded at random."""

    def wire_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + self.code_bytes(numel)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes alone."""
        return numel

    # Encode.

    def encode(self, x: Tensor, key: Key) -> Tensor:
        packet = torch.empty(self.wire_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        if x.numel() and not self._encode_ordinary(x, packet):
            self._encode_any(x, packet, key)
        return packet

    def _encode_ordinary(self, x: Tensor, packet: Tensor) -> bool:
        """Fill `packet` if no number of `x` needs care; else return False. The same bits as by `_encode_any`.

        Each group of blocks is read from memory once, by what finds its scales, and divided while it lies in a cache.
        """
        if self.draws or x.dtype not in _MAGIC:
            return False
        numel = x.numel()
        groups = self._groups(x, STEP)
        scales, places = self._parts(packet, numel, STEP)
        room, ends = torch.empty_like(groups[0]), x.new_empty(3, len(groups[0]))  # no group is longer than the first
        done = 0
        for group, place in zip(groups, places, strict=True):
            count = len(group)
            if count < len(room):
                room, ends = room[:count], ends[:, :count]
            both, (high, low, largest) = ends[:2], ends.unbind(0)
            # Not abs and its amax, which would write all numbers down; nor vector_norm, 50 times as slow with a dim.
            torch.amax(group, 1, out=high)
            torch.amin(group, 1, out=low)
            torch.amax(both.abs_(), 0, out=largest)
            scale = torch.div(largest, self.levels, out=scales[done : done + count])
            largest.copy_(scale).clamp_(min=_LEAST)  # blocks of zeros stay zeros
            codes = self.divide(group, largest.unsqueeze(1), room).view(-1)
            done += count
            self.write(place, codes if done * group.shape[1] <= numel else codes[: numel - done * group.shape[1]])
        least, most = map(float, scales.aminmax())
        if least == 0:
            least, most = map(float, torch.where(scales == 0, 1.0, scales).aminmax())
        return least >= _LEAST and most <= _MOST  # NaN is neither

    def _encode_any(self, x: Tensor, packet: Tensor, key: Key) -> None:
        """Fill `packet`, whatever `x` is."""
        groups = self._groups(x, BLOCK)
        scales, places = self._parts(packet, x.numel(), BLOCK)
        whole = torch.empty_like(groups[0])
        rooms = [whole] * (len(groups) - 1) + [whole[: len(groups[-1])]]
        # All scales first, then all codes: what is done once per block is then done in a few calls in all.
        largest = x.new_empty(len(scales))
        rows = [len(group) for group in groups]
        for group, room, row in zip(groups, rooms, torch.split(largest, rows), strict=True):
            torch.amax(torch.abs(group, out=room), 1, out=row)
        # In float32: a scale that is smaller than its smallest number becomes 0, and the block with it.
        scale = self._scale(largest)
        scales.copy_(scale)
        divisor = torch.where(scale == 0, torch.inf, scale).to(x.dtype).unsqueeze(1)
        # Scales this small or large are rounded by more than a code.
        extreme = bool(((largest < 1e-30) & (largest > 0) | (largest > 1e38)).any())
        quantise = self.quantiser(key, x.device)
        rest = x.numel() - (len(groups) - 1) * whole.numel()
        flat = [whole.view(-1)] * (len(groups) - 1) + [whole.view(-1)[:rest]]
        for group, room, codes, by, place in zip(groups, rooms, flat, torch.split(divisor, rows), places, strict=True):
            torch.div(group, by, out=room)
            if extreme:
                room.clamp_(-self.levels, self.levels)
            quantise(room)
            self.write(place, codes)

    def _scale(self, largest: Tensor) -> Tensor:
        """Scales for blocks with these largest magnitudes; rounded so that no code times its scale overflows."""
        scale = (largest / self.levels).to(torch.float32)
        most = torch.finfo(torch.float32).max / self.levels * (1 - 2**-23)
        return torch.where(torch.isfinite(largest), scale.clamp(max=most), scale)

    # Decode.

    def split(self, row: Tensor) -> Sequence[Tensor]:
        return self._split(row, STEP)

    def fill(self, rooms: Sequence[Tensor], packet: Tensor, like: Tensor, alpha: float) -> Iterator[Tensor]:
        block = self._width(like.numel())
        packed, codes = self._parts(packet, like.numel(), STEP)
        scales = packed.to(like.dtype).unsqueeze(1)
        if alpha * self.unit != 1:
            scales = scales * (alpha * self.unit)
        done = 0
        for room, place in zip(rooms, codes, strict=True):
            count = -(-len(room) // block)
            numbers, scale = self.read(place, len(room)), scales[done : done + count]
            done += count
            if len(room) % block:
                room.copy_(_padded(numbers.to(room.dtype), block).mul_(scale).view(-1)[: len(room)])
            else:
                room.copy_(numbers).view(count, block).mul_(scale)
            yield room

    # Groups: as many whole pieces as are worked on at a time, then what is left.

    def _width(self, numel: int) -> int:
        """Elements per row while working: no row is longer than the tensor."""
        return min(self.block, max(1, numel))

    def _sizes(self, numel: int, step: int) -> tuple[int, int]:
        """Numbers in a group of about `step`, and, of `numel`, in all whole pieces."""
        piece = _step(self._width(numel)) * self._width(numel)
        return max(1, step // piece) * piece, numel // piece * piece

    def _split(self, row: Tensor, step: int) -> Sequence[Tensor]:
        """A flat tensor in groups of about `step`."""
        return parts(row, *self._sizes(row.numel(), step))

    def _groups(self, x: Tensor, step: int) -> list[Tensor]:
        """The same as matrices with a block in each row, the last row filled up with zeros."""
        return [_padded(part, self._width(x.numel())) for part in self._split(x, step)]

    def _parts(self, packet: Tensor, numel: int, step: int) -> tuple[Tensor, Sequence[Tensor]]:
        """The scales in a packet of `numel` numbers, and the codes of each group."""
        group, whole = self._sizes(numel, step)
        head = 4 * -(-numel // self.block)
        ends = self.code_bytes(whole) if whole < numel else None
        return packet[:head].view(torch.float32), parts(packet[head:], self.code_bytes(group), ends)

    # What a codec of this kind says about its codes.

    def divide(self, group: Tensor, divisor: Tensor, room: Tensor) -> Tensor:
        """Ordinary numbers by their scales, in `room`, rounded as far as `write` does not."""
        return torch.div(group, divisor, out=room)

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

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Only where it is stochastic."""
        return self.stochastic

    def divide(self, group: Tensor, divisor: Tensor, room: Tensor) -> Tensor:
        # 1.5 * 2**23 plus a small number is that number rounded, halves to even, in the lowest bits of a float32.
        large = _large(room.shape[1], room.dtype, room.device)
        return torch.addcdiv(large.expand_as(room), group, divisor, out=room).view(_MAGIC[room.dtype][1])

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
        place.copy_(pack(codes.to(torch.int8), 4, row=self._piece))

    def read(self, place: Tensor, count: int) -> Tensor:
        return unpack(place, 4, count, row=self._piece)

    @property
    def _piece(self) -> int:
        return _step(self.block) * self.block


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


# By dtype: 1.5 times the power of two from which on it holds whole numbers only, and the integers of its size.
_MAGIC = {torch.float32: (1.5 * 2.0**23, torch.int32), torch.float64: (1.5 * 2.0**52, torch.int64)}

# Scales between these are ordinary: codes times them neither overflow nor are rounded by more than half a code.
_LEAST, _MOST = 1e-36, 1e35


@functools.lru_cache(maxsize=32)
def _large(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A whole row of the number that rounds, since a sum with a single one would not be vectorised."""
    return torch.full((1, width), _MAGIC[dtype][0], dtype=dtype, device=device)


def _step(block: int) -> int:
    """How many blocks are in a piece: even, so that nibbles pair up."""
    return max(2, BLOCK // block // 2 * 2)


def _padded(row: Tensor, block: int) -> Tensor:
    """`row` as a matrix with `block` columns, the last row filled up with zeros."""
    short = -row.numel() % block
    return (torch.nn.functional.pad(row, (0, short)) if short else row).view(-1, block)
