"""What one rank can say about its process, its host and its interfaces."""

from __future__ import annotations

import os
import platform
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import ptcollect
from ptcollect.doctor.launch import Launch

SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address


@dataclass(frozen=True)
class Facts:
    """Of one rank; travels to rank 0 as JSON."""

    rank: int
    world_size: int
    host: str
    """The host's name."""
    machine: str
    """Equal on two ranks only if they share cores."""
    network: str
    """Equal on two ranks only if they share a loopback interface."""
    python: str
    torch: str
    ptcollect: str
    backends: list[str]
    """Of torch.distributed, as far as this build has them."""
    chosen: str
    """GLOO_SOCKET_IFNAME; empty if not set."""
    interfaces: dict[str, str]
    """Names and IPv4 addresses; the address is empty where there is none."""
    resolved: str
    """The address that the host's own name stands for; empty if for none."""
    cores: int
    threads: int
    """That torch uses in one operation."""
    omp: str
    """OMP_NUM_THREADS; empty if not set."""

    @property
    def bound(self) -> str:
        """The address at which gloo will listen: of the chosen interface, else of the host's name, else loopback."""
        if self.chosen:
            return self.interfaces.get(self.chosen.split(",")[0], "")
        return self.resolved or "127.0.0.1"


def gather_facts(launch: Launch, environment: Mapping[str, str]) -> Facts:
    """What this process can say about itself."""
    host = socket.gethostname()
    machine = f"{host} {_text('/proc/sys/kernel/random/boot_id')}"
    return Facts(
        rank=launch.rank,
        world_size=launch.world_size,
        host=host,
        machine=machine,
        network=f"{machine} {_link('/proc/self/ns/net')}",
        python=platform.python_version(),
        torch=torch.__version__,
        ptcollect=ptcollect.__version__,
        backends=[name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()],
        chosen=environment.get("GLOO_SOCKET_IFNAME", ""),
        interfaces={name: address_of(name) for _, name in socket.if_nameindex()},
        resolved=_resolved(host),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        omp=environment.get("OMP_NUM_THREADS", ""),
    )


def address_of(interface: str) -> str:
    """The IPv4 address of an interface, or "" if it has none or the system does not tell."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            packed = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(packed[20:24])
    except (ImportError, OSError):
        return ""


def _resolved(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
