"""How long a rank's own work takes, for plans: so many numbers a second, by codec."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

CodecSpeed = Mapping[str, "tuple[float, float] | float"]
"""Codec -> numbers per second that it encodes, and decodes (or adds)."""


class Speeds:
    """Seconds of work, by what is done.

    A codec is found by its code (``"int8(block=64)"``), then by its name (``"int8"``); numbers that travel as they are
    by their dtype (``"float32"``). ``"copy"`` is every pass that writes fresh memory, as packing does; ``"multiply"``
    counts the multiplications of `low_rank`, ``"orthonormal"`` the numbers in its bases. What is not named costs
    nothing.
    """

    def __init__(self, speed: CodecSpeed | str | Path | None) -> None:
        self.table = _read(speed) if isinstance(speed, (str, Path)) else _checked(speed or {})
        self._rates: dict[str, float] = {}

    def seconds(self, what: str, numbers: int) -> float:
        """How long `what` takes on so many numbers."""
        if not self.table:
            return 0.0
        rate = self._rates.get(what)
        if rate is None:
            rate = self._rates[what] = self._seconds_per_number(what)
        return numbers * rate

    def _seconds_per_number(self, what: str) -> float:
        kind, _, codec = what.partition(" ")
        for name in (codec, codec.partition("(")[0]) if codec else (kind,):
            if name in self.table:
                return 1 / self.table[name][kind == "decode"]
        return 0.0


def _checked(speed: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    from ptcollect.codecs import by_name

    table = {}
    for name, rates in speed.items():
        pair = rates if isinstance(rates, (tuple, list)) else (rates, rates)
        if len(pair) != 2 or not all(isinstance(rate, (int, float)) and rate > 0 for rate in pair):
            raise ValueError(
                f"codec_speed[{name!r}]: expected (numbers encoded per second, numbers decoded), got {rates!r}"
            )
        if "(" not in name and name not in ("copy", "multiply", "orthonormal") and not _is_dtype(name):
            by_name(name)  # raises, with the names that exist
        table[name] = (float(pair[0]), float(pair[1]))
    return table


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def _read(path: str | Path) -> dict[str, tuple[float, float]]:
    """A mapping as JSON, or what ``benchmarks/codec_speed.py --json`` has written (gigabytes of float32 a second)."""
    found: Any = json.loads(Path(path).read_text())
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise TypeError(f"{path}: expected a mapping from codec to numbers per second, got a {kind}")
    if "rows" not in found:
        return _checked(found)
    rates = {(row["codec"], row["operation"]): row["gigabytes_per_second"] * 1e9 / 4 for row in found["rows"]}
    return {name: (rate, rates[name, "decode"]) for (name, kind), rate in rates.items() if kind == "encode"}
