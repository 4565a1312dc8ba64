"""Two bits per element: minus, zero or plus one, times a scale per block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ptcollect.codecs.bits import pack
from ptcollect.codecs.blocks import Narrow
from ptcollect.codecs.codec import BLOCK, Codec, Key, mean_magnitude, random_fractions, total
from ptcollect.value import whole_number


def ternary(block: int = 65536, *, stochastic: bool = False, seed: int = 0) -> Codec:
    r"""2 bits per element and one float32 scale per block.

    .. math:: C(x)_i = s \, \text{sign}(x_i) \, [\, |x_i| > \tau \,], \qquad \tau = \tfrac{0.7}{d} \|x\|_1

    with s the mean magnitude of the elements above the threshold, nearly the best choice of both for Gaussian values.
    With `stochastic`, s is the maximum magnitude and element i is kept with probability :math:`|x_i| / s`: unbiased,
    with variance :math:`s |x_i| - x_i^2`.

    Args:
        block: elements per scale, a multiple of 4; packets are ceil(numel / 4) + 4 ceil(numel / block) bytes.
        stochastic: TernGrad's unbiased rounding, by a generator of its own for each packet.
        seed: of those generators.

    Returns:
        A codec for `compress`; also known as ``"ternary"``.

    Raises:
        ValueError: `block` is not a positive multiple of 4.

    Source: Li, Zhang and Liu 2016, Ternary weight networks, section 2.3; Wen et al. 2017, TernGrad, section 3.

    >>> import torch, ptcollect as pc
    >>> codec = pc.codecs.ternary()
    >>> packet = codec.encode(torch.tensor([3.0, -5.0, 0.1]), pc.codecs.Key(0, "w", 0, 0))
    >>> codec.decode(packet, 3, torch.float32), codec.wire_bytes(3)
    (tensor([ 4., -4.,  0.]), 5)
    """
    whole_number("ternary(block)", block, multiple_of=4)
    return _Ternary(block, stochastic, seed)


@dataclass(frozen=True, repr=False)
class _Ternary(Narrow):
    name = "ternary"
    bits = 2
    block: int = BLOCK
    stochastic: bool = False
    seed: int = 0

    def encode(self, x: Tensor, key: Key) -> Tensor:
        numel = x.numel()
        blocks = -(-numel // self.block)
        packet = torch.empty(self.wire_bytes(numel), dtype=torch.uint8, device=x.device)
        scales = packet[: 4 * blocks].view(torch.float32)
        generator = key.generator(self.seed, x.device) if self.stochastic else None
        for i, start in enumerate(range(0, numel, self.block)):
            part = x[start : start + self.block]
            size = part.abs()
            scales[i], keep = self._chosen(size, generator)
            packed = pack(torch.sign(part).mul_(keep).to(torch.int8), 2)
            place = 4 * blocks + start // 4
            packet[place : place + packed.numel()] = packed
        return packet

    def _chosen(self, size: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The scale of a block with magnitudes `size`, and 1 for elements that are not to become zero, 0 for others."""
        keep = torch.empty_like(size)  # numbers, since comparisons into a bool tensor are not vectorised
        if generator is not None:
            scale = size.amax()  # not finite if some element is not, and so is every element then
            return scale, torch.lt(random_fractions(size, generator).mul_(scale), size, out=keep)
        mean = mean_magnitude(size)
        torch.gt(size, 0.7 * mean, out=keep)
        count = total(keep).clamp_(min=1)
        scale = mean_magnitude(size.mul_(keep)) * (size.numel() / count)
        return torch.where(torch.isfinite(mean), scale, torch.nan), keep
