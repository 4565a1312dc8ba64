"""Whether all ranks start from the same parameters."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass

import torch

from ptcollect.agreement import gather_bytes
from ptcollect.comm import Comm
from ptcollect.errors import TreeMismatchError
from ptcollect.pipeline import Pipeline
from ptcollect.state import State
from ptcollect.tree import Leaves

_DIGEST = 16  # bytes


@dataclass(frozen=True, repr=False)
class SameEverywhere(Pipeline):
    """Raises on every rank if a leaf has other bits on some rank; returns the tree as it is."""

    name = "same_everywhere"
    works_on = "any"
    communicates = True
    consensus = True

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        everyone = [b"".join(map(_digest, tree.values()))]
        for axis in comm.axes:
            parts = await gather_bytes(b"".join(everyone), comm.on_axis(axis, self.name))
            everyone = [b"".join(parts)]
        size = _DIGEST * len(tree)
        rows = [everyone[0][start : start + size] for start in range(0, len(everyone[0]), size)]
        for i, path in enumerate(tree):
            here = slice(_DIGEST * i, _DIGEST * (i + 1))
            other = next((rank for rank, row in enumerate(rows) if row[here] != rows[0][here]), None)
            if other is not None:
                differ = sum(row != rows[0] for row in rows)
                raise TreeMismatchError(
                    f"the replicas differ: {path!r} has other values on rank {other} than on rank 0 ({differ} of "
                    f"{len(rows)} ranks differ from it somewhere); give all ranks the same seed or checkpoint, or send "
                    'rank 0\'s to all with replicas="broadcast" or sync_params(broadcast(), module)'
                )
        return tree, state


def _digest(leaf: torch.Tensor) -> bytes:
    if leaf.is_meta:  # in a plan
        return bytes(_DIGEST)
    data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    raw = (ctypes.c_char * data.numel()).from_address(data.data_ptr()) if data.numel() else b""
    return hashlib.blake2b(raw, digest_size=_DIGEST).digest()
