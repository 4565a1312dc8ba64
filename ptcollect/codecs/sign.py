"""One bit per element: the sign, times the mean magnitude of the block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ptcollect.codecs.bits import pack_marks, unpack
from ptcollect.codecs.codec import BLOCK, Codec, Key, mean_magnitude, total
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
class _Sign(Codec):
    name = "sign"
    block: int = BLOCK

    def wire_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + -(-numel // 8)

    def encode(self, x: Tensor, key: Key) -> Tensor:
        numel = x.numel()
        packet = torch.empty(self.wire_bytes(numel), dtype=torch.uint8, device=x.device)
        if not numel:
            return packet
        parts = torch.split(x, self.block)
        scales, codes = packet.tensor_split([4 * len(parts)])
        whole = torch.empty_like(parts[0])
        rooms = [whole] * (len(parts) - 1) + [whole[: parts[-1].numel()]]
        sums = []
        for part, room, place in zip(parts, rooms, torch.split(codes, self.block // 8), strict=True):
            sums.append(total(torch.abs(part, out=room)))
            # Comparisons into a float tensor are vectorised; into a bool tensor they are not.
            pack_marks(torch.ge(part, 0, out=room), place)
        mean = torch.stack(sums)
        mean[:-1] /= self.block
        mean[-1] /= parts[-1].numel()
        if not bool(torch.isfinite(mean).all()):
            mean = torch.stack([mean_magnitude(part.abs()) for part in parts])  # some sum may have overflowed
        scales.view(torch.float32).copy_(mean)
        return packet

    def decode(self, packet: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(numel, dtype=dtype, device=packet.device)
        self.accumulate(packet, out, 0.0, 1.0)
        return out

    def accumulate(self, packet: Tensor, into: Tensor, keep: float, alpha: float) -> None:
        numel = into.numel()
        blocks = -(-numel // self.block)
        scales = packet[: 4 * blocks].view(torch.float32).tolist()
        for scale, start in zip(scales, range(0, numel, self.block), strict=True):
            part = into[start : start + self.block]
            place = 4 * blocks + start // 8
            bits = unpack(packet[place : place + -(-part.numel() // 8)], 1, part.numel())
            signs = bits.mul_(-2).sub_(1)  # from -1 and 0 to 1 and -1
            if keep == 0:
                part.copy_(signs).mul_(alpha * scale)
            else:
                (part if keep == 1 else part.mul_(keep)).add_(signs.to(into.dtype), alpha=alpha * scale)
