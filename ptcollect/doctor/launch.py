"""What the launcher told this process, and the store through which the ranks find each other."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from ptcollect.doctor.finding import Finding

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HOW_TO_LAUNCH = (
    "launch all ranks: torchrun --nproc-per-node 4 -m ptcollect doctor; on several hosts add --nnodes 2 "
    "--rdzv-backend c10d --rdzv-endpoint HOST:29500, the same on each"
)


class LaunchError(Exception):
    """This process cannot take part; carries the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"{finding.check}: {finding.what}; {finding.fix}")
        self.finding = finding


@dataclass(frozen=True)
class Launch:
    """What `VARIABLES` and torchrun's own say."""

    rank: int
    world_size: int
    address: str = ""
    port: int = 0
    hosts_store: bool = False
    """Whether this process must host the store; under torchrun its agent does."""
    attempt: str = "0"
    """Of torchrun, which starts all ranks again after a failure, with the same store."""

    @property
    def alone(self) -> bool:
        """Whether no launcher started this process."""
        return not self.address


def read_launch(environment: Mapping[str, str]) -> Launch:
    """What the environment says; a world of one if it says nothing.

    Raises:
        LaunchError: it says only part, or something that cannot be.
    """
    missing = [name for name in VARIABLES if not environment.get(name)]
    if len(missing) == len(VARIABLES):
        return Launch(0, 1)
    if missing:
        raise LaunchError(
            Finding(
                "environment",
                "failed",
                f"{', '.join(missing)} not set, but {', '.join(name for name in VARIABLES if name not in missing)}",
                f"init_process_group() reads all four: {HOW_TO_LAUNCH}",
                fatal=True,
            )
        )
    rank, world_size, port = (_whole(name, environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < world_size:
        raise LaunchError(
            Finding(
                "environment",
                "failed",
                f"RANK={rank} with WORLD_SIZE={world_size}: ranks run from 0 to {world_size - 1}",
                "WORLD_SIZE counts processes, not hosts: hosts x processes per host; let torchrun set both",
                fatal=True,
            )
        )
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(
        rank,
        world_size,
        environment["MASTER_ADDR"],
        port,
        hosts_store=rank == 0 and not agent,
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            Finding(
                "environment", "failed", f"{name}={text!r} is not a whole number", "let torchrun set it", fatal=True
            )
        ) from None


def connect(launch: Launch, timeout: float) -> Any:
    """The store of the launch, with nobody's presence assumed.

    Raises:
        LaunchError: it cannot be reached within `timeout` seconds.
    """
    if launch.alone:
        return HashStore()
    start = time.monotonic()
    try:
        # Asked first, since a TCPStore would try a name that does not resolve until its time is over.
        socket.getaddrinfo(launch.address, launch.port)
        store = TCPStore(
            launch.address,
            launch.port,
            is_master=launch.hosts_store,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except (OSError, RuntimeError) as error:
        raise LaunchError(_unreachable(launch, error, time.monotonic() - start)) from None
    return PrefixStore(f"ptcollect/doctor/{launch.attempt}", store)


def _unreachable(launch: Launch, error: Exception, seconds: float) -> Finding:
    place = f"MASTER_ADDR={launch.address} MASTER_PORT={launch.port}"
    what = f"rank {launch.rank} reaches no store at {place} ({seconds:.0f} s)"
    if isinstance(error, socket.gaierror):
        what = f"rank {launch.rank}: MASTER_ADDR={launch.address} is no name that this host can resolve"
        fix = "give the address of rank 0's host, as the other hosts reach it, or add the name to /etc/hosts"
    elif launch.hosts_store and ("in use" in str(error) or "EADDRINUSE" in str(error)):
        what = f"rank 0 cannot listen on MASTER_PORT={launch.port}: it is in use"
        fix = "another launch still runs on this host, or two ranks call themselves 0: end it, or take another port"
    elif launch.hosts_store:
        fix = "rank 0 hosts the store: MASTER_ADDR must be an address of rank 0's own host"
    else:
        fix = (
            "rank 0, which hosts it, was not started or has ended, MASTER_ADDR or MASTER_PORT differ from rank 0's, or "
            "a firewall closes that port"
        )
    return Finding("rendezvous", "failed", what, fix, fatal=True)
