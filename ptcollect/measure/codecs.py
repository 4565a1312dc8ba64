"""How fast codecs pack and unpack, beside copying the same float32 numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import torch

import ptcollect as pc
from ptcollect.measure.spread import Spread, no_tick, ratios, spread_of

KEY = pc.codecs.Key(step=0, path="bench", rank=0, hop=0)


@dataclass(frozen=True)
class CodecSpeed:
    """One operation of one codec, by the clock on the wall."""

    codec: str
    operation: str
    """``"encode"``; ``"decode"`` into numbers that are there; ``"copy"`` of the numbers, the limit."""
    bytes: int
    """Of the float32 numbers."""
    wire_bytes: int
    """Of the packet."""
    seconds: Spread | None
    copies: Spread | None
    """In units of a copy of the numbers in the same round."""
    failed: str = ""
    """Why there is no figure."""

    @property
    def gigabytes_per_second(self) -> float | None:
        """Of float32 numbers, by the median."""
        return None if self.seconds is None else self.bytes / self.seconds.median / 1e9


def measure_codecs(
    codecs: Iterable[pc.Codec], size: int = 16 << 20, repeats: int = 7, tick: Callable[[str], None] = no_tick
) -> list[CodecSpeed]:
    """Time each codec on this process alone, in turn, round after round, each with a copy just before it.

    Args:
        codecs: which.
        size: bytes of float32 numbers to work on.
        repeats: rounds that count, after one that warms up.
        tick: called as each codec of each round begins; see `rounds`.

    Returns:
        The copy first, then encode and decode of each codec; a codec that fails says why.
    """
    numbers = torch.randn(max(1, size // 4), generator=torch.Generator().manual_seed(0))
    into = torch.zeros_like(numbers)
    copies: list[float] = []
    measured: list[CodecSpeed] = []
    timed = {codec: _Timed(codec) for codec in codecs}
    for number in range(repeats + 1):
        for timing in timed.values():
            tick(f"codec {timing.codec!r}")
            copy = _seconds(lambda: into.copy_(numbers))
            timing.take(numbers, into, copy, counts=number > 0)
            copies += [copy] if number else []
    if copies:
        alone = spread_of(copies)
        measured.append(CodecSpeed("none", "copy", numbers.nbytes, numbers.nbytes, alone, ratios(copies, copies)))
    return measured + [speed for timing in timed.values() for speed in timing.speeds(numbers.nbytes)]


def rounds(codecs: int, repeats: int) -> int:
    """How many times `measure_codecs` ticks."""
    return codecs * (repeats + 1)


class _Timed:
    """What is known of one codec so far."""

    def __init__(self, codec: pc.Codec) -> None:
        self.codec = codec
        self.copies: list[float] = []
        self.encode: list[float] = []
        self.decode: list[float] = []
        self.wire_bytes = 0
        self.failed = ""

    def take(self, numbers: torch.Tensor, into: torch.Tensor, copy: float, *, counts: bool) -> None:
        if self.failed:
            return
        try:
            packet = self.codec.encode(numbers, KEY)
            self.wire_bytes = packet.numel()
            encode = _seconds(lambda: self.codec.encode(numbers, KEY))
            decode = _seconds(lambda: self.codec.accumulate(packet, into, 0.0, 1.0))
        except Exception as error:  # somebody's codec: the others are still worth measuring
            self.failed = f"{type(error).__name__}: {error}"
            return
        if counts:
            self.copies.append(copy)
            self.encode.append(encode)
            self.decode.append(decode)

    def speeds(self, size: int) -> list[CodecSpeed]:
        return [
            CodecSpeed(repr(self.codec), operation, size, self.wire_bytes, None, None, self.failed)
            if self.failed
            else CodecSpeed(
                repr(self.codec),
                operation,
                size,
                self.wire_bytes,
                spread_of(samples),
                ratios(samples, self.copies),
            )
            for operation, samples in (("encode", self.encode), ("decode", self.decode))
        ]


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    result = run()
    seconds = perf_counter() - start
    del result  # giving memory back is not timed
    return seconds
