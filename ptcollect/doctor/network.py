"""Checks that send: between every two ranks, in one group of all, and through ptcollect itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ptcollect as pc
from ptcollect.doctor.finding import Finding
from ptcollect.doctor.meeting import Meeting, Report
from ptcollect.measure.tournament import opponents

SMALL, LARGE = 8, 1 << 20  # bytes


class PairError(Exception):
    """Two ranks cannot talk."""


# Pairs --------------------------------------------------------------------------------------------------------------


def check_pairs(meeting: Meeting, report: Report) -> None:
    """Send between every two ranks, both ways, small and large.

    Each pair has a group of its own, because gloo closes all connections of a group when one wait times out. Pairs
    meet in rounds, so that a rank which waited in vain for one peer does not come late to the next.
    """
    rank, n = meeting.launch.rank, meeting.launch.world_size
    patience = max(2.0, meeting.timeout / 3)
    deadline = time.monotonic() + meeting.timeout
    for number, peer in enumerate(opponents(rank, n)):
        if not meeting.together(f"round {number}", 2 * patience):
            report.findings.append(_lost(rank, number))
            break
        if peer is None:
            continue
        pair = f"{min(rank, peer)}-{max(rank, peer)}"
        try:
            if time.monotonic() > deadline:
                raise PairError("not tried: time was over")
            report.pairs[pair] = _try_pair(meeting, peer, pair, patience)
        except PairError as error:
            report.broken_pairs[pair] = str(error)
    if report.broken_pairs or report.findings:
        meeting.store.add("broken", 1)


def _lost(rank: int, number: int) -> Finding:
    what = f"rank {rank} waited in vain for all ranks to come to round {number} of the pairs"
    return Finding("pairs", "failed", what, "a rank died or hangs: see who did not report back")


def _try_pair(meeting: Meeting, peer: int, pair: str, patience: float) -> dict[str, float]:
    """Seconds of the small and of the large round trip.

    Raises:
        PairError: says what failed, and in which direction.
    """
    rank = meeting.launch.rank
    deadline = time.monotonic() + patience
    me = int(rank > peer)
    try:
        gloo: Any = dist.ProcessGroupGloo(meeting.below(f"pair/{pair}"), me, 2, timedelta(seconds=patience))
    except RuntimeError as error:
        raise PairError(f"no connection: {_first_line(error)}") from None
    low, high = sorted((rank, peer))
    seconds: dict[str, float] = {}
    for name, size in (("warm", SMALL), *[("small", SMALL)] * 5, ("large", LARGE)):
        start = time.monotonic()
        for source, target in ((low, high), (high, low)):
            content = torch.full((size,), (source + 1) % 251, dtype=torch.uint8)
            buffer = content if rank == source else torch.zeros_like(content)
            post = gloo.send if rank == source else gloo.recv
            try:
                left = max(0.01, deadline - time.monotonic())
                post([buffer], 1 - me, 0).wait(timedelta(seconds=left))
            except RuntimeError as error:
                way = f"{size} bytes from rank {source} to rank {target}"
                raise PairError(f"{way}: {_first_line(error)}") from None
            if not torch.equal(buffer, content):
                raise PairError(f"{size} bytes from rank {source} to rank {target}: other bytes arrived than were sent")
        seconds[name] = min(time.monotonic() - start, seconds.get(name, math.inf))
    return {name: seconds[name] for name in ("small", "large")}


# All ranks ----------------------------------------------------------------------------------------------------------


def check_group(meeting: Meeting, report: Report) -> None:
    """Make a group of all ranks, time its first collectives, and a call of ptcollect, each against known values."""
    rank, n = meeting.launch.rank, meeting.launch.world_size
    total = float(n * (n + 1) // 2)

    def create() -> None:
        dist.init_process_group(
            "gloo",
            store=meeting.below("group"),
            rank=rank,
            world_size=n,
            timeout=timedelta(seconds=meeting.timeout),
        )

    def all_reduce() -> None:
        numbers = torch.full((1000,), rank + 1.0)
        dist.all_reduce(numbers)
        _expect(numbers, torch.full((1000,), total))

    def ring_reduce() -> None:
        mine = {"w": torch.arange(1000.0) + rank, "b": torch.tensor(rank + 1.0)}
        mean = pc.ring_reduce()(mine)
        _expect(mean["w"], torch.arange(1000.0) + (n - 1) / 2)
        _expect(mean["b"], torch.tensor(total / n))

    steps: list[tuple[str, Callable[[], None]]] = [
        ("group", create),
        ("first all_reduce", all_reduce),
        ("second all_reduce", all_reduce),
        ("first ring_reduce", ring_reduce),
        ("second ring_reduce", ring_reduce),
    ]
    for name, step in steps:
        meeting.at(name)
        start = time.monotonic()
        try:
            step()
        except Exception as error:
            report.findings.append(_failed(name, rank, error))
            return
        report.seconds[name] = time.monotonic() - start


def _expect(got: Tensor, want: Tensor) -> None:
    if not torch.allclose(got, want, rtol=1e-6, atol=0):
        off = float((got - want).abs().max())
        raise ValueError(f"wrong numbers came out, off by up to {off:g}")


def _failed(step: str, rank: int, error: Exception) -> Finding:
    what = f"rank {rank}: {type(error).__name__}: {_first_line(error)}"
    if isinstance(error, ValueError):
        return Finding(step, "failed", what, "versions of torch differ between ranks, or memory is faulty")
    fix = (
        "every pair of ranks could talk before, so a rank died, a firewall limits the number of connections, or open "
        "files are limited (ulimit -n)"
    )
    return Finding(step, "failed", what, fix)


def _first_line(error: Exception) -> str:
    """The message without torch's stack."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition("] ")[2].strip() if text.startswith("[") else text.splitlines()[0]
