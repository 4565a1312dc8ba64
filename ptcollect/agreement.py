"""Agreement before traffic: no rank sends a tensor before all ranks know that they brought the same call.

Each rank has a fixed-size record: a digest of all that must be equal, and a flag. Records go round by dissemination, in
ceil(log2 n) rounds of one send and one receive: in round k a rank hears from the rank 2**k to its left, compares
digests, and passes on whether it has seen a difference. After round k it has covered the 2**(k+1) ranks up to itself,
so at the end every rank knows whether all agree. The call goes on meanwhile, packing and encoding; `Agreement` is the
gate of its comm, which its first message waits for. Only if the ranks do not agree, they exchange full descriptions and
all raise the same error.

Source: Hensgen, Finkel and Manber 1988, Two algorithms for barrier synchronization, section 3.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.errors import PeerLostError, TreeMismatchError
from ptcollect.tree import sorted_paths

RECORD = 64  # bytes: 16 of digest, 1 of flag, the rest left for later


@dataclass(frozen=True)
class Description:
    """All that ranks must agree on before a call, and what an error needs to say."""

    pipeline: str
    """The pipeline as code, for messages."""
    identity: str
    """The pipeline by qualified names, for comparison."""
    step: int
    missing: str
    check: str
    weighted: bool
    leaves: list[tuple[str, list[int] | None, str]]
    """Path, shape (None for a missing leaf) and dtype of every leaf, in natural order."""
    failure: str | None = None
    """Why this rank cannot take part, if it cannot."""
    last_failed: bool = False
    """Whether this rank's previous call on the group failed."""
    place: str = ""
    """Which rank this is, for messages."""


class DisagreementError(Exception):
    """Some rank brought something else; never leaves a call."""


class Agreement:
    """The records of all ranks, on their way; the gate of what must not be sent before they are equal.

    On a mesh the dims are taken in turn, so that in the end every rank of the mesh has heard of every other.

    Args:
        digest: 16 bytes that are equal only if everything that must agree is.
        comm: this rank's place.
    """

    def __init__(self, digest: bytes, comm: Comm) -> None:
        self.open = False
        self._digest = digest
        self._differs = False
        self._rounds = [
            (comm.on_axis(axis, "agreement"), 1 << k)
            for axis, place in comm.axes.items()
            for k in range((place.size - 1).bit_length())
        ]
        self._round = 0
        self._ticket: Any = None

    async def begin(self) -> None:
        """Send this rank's record, and go on."""
        comm, distance = self._rounds[self._round]
        n, rank = comm.size, comm.rank
        record = _to_tensor(self._digest + bytes([self._differs]) + bytes(RECORD - len(self._digest) - 1))
        exchange = comm.exchange_bytes({(rank + distance) % n: record}, {(rank - distance) % n: RECORD})
        self._ticket = await comm.begin(exchange)

    async def passed(self) -> None:
        """Wait for the records; several coroutines may.

        Raises:
            DisagreementError: not all are equal; every rank gets it.
        """
        while self._round < len(self._rounds):
            number, (comm, _) = self._round, self._rounds[self._round]
            received = await comm.end(self._ticket)
            if number != self._round:
                continue  # another coroutine was faster
            (record,) = (_to_bytes(packet.data) for packet in received.values())
            size = len(self._digest)
            self._differs = self._differs or bool(record[size]) or record[:size] != self._digest
            self._round += 1
            if self._round < len(self._rounds):
                await self.begin()
        if self._differs:
            raise DisagreementError
        self.open = True


async def describe_all(mine: Description, comm: Comm) -> list[Description]:
    """What all ranks describe, in order."""
    described = [mine]
    for axis in comm.axes:
        lists = await gather_bytes(
            json.dumps([asdict(each) for each in described]).encode(), comm.on_axis(axis, "agreement")
        )
        described = [
            Description(**{**each, "leaves": [tuple(leaf) for leaf in each["leaves"]]})
            for text in lists
            for each in json.loads(text)
        ]
    return described


async def any_rank(flag: bool, comm: Comm) -> bool:
    """Whether `flag` holds on some rank, the same answer on all of them."""
    return bool(await any_of(["flag"], ["flag"] * flag, comm))


async def any_of(names: Sequence[str], mine: Collection[str], comm: Comm) -> frozenset[str]:
    """Those of `names` that are in `mine` on some rank, the same answer on all of them."""
    flags = sum(1 << i for i, name in enumerate(names) if name in mine)
    size = 8 * (1 + len(names) // 64)
    for axis in comm.axes:
        flags = await _spread(flags, size, comm.on_axis(axis, "flags"))
    return frozenset(name for i, name in enumerate(names) if flags >> i & 1)


async def _spread(flags: int, size: int, comm: Comm) -> int:
    """The flags of all ranks of one axis together."""
    distance = 1
    while distance < comm.size:
        source = (comm.rank - distance) % comm.size
        record = _to_tensor(flags.to_bytes(size, "little"))
        received = await comm.exchange_bytes({(comm.rank + distance) % comm.size: record}, {source: size})
        flags |= int.from_bytes(_to_bytes(received[source].data), "little")
        distance *= 2
    return flags


async def gather_bytes(mine: bytes, comm: Comm) -> list[bytes]:
    """The byte strings of all ranks in rank order; lengths first, since a longer message than expected aborts gloo."""
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    length = _to_tensor(len(mine).to_bytes(8, "little"))
    lengths = await comm.exchange_bytes(dict.fromkeys(others, length), dict.fromkeys(others, 8))
    sizes = {peer: int.from_bytes(_to_bytes(packet.data), "little") for peer, packet in lengths.items()}
    texts = await comm.exchange_bytes(dict.fromkeys(others, _to_tensor(mine)), sizes)
    everyone = {peer: _to_bytes(packet.data) for peer, packet in texts.items()} | {comm.rank: mine}
    return [everyone[rank] for rank in range(comm.size)]


async def gather_numbers(number: float, comm: Comm) -> list[float]:
    """`number` of every rank of every dim, in rank order."""
    numbers = [number]
    for axis in comm.axes:
        parts = await gather_bytes(struct.pack(f"<{len(numbers)}d", *numbers), comm.on_axis(axis, "weights"))
        numbers = [value for part in parts for (value,) in struct.iter_unpack("<d", part)]
    return numbers


def settle(described: Sequence[Description], mine: Description) -> dict[str, tuple[list[int], str]]:
    """What to do where descriptions differ: fill in missing leaves, or raise the same error on every rank.

    Returns:
        Path -> (shape, dtype) of leaves that this rank lacks, some other rank has, and ``missing="zeros"`` fills.
    """
    for each in described:
        if each.failure is not None:
            raise PeerLostError(f"{each.place} could not take part in this call, so no rank did: {each.failure}")
    first = described[0]
    for each in described:
        if each.last_failed != first.last_failed:
            failed, other = (each, first) if each.last_failed else (first, each)
            raise PeerLostError(
                f"the previous call failed on {failed.place} and not on {other.place}: their replicas may differ now; "
                "restore all ranks from the same state, then go on"
            )
    for what, key in (
        ("pipelines", "identity"),
        ("steps", "step"),
        ("missing options", "missing"),
        ("check options", "check"),
        ("weight options (one rank passes weight, another does not)", "weighted"),
    ):
        odd = next((each for each in described if getattr(each, key) != getattr(first, key)), None)
        if odd is not None:
            shown = "pipeline" if key == "identity" else key
            raise TreeMismatchError(
                f"ranks brought different {what}: {first.place} has {getattr(first, shown)}, "
                f"{odd.place} has {getattr(odd, shown)}; every rank must make the same call in the same order"
            )
    return _missing_leaves(described, mine)


def _missing_leaves(described: Sequence[Description], mine: Description) -> dict[str, tuple[list[int], str]]:
    tables = [{path: (shape, dtype) for path, shape, dtype in each.leaves} for each in described]
    wanted: dict[str, tuple[list[int], str]] = {}
    mine_has = {path for path, shape, _ in mine.leaves if shape is not None}
    for path in sorted_paths({path for table in tables for path in table}):
        present = [
            (each, table[path])
            for each, table in zip(described, tables, strict=True)
            if path in table and table[path][0] is not None
        ]
        for each, table in zip(described, tables, strict=True):
            if path not in table:
                other = next(other for other, found in zip(described, tables, strict=True) if path in found)
                raise TreeMismatchError(
                    f"leaf {path!r}: {other.place} has {_show(tables[described.index(other)][path])}, "
                    f"{each.place} has no such leaf; every rank must pass the same structure"
                )
        for each, (shape, dtype) in present:
            first, expected = present[0]
            if (shape, dtype) != expected:
                raise TreeMismatchError(
                    f"leaf {path!r}: {first.place} has {_show(expected)}, {each.place} has {_show((shape, dtype))}; "
                    "every rank must pass the same shapes and dtypes"
                )
        if present and len(present) < len(described):
            if mine.missing != "zeros":
                lacks = next(each for each, table in zip(described, tables, strict=True) if table[path][0] is None)
                raise TreeMismatchError(
                    f"leaf {path!r} is None (no gradient) on {lacks.place} and "
                    f"{_show(present[0][1])} on {present[0][0].place}; "
                    'pass missing="zeros" to count a missing gradient as zeros'
                )
            if path not in mine_has:
                shape, dtype = present[0][1]
                wanted[path] = (shape or [], dtype)
    return wanted


def _show(leaf: tuple[list[int] | None, str]) -> str:
    shape, dtype = leaf
    return "None" if shape is None else f"{tuple(shape)} {dtype}"


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(data: Tensor) -> bytes:
    return bytes(data.tolist())  # not numpy(): numpy may not be installed
