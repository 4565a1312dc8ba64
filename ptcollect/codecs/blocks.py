"""Codecs that work through a packet in groups of blocks: decoded a group at a time, in memory that stays in cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ptcollect.codecs.bits import unpack
from ptcollect.codecs.codec import STEP, Codec, book_block, parts


class Grouped(Codec):
    """A codec whose packets are decoded in groups: `split` says which, `fill` decodes them."""

    def split(self, row: Tensor) -> Sequence[Tensor]:
        """A flat tensor in the groups that `fill` decodes; none is longer than the first."""
        raise NotImplementedError

    def fill(self, rooms: Sequence[Tensor], packet: Tensor, like: Tensor, alpha: float) -> Iterator[Tensor]:
        """`alpha` times the numbers in `packet`, as many as in `like`: one group after the other, each in its room."""
        raise NotImplementedError

    def decode(self, packet: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(numel, dtype=dtype, device=packet.device)
        self.accumulate(packet, out, 0.0, 1.0)
        return out

    def accumulate(self, packet: Tensor, into: Tensor, keep: float, alpha: float) -> None:
        places = self.split(into)
        decoded = self.fill(places if keep == 0 else _rooms(places), packet, into, alpha)
        for place, values in zip(places, decoded, strict=True):
            if keep != 0:
                (place if keep == 1 else place.mul_(keep)).add_(values)

    def book(self, packet: Tensor, x: Tensor, into: Tensor, keep: float, alpha: float) -> None:
        places = self.split(into)
        decoded = self.fill(_rooms(places), packet, into, 1.0)
        for place, numbers, values in zip(places, self.split(x), decoded, strict=True):
            book_block(values, numbers, place, keep, alpha)


class Narrow(Grouped):
    """A packet is the scales of all blocks, as float32, then codes of a few bits, packed block by block."""

    block: int
    bits: ClassVar[int]
    unit: ClassVar[int] = 1
    """What the numbers that `read` gives must be multiplied by: 1 or -1."""

    def wire_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + -(-numel * self.bits // 8)

    def read(self, codes: Tensor, count: int) -> Tensor:
        """The `count` numbers in `codes`, as int8."""
        return unpack(codes, self.bits, count, row=self.block)

    def parts(self, packet: Tensor, numel: int) -> tuple[Tensor, Sequence[Tensor]]:
        """The scales in a packet of `numel` numbers, and the codes of each group."""
        head, whole = 4 * -(-numel // self.block), numel // self.block * self.block
        groups = parts(packet[head:], self._group * self.bits // 8, whole * self.bits // 8 if whole < numel else None)
        return packet[:head].view(torch.float32), groups

    def split(self, row: Tensor) -> Sequence[Tensor]:
        return parts(row, self._group, row.numel() // self.block * self.block)

    @property
    def _group(self) -> int:
        """Numbers in as many whole blocks as are worked on at a time."""
        return max(1, STEP // self.block) * self.block

    def fill(self, rooms: Sequence[Tensor], packet: Tensor, like: Tensor, alpha: float) -> Iterator[Tensor]:
        scales, codes = self.parts(packet, like.numel())
        # In float64 and then rounded: what a tensor times the float ``alpha * scale`` would be.
        factors = scales.to(like.dtype) if alpha == 1 else scales.double().mul_(alpha).to(like.dtype)
        factors = (factors.neg() if self.unit < 0 else factors).unsqueeze(1)
        done = 0
        for room, place in zip(rooms, codes, strict=True):
            count = -(-len(room) // self.block)
            room.copy_(self.read(place, len(room))).view(count, -1).mul_(factors[done : done + count])
            done += count
            yield room


def _rooms(places: Sequence[Tensor]) -> Sequence[Tensor]:
    """One room, as long as each of `places` in turn; the first of those is the longest."""
    if not places:
        return ()
    room = torch.empty_like(places[0])
    return [room if len(place) == len(room) else room[: len(place)] for place in places]
