"""Sizes as users write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_in_bytes(size: int | str, what: str, *, zero: bool = False) -> int:
    """Bytes, from an int or from text such as ``"25MiB"`` (powers of 1024) or ``"500KB"`` (powers of 1000).

    Raises:
        ValueError: it is no such thing, or not positive (0 is allowed with `zero`); `what` names it.

    >>> size_in_bytes("4KiB", "cap"), size_in_bytes("1.5MB", "cap")
    (4096, 1500000)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if match and match[2].upper() in _UNITS:
        number = int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(size, int) and not isinstance(size, bool):
        number = size
    else:
        raise ValueError(f'{what}: expected bytes as an int or a size such as "25MiB" or "500KB", got {size!r}')
    if number < 0 or (number == 0 and not zero):
        raise ValueError(f"{what}: expected a positive size{' or 0' if zero else ''}, got {size!r}")
    return number
