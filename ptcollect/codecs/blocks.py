"""Codecs that work through a packet in groups of blocks: decoded a group at a time, in memory that stays in cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ptcollect.codecs.bits import unpack
from ptcollect.codecs.codec import STEP, Codec


class Grouped(Codec):
    """A codec whose packets are decoded in groups: `split` says which, `fill` decodes them."""

    def split(self, row: Tensor) -> list[Tensor]:
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

    def book(self, packet: Tensor, x: Tensor, into: Tensor, alpha: float) -> None:
        places = self.split(into)
        decoded = self.fill(_rooms(places), packet, into, 1.0)
        for place, numbers, values in zip(places, self.split(x), decoded, strict=True):
            place.add_(torch.sub(numbers, values, out=values), alpha=alpha)


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

    def parts(self, packet: Tensor, numel: int) -> tuple[Tensor, list[Tensor]]:
        """The scales in a packet of `numel` numbers, and the codes of each group."""
        whole = numel // self.block * self.block
        head, group = 4 * -(-numel // self.block), self._group * self.bits // 8
        scales, codes, rest = packet.tensor_split([head, head + whole * self.bits // 8])
        groups = [*(torch.split(codes, group) if whole else ()), *((rest,) if whole < numel else ())]
        return scales.view(torch.float32), groups

    def split(self, row: Tensor) -> list[Tensor]:
        numel = row.numel()
        whole = numel // self.block * self.block
        return [*(torch.split(row[:whole], self._group) if whole else ()), *((row[whole:],) if whole < numel else ())]

    @property
    def _group(self) -> int:
        """Numbers in as many whole blocks as are worked on at a time."""
        return max(1, STEP // self.block) * self.block

    def fill(self, rooms: Sequence[Tensor], packet: Tensor, like: Tensor, alpha: float) -> Iterator[Tensor]:
        scales, codes = self.parts(packet, like.numel())
        factors = scales.double().mul_(self.unit * alpha).to(like.dtype).unsqueeze(1)
        rows = [-(-len(room) // self.block) for room in rooms]
        for room, place, factor in zip(rooms, codes, torch.split(factors, rows) if rows else (), strict=True):
            room.copy_(self.read(place, len(room))).view(len(factor), -1).mul_(factor)
            yield room


def _rooms(places: Sequence[Tensor]) -> list[Tensor]:
    """One room, as long as each of `places` in turn; the first of those is the longest."""
    room = torch.empty_like(places[0]) if places else None
    return [room[: len(place)] for place in places] if room is not None else []
