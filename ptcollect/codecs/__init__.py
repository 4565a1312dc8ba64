"""Codecs: what travels instead of the numbers themselves. `compress` takes the plain ones by name.

>>> import torch, ptcollect as pc
>>> codec = pc.codecs.bf16()
>>> packet = codec.encode(torch.tensor([1.0, 1 / 3]), pc.codecs.Key(step=0, path="w", rank=0, hop=0))
>>> packet.numel(), codec.decode(packet, 2, torch.float32)
(4, tensor([1.0000, 0.3340]))
"""

from __future__ import annotations

from collections.abc import Callable

from ptcollect.codecs.cast import bf16, fp16
from ptcollect.codecs.codec import Codec, Key
from ptcollect.codecs.sign import sign
from ptcollect.codecs.sparse import randk, topk
from ptcollect.codecs.ternary import ternary
from ptcollect.codecs.uniform import fp8, int4, int8

__all__ = ["Codec", "Key", "bf16", "by_name", "fp8", "fp16", "int4", "int8", "randk", "sign", "ternary", "topk"]

_NAMED: dict[str, Callable[[], Codec]] = {
    "bf16": bf16,
    "fp16": fp16,
    "fp8": fp8,
    "int8": int8,
    "int4": int4,
    "sign": sign,
    "ternary": ternary,
    "topk": topk,
    "randk": randk,
}


def by_name(name: str) -> Codec:
    """The codec called `name`, with its default options.

    Args:
        name: such as ``"bf16"``.

    Returns:
        A `Codec`.

    Raises:
        ValueError: no codec has that name; the message lists those that exist.

    >>> by_name("bf16")
    bf16()
    """
    if name not in _NAMED:
        known = ", ".join(repr(known) for known in sorted(_NAMED))
        raise ValueError(f"unknown codec {name!r}; known by name: {known}; others are values: compress(my_codec())")
    return _NAMED[name]()
