"""One bit per element: the sign, times the mean magnitude of the block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ptcollect.codecs.bits import pack_marks
from ptcollect.codecs.blocks import Narrow
from ptcollect.codecs.codec import BLOCK, Codec, Key, mean_magnitude, totals
from ptcollect.value import whole_number


def sign(block: int = 65536) -> Codec:
    r"""1 bit per element and one float32 scale per block.

    .. math:: C(x) = \frac{\|x\|_1}{d} \, \text{sign}(x) \quad \text{in each block of } d

    so that :math:`\|C(x) - x\|^2 = (1 - \|x\|_1^2 / (d \|x\|_2^2)) \|x\|^2`. Zero counts as positive, but a block of
    zeros has scale 0 and stays zero. It loses most of the gradient in each step: use it with `error_feedback`.

    Args:
        block: elements per scale, a multiple of 8; packets are ceil(numel / 8) + 4 ceil(numel / block) bytes.

    Returns:
        A codec for `compress`; also known as ``"sign"``.

    Raises:
        ValueError: `block` is not a positive multiple of 8.

    Source: Karimireddy et al. 2019, Error feedback fixes SignSGD, section 4; Seide et al. 2014.

    >>> import torch, ptcollect as pc
    >>> codec = pc.codecs.sign()
    >>> packet = codec.encode(torch.tensor([3.0, -1.0]), pc.codecs.Key(0, "w", 0, 0))
    >>> codec.decode(packet, 2, torch.float32), codec.wire_bytes(9)
    (tensor([ 2., -2.]), 6)
    """
    whole_number("sign(block)", block, multiple_of=8)
    return _Sign(block)


@dataclass(frozen=True, repr=False)
class _Sign(Narrow):
    name = "sign"
    bits = 1
    unit = -1
    block: int = BLOCK

    def encode(self, x: Tensor, key: Key) -> Tensor:
        packet = torch.empty(self.wire_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        if not x.numel():
            return packet
        scales, codes = self.parts(packet, x.numel())
        groups = [group.view(-(-len(group) // self.block), -1) for group in self.split(x)]
        room = torch.empty_like(groups[0])
        sums = []
        for group, place in zip(groups, codes, strict=True):
            if group.shape != room.shape:
                room = room.view(-1)[: group.numel()].view(group.shape)
            sums.append(totals(torch.abs(group, out=room)))
            # Comparisons into a float tensor are vectorised; into a bool tensor they are not.
            pack_marks(torch.ge(group, 0, out=room), place)
        mean = torch.cat(sums)
        whole = x.numel() // self.block
        mean[:whole] /= self.block
        mean[whole:] /= x.numel() - whole * self.block
        if not bool(torch.isfinite(mean).all()):  # some sum may have overflowed
            mean = torch.stack([mean_magnitude(part.abs()) for part in torch.split(x, self.block)])
        scales.copy_(mean)
        return packet

    def read(self, codes: Tensor, count: int) -> Tensor:
        return super().read(codes, count).bitwise_or_(1)  # -1 where the bit is set and 1 where it is not: hence `unit`
