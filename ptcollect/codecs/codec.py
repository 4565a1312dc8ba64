"""The extension point for codecs: what a row of numbers becomes on the wire."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ptcollect.value import Value

BLOCK = 1 << 16  # elements in a block of the wire formats
STEP = 1 << 19  # elements worked on at a time: 2 MiB of float32 stay in a cache, and calls cost little beside it


@dataclass(frozen=True)
class Key:
    """Where one encoding happens: all that a random codec may draw its randomness from.

    >>> import torch, ptcollect as pc
    >>> key = pc.codecs.Key(step=3, path="fc.weight", rank=1, hop=0)
    >>> a, b = (torch.rand(2, generator=key.generator(0, torch.device("cpu"))) for _ in range(2))
    >>> torch.equal(a, b)
    True
    """

    step: int
    """The step counter of the state (0 for stateless pipelines)."""
    path: str
    """Dotted path of the leaf, or name of the bucket."""
    rank: int
    """Group rank of the encoder."""
    hop: int
    """How many packets this rank encoded for this leaf before in this call."""

    def generator(self, seed: int, device: torch.device) -> torch.Generator:
        """A generator of its own for this encoding; the global one is never touched."""
        text = f"{seed}/{self.step}/{self.path}/{self.rank}/{self.hop}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return torch.Generator(device).manual_seed(number)


@dataclass(frozen=True, repr=False)
class Codec(Value):
    """A codec: packs a flat row of numbers into bytes and back.

    Subclass as a frozen dataclass and write three pure methods. The law that nothing is lost holds for any codec:
    whoever encodes books ``x - decode(encode(x))`` as residual.

    >>> import torch, ptcollect as pc
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, repr=False)
    ... class halves(pc.Codec):
    ...     '''One byte per element: multiples of 1/2 from -64 to 63.5.'''
    ...
    ...     def wire_bytes(self, numel):
    ...         return numel
    ...
    ...     def encode(self, x, key):
    ...         return (x * 2).round().clamp(-128, 127).to(torch.int8).view(torch.uint8)
    ...
    ...     def decode(self, packet, numel, dtype):
    ...         return packet.view(torch.int8).to(dtype) / 2
    >>> pipeline = pc.chain(pc.compress(halves()), pc.all_to_all_avg())
    >>> pipeline
    chain(compress(halves()), all_to_all_avg())
    >>> pc.simulate(pipeline, [torch.tensor([1.0, 2.1]), torch.tensor([2.0, 2.1])]).trees[0]
    tensor([1.5000, 2.0000])
    """

    sum_dtype: ClassVar[torch.dtype | None] = None
    """The dtype in which packets may be summed as they are, for native collectives; None: they may not."""

    def wire_bytes(self, numel: int) -> int:
        """Exact size in bytes of the packet of `numel` numbers."""
        raise NotImplementedError(f"{type(self).__qualname__}.wire_bytes")

    def encode(self, x: Tensor, key: Key) -> Tensor:
        """Pack `x`, flat and in the accumulation dtype, into a uint8 tensor of ``wire_bytes`` elements."""
        raise NotImplementedError(f"{type(self).__qualname__}.encode")

    def decode(self, packet: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Unpack into a flat tensor of `numel` elements in `dtype`; may share the packet's storage."""
        raise NotImplementedError(f"{type(self).__qualname__}.decode")

    def accumulate(self, packet: Tensor, into: Tensor, keep: float, alpha: float) -> None:
        """``into = keep * into + alpha * decode(packet)``; override where that needs no whole decoded row.

        With `keep` 0 whatever is in `into` is overwritten, NaN too.
        """
        accumulate(self.decode(packet, into.numel(), into.dtype), into, keep, alpha)

    def book(self, packet: Tensor, x: Tensor, into: Tensor, keep: float, alpha: float) -> None:
        """``into = keep * into + alpha * (x - decode(packet))``, with `keep` 0 or 1.

        Override where that needs no whole row of differences.
        """
        lost = into.copy_(x) if keep == 0 else x.clone()
        self.accumulate(packet, lost, 1.0, -1.0)
        _booked(lost, into, keep, alpha)


def accumulate(numbers: Tensor, into: Tensor, keep: float, alpha: float) -> None:
    """``into = keep * into + alpha * numbers`` in blocks that stay in cache, so that memory is passed over once."""
    if keep == alpha == 1 and numbers.dtype == into.dtype:
        into.add_(numbers)
        return
    if keep == 0:
        into.copy_(numbers)
        if alpha != 1:
            into.mul_(alpha)
        return
    # Mixed dtypes make torch convert the operand first; here that copy is small, and into the same place each time.
    room = None if numbers.dtype == into.dtype else into.new_empty(min(into.numel(), STEP))
    for block, part in zip(parts(into, STEP), parts(numbers, STEP), strict=True):
        if keep != 1:
            block.mul_(keep)
        same = part if room is None else room[: len(part)].copy_(part)
        block.add_(same, alpha=alpha if alpha != 1 else 1)  # ints: no float


def book(numbers: Tensor, x: Tensor, into: Tensor, keep: float, alpha: float) -> None:
    """``into = keep * into + alpha * (x - numbers)`` in blocks that stay in cache."""
    room = x.new_empty(min(x.numel(), STEP))
    for part, given, place in zip(parts(numbers, STEP), parts(x, STEP), parts(into, STEP), strict=True):
        book_block(room[: len(part)].copy_(part), given, place, keep, alpha)


def book_block(decoded: Tensor, x: Tensor, into: Tensor, keep: float, alpha: float) -> None:
    """``into = keep * into + alpha * (x - decoded)``, with `keep` 0 or 1; overwrites `decoded`."""
    _booked(torch.sub(x, decoded, out=into if keep == 0 else decoded), into, keep, alpha)


def _booked(lost: Tensor, into: Tensor, keep: float, alpha: float) -> None:
    if keep != 0:
        into.add_(lost, alpha=alpha)
    elif alpha != 1:
        into.mul_(alpha)  # it is `lost` itself


def parts(row: Tensor, size: int, whole: int | None = None) -> Sequence[Tensor]:
    """A flat tensor in parts of `size` and what is left; or only its first `whole` numbers, and what is left of it."""
    numel = row.numel()
    if whole is None or whole == numel:
        return torch.split(row, size) if numel > size else (row,) if numel else ()
    return (*torch.split(row[:whole], size), row[whole:]) if whole else (row,)


def total(numbers: Tensor) -> Tensor:
    """The sum of a flat tensor, in an order that does not depend on the number of threads, as ``sum()`` does."""
    return totals(numbers.unsqueeze(0))[0]


def totals(rows: Tensor) -> Tensor:
    """The `total` of each row."""
    while rows.shape[1] > 256:
        short = -rows.shape[1] % 256
        whole = torch.nn.functional.pad(rows, (0, short)) if short else rows
        rows = whole.reshape(-1, 256).sum(1).view(len(rows), -1)
    return rows.sum(1)


def mean_magnitude(size: Tensor) -> Tensor:
    """The mean of magnitudes `size`, which does not overflow where they do not; not finite if some of them is not."""
    mean = total(size) / size.numel()
    if bool(torch.isfinite(mean)):
        return mean
    largest = size.amax()
    return total(size / largest) / size.numel() * largest


def random_fractions(like: Tensor, generator: torch.Generator) -> Tensor:
    """Odd multiples of 2**-17 between 0 and 1, at random, in the shape and dtype of `like`.

    Four numbers to one draw of 64 bits take a fifth of the time of `torch.rand`.
    """
    numel = like.numel()
    draws = torch.empty(-(-numel // 4), dtype=torch.int64, device=like.device).random_(
        -(2**63), None, generator=generator
    )
    return draws.view(torch.int16)[:numel].to(like.dtype).add_(32768.5).mul_(2.0**-16).view(like.shape)
