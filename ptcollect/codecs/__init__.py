"""Codecs: what travels instead of the numbers themselves. `compress` takes the plain ones by name."""

from __future__ import annotations

from ptcollect.codecs.cast import Cast, bf16, fp16
from ptcollect.codecs.codec import Codec, Key

__all__ = ["Cast", "Codec", "Key", "bf16", "fp16", "by_name"]

_NAMED = {"bf16": bf16, "fp16": fp16}


def by_name(name: str) -> Codec:
    """The codec called `name`, with its default options.

    Raises:
        ValueError: no codec has that name; the message lists those that exist.

    >>> by_name("bf16")
    bf16()
    """
    if name not in _NAMED:
        known = ", ".join(repr(known) for known in sorted(_NAMED))
        raise ValueError(f"unknown codec {name!r}; known by name: {known}; others are values: compress(my_codec())")
    return _NAMED[name]()
