"""Sparse codecs: a fraction of the elements, the largest (topk) or random ones (randk)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptcollect.codecs.cast import Cast
from ptcollect.codecs.codec import STEP, Codec, Key

_FULL = Cast(torch.float32)


def topk(ratio: float = 0.01, *, values: str | Codec | None = None) -> Codec:
    r"""The `ratio` of elements with the largest magnitudes, with their positions; ties to the lowest index.

    .. math::
        C(x) = x_S, \qquad S = \text{argtop}_k |x|, \qquad k = \max(1, \lfloor \text{ratio} \cdot d + \tfrac12 \rfloor)

    so that :math:`\|C(x) - x\|^2 \le (1 - k/d) \|x\|^2`. Positions take 1, 2 or 4 bytes, by the number of elements. Use
    it with `error_feedback`; what is summed from n ranks is up to n times as dense, so that `ring_reduce` drops again
    at each hop.

    Args:
        ratio: fraction of the elements, above 0 and at most 1.
        values: a codec, or its name, for the values sent; None: float32.

    Returns:
        A codec for `compress`; also known as ``"topk"``, with 1 %.

    Raises:
        ValueError: `ratio` is out of range.

    Source: Stich, Cordonnier and Jaggi 2018, Sparsified SGD with memory, section 2; Lin et al. 2018, Deep gradient
    compression.

    >>> import torch, ptcollect as pc
    >>> codec = pc.codecs.topk(0.5)
    >>> packet = codec.encode(torch.tensor([1.0, -3.0, 2.0, 0.0]), pc.codecs.Key(0, "w", 0, 0))
    >>> codec.decode(packet, 4, torch.float32), codec.wire_bytes(4)
    (tensor([ 0., -3.,  2.,  0.]), 10)
    """
    return _TopK(_ratio("topk", ratio), _value_codec(values))


def randk(ratio: float = 0.01, *, values: str | Codec | None = None, unbiased: bool = False, seed: int = 0) -> Codec:
    r"""A random ratio of the elements; the positions are drawn from the key, and only 8 bytes of seed travel.

    .. math:: C(x)_i = \begin{cases} c \, x_i & i \in S \\ 0 & \text{otherwise} \end{cases}

    for a uniformly random S of k elements, with c = 1, for use with `error_feedback`; or c = d/k with `unbiased`, whose
    variance is :math:`(d/k - 1) x_i^2` per element.

    Args:
        ratio: fraction of the elements, above 0 and at most 1; k as for `topk`.
        values: a codec, or its name, for the values sent; None: float32.
        unbiased: scale up by d/k; not for error feedback.
        seed: of the generators.

    Returns:
        A codec for `compress`; also known as ``"randk"``, with 1 %.

    Raises:
        ValueError: `ratio` is out of range.

    Source: Stich, Cordonnier and Jaggi 2018, Sparsified SGD with memory, section 2.

    >>> import torch, ptcollect as pc
    >>> codec = pc.codecs.randk(0.5)
    >>> packet = codec.encode(torch.ones(4), pc.codecs.Key(0, "w", 0, 0))
    >>> codec.decode(packet, 4, torch.float32).sum(), codec.wire_bytes(4)
    (tensor(2.), 16)
    """
    return _RandK(_ratio("randk", ratio), _value_codec(values), unbiased, seed)


class _Sparse(Codec):
    """A packet is something that tells the positions, then the values there."""

    ratio: float
    values: Codec

    def _show(self, field: str, value: Any) -> str:
        plain = field == "values" and repr(value) == f"{value.name}()"
        return f'"{value.name}"' if plain else super()._show(field, value)

    def kept(self, numel: int) -> int:
        """How many of `numel` elements travel."""
        return min(numel, max(1, int(self.ratio * numel + 0.5)))

    def head_bytes(self, numel: int) -> int:
        """Bytes before the values."""
        raise NotImplementedError

    def positions(self, head: Tensor, numel: int) -> Tensor:
        """The positions that `head` stands for, as int64."""
        raise NotImplementedError

    def wire_bytes(self, numel: int) -> int:
        return self.head_bytes(numel) + self.values.wire_bytes(self.kept(numel))

    def packet(self, head: Tensor, values: Tensor, key: Key) -> Tensor:
        """`head` and the encoded `values`, one after the other."""
        return torch.cat([head, self.values.encode(values, key)])

    def decode(self, packet: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(numel, dtype=dtype, device=packet.device)
        self.accumulate(packet, out, 1.0, 1.0)
        return out

    def accumulate(self, packet: Tensor, into: Tensor, keep: float, alpha: float) -> None:
        numel = into.numel()
        head = self.head_bytes(numel)
        # A copy, since values need not start at a multiple of their size.
        values = self.values.decode(packet[head:].clone(), self.kept(numel), into.dtype)
        if keep == 0:
            into.zero_()
        elif keep != 1:
            into.mul_(keep)
        into.index_add_(0, self.positions(packet[:head], numel), values, alpha=alpha)


@dataclass(frozen=True, repr=False)
class _TopK(_Sparse):
    name = "topk"
    ratio: float = 0.01
    values: Codec = _FULL

    def head_bytes(self, numel: int) -> int:
        return self.kept(numel) * _width(numel).itemsize

    def encode(self, x: Tensor, key: Key) -> Tensor:
        where = largest(x, self.kept(x.numel()))
        # uint16 and uint32 have few operations; int16 and int32 of the same bits do as well on the wire.
        head = where.to(_width(x.numel())).view(torch.uint8)
        return self.packet(head, x.index_select(0, where), key)

    def positions(self, head: Tensor, numel: int) -> Tensor:
        width = _width(numel)
        where = head.clone().view(width).long()
        return where & 0xFFFF if width is torch.int16 else where


@dataclass(frozen=True, repr=False)
class _RandK(_Sparse):
    name = "randk"
    ratio: float = 0.01
    values: Codec = _FULL
    unbiased: bool = False
    seed: int = 0

    def head_bytes(self, numel: int) -> int:
        return 8 if numel else 0

    def encode(self, x: Tensor, key: Key) -> Tensor:
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8, device=x.device)
        drawn = key.generator(self.seed, torch.device("cpu")).initial_seed()
        head = torch.tensor([drawn], dtype=torch.int64, device=x.device).view(torch.uint8)
        values = x[self.positions(head, x.numel())]
        return self.packet(head, values * (x.numel() / values.numel()) if self.unbiased else values, key)

    def positions(self, head: Tensor, numel: int) -> Tensor:
        if not numel:
            return torch.empty(0, dtype=torch.int64, device=head.device)
        # Drawn on the CPU whatever the device, so that both sides draw the same.
        generator = torch.Generator().manual_seed(int(head.clone().view(torch.int64)))
        return _drawn(numel, self.kept(numel), generator).to(head.device)


def largest(x: Tensor, k: int) -> Tensor:
    """Positions of the `k` numbers of `x` with the largest magnitudes, ascending; of equal ones, those that come first.

    A threshold from a sample leaves few candidates; whatever the sample, the answer is exact.
    """
    numel = x.numel()
    if k >= numel:
        return torch.arange(numel, device=x.device)
    for deviations in (3, 12):
        candidates = _reaching(x, _threshold(x, k, deviations))
        if candidates.numel() >= k:
            break  # else the sample was misleading
    else:
        candidates = torch.arange(numel, device=x.device)
    size = x.index_select(0, candidates).abs_()
    if bool(size.sum().isnan()):  # NaN counts as the largest, and only sorting finds a place for it
        order = torch.sort(size, descending=True, stable=True).indices
        return candidates[order[:k]].sort().values
    least = size.topk(size.numel() - k + 1, largest=False, sorted=False).values.amax()
    keep = size > least
    ties = torch.nonzero(size == least).view(-1)
    keep[ties[: k - int(keep.sum())]] = True
    return candidates.index_select(0, keep.nonzero().view(-1))


def _threshold(x: Tensor, k: int, deviations: int) -> Tensor:
    """A magnitude that more than `k` numbers very probably reach, by so many standard deviations, and not many more."""
    step = max(1, x.numel() // 65536)
    sample = x[::step].abs()
    share = k * sample.numel() / x.numel()
    most = min(sample.numel(), int(share + deviations * share**0.5) + 4)
    return sample.topk(most, sorted=False).values.amin()


def _reaching(x: Tensor, least: Tensor) -> Tensor:
    """Positions of the numbers whose magnitude is `least` or more, or NaN, ascending."""
    numel = x.numel()
    marks = torch.empty(-(-numel // 8) * 8, dtype=torch.int8, device=x.device)
    marks[numel:] = 0
    # The bits of magnitudes are ordered as the magnitudes are, and those of NaN come last. Comparisons that give
    # numbers are vectorised; those that give bools are not.
    whole = torch.int32 if x.dtype == torch.float32 else torch.int64
    bits = int(least.view(whole))
    room = x.new_empty(min(numel, STEP))
    for part, place in zip(torch.split(x, STEP), torch.split(marks[:numel], STEP), strict=True):
        size = torch.abs(part, out=room[: len(part)]).view(whole)
        place.copy_(torch.ge(size, bits, out=size))
    # First the eights of marks that are not all 0, then the marks in those.
    eights = marks.view(torch.int64)
    some = eights.nonzero().view(-1)
    hits = eights.index_select(0, some).view(torch.int8).nonzero().view(-1)
    return some.index_select(0, hits >> 3).mul_(8).add_(hits & 7)


def _drawn(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """`k` different positions below `numel`, every choice of them equally likely."""
    if 4 * k > numel:
        return torch.randperm(numel, generator=generator)[:k]
    # The first k different ones of a row of independent draws; without the permutation of all numbers.
    draws = torch.empty(0, dtype=torch.int64)
    while True:
        draws = torch.cat([draws, torch.randint(numel, (k + k * k // numel + 16,), generator=generator)])
        values, order = draws.sort(stable=True)
        new = torch.ones(len(draws), dtype=torch.bool)
        torch.ne(values[1:], values[:-1], out=new[1:])
        if int(new.sum()) >= k:
            return draws[order[new].sort().values[:k]]


def _width(numel: int) -> torch.dtype:
    return torch.uint8 if numel <= 1 << 8 else torch.int16 if numel <= 1 << 16 else torch.int32


def _ratio(name: str, ratio: Any) -> float:
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise ValueError(f"{name}(ratio): expected a fraction above 0 and at most 1, got {ratio!r}")
    return float(ratio)


def _value_codec(values: str | Codec | None) -> Codec:
    from ptcollect.codecs import by_name  # the registry imports this file

    codec = by_name(values) if isinstance(values, str) else values
    if codec is not None and not isinstance(codec, Codec):
        raise TypeError(f"values: expected a codec or its name, got {codec!r}")
    return _FULL if codec is None else codec
