"""Run one process per rank, each behind a network link of its own with a limited rate.

As a script (as root; needs Debian's iproute2 and util-linux):

    python benchmarks/netlab.py -n 4 --rate 200mbit -- python my_benchmark.py

As a module:

    run_ranks([sys.executable, "my_benchmark.py"], n=4, rate="200mbit", timeout=120)

Every rank lives in a network namespace of its own, joined to the others by a bridge, and its link is shaped
in both directions with a token bucket (`tc tbf`). Namespaces have no names: each exists only as long as the processes
in it, and those end with this one, however it ends. So nothing is left behind, and any number of runs can go on
side by side. A rate of None (`--rate loopback`) means plain loopback: no namespaces, no root.

Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
BURST_SECONDS = 2.5e-3  # what a link that was idle may send at full speed; shorter ones slow a gigabit link down
GRACE_SECONDS = 10.0  # what the other ranks get to end by themselves after one has failed


class NetlabError(RuntimeError):
    """The network cannot be made here, or the ranks did not all end well."""


@dataclass(frozen=True)
class Network:
    """Where ranks run: what goes before each rank's command, and how ranks find one another."""

    prefixes: tuple[tuple[str, ...], ...]
    interface: str
    address: str
    port: int

    def run(self, argv: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> None:
        """Run `argv` once per rank; return when all ended well, raise NetlabError otherwise, and leave none running."""
        ranks: list[subprocess.Popen[bytes]] = []
        # Even SIGKILL, which runs no `finally`, must not leave ranks behind.
        die_with_us = ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()
        try:
            for rank, prefix in enumerate(self.prefixes):
                environment = {**os.environ, **self.environment(rank), **(env or {})}
                # start_new_session: a rank can then be ended together with whatever it has started.
                ranks.append(subprocess.Popen([*die_with_us, *prefix, *argv], env=environment, start_new_session=True))
            _wait(ranks, timeout)
        finally:
            for process in ranks:
                _kill(process)

    def environment(self, rank: int) -> dict[str, str]:
        """The variables torch.distributed reads for this rank, and one thread per rank."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(self.prefixes)),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": self.interface,
            "OMP_NUM_THREADS": "1",
        }


def run_ranks(
    argv: Sequence[str],
    n: int,
    rate: str | None,
    timeout: float,
    env: Mapping[str, str] | None = None,
    tcp: str | None = None,
) -> None:
    """Run `argv` on `n` ranks behind links of `rate` (as tc writes it, or None), for `timeout` seconds at most."""
    with shaped_network(n, rate, tcp) as net:
        net.run(argv, timeout, env)


@contextmanager
def shaped_network(n: int, rate: str | None, tcp: str | None = None) -> Iterator[Network]:
    """A network of `n` ranks with every link limited to `rate` in both directions; None is plain loopback.

    `tcp` is the congestion control that ranks use; None: the machine's.
    """
    if rate is None:
        yield Network(prefixes=((),) * n, interface="lo", address="127.0.0.1", port=_free_port())
        return
    _require_root_and_tools()
    with ExitStack() as namespaces:
        switch = namespaces.enter_context(_bridge())
        ranks = [namespaces.enter_context(_namespace()) for _ in range(n)]
        for rank, namespace in enumerate(ranks):
            _plug_in(switch, namespace, rank)
            _shape(_inside(namespace), "eth0", rate)
            _shape(_inside(switch), f"port{rank}", rate)
            _use_tcp(namespace, tcp)
        # The namespaces are new, so any port is free in them.
        yield Network(prefixes=tuple(map(_inside, ranks)), interface="eth0", address=_address(0), port=29500)


@contextmanager
def node_network(nodes: int, ranks_per_node: int, rate: str, tcp: str | None = None) -> Iterator[Network]:
    """Nodes whose ranks share one uplink, limited to `rate` in both directions; within a node nothing is limited.

    Ranks are numbered node by node. The ranks of a node are joined by a bridge, and the bridges by another one. `tcp`
    names the congestion control of the ranks' connections; None: the machine's own.
    """
    _require_root_and_tools()
    with ExitStack() as namespaces:
        core = namespaces.enter_context(_bridge())
        ranks: list[int] = []
        for node in range(nodes):
            switch = namespaces.enter_context(_bridge())
            _uplink(core, switch, node)
            _shape(_inside(switch), "uplink", rate)
            _shape(_inside(core), f"port{node}", rate)
            for _ in range(ranks_per_node):
                ranks.append(namespaces.enter_context(_namespace()))
                _plug_in(switch, ranks[-1], len(ranks) - 1)
                _use_tcp(ranks[-1], tcp)
        yield Network(prefixes=tuple(map(_inside, ranks)), interface="eth0", address=_address(0), port=29500)


@contextmanager
def _bridge() -> Iterator[int]:
    """A namespace with a bridge in it, which joins what is plugged in."""
    with _namespace() as switch:
        _run(*_inside(switch), "ip", "link", "add", "bridge", "type", "bridge")
        _run(*_inside(switch), "ip", "link", "set", "bridge", "up")
        yield switch


def _uplink(core: int, switch: int, node: int) -> None:
    """Join a node's bridge to the one between nodes by a veth pair."""
    port = f"port{node}"
    _run(*_inside(core), "ip", "link", "add", port, "type", "veth", "peer", "name", "uplink", "netns", str(switch))
    _run(*_inside(core), "ip", "link", "set", port, "master", "bridge", "up")
    _run(*_inside(switch), "ip", "link", "set", "uplink", "master", "bridge", "up")


def _plug_in(switch: int, namespace: int, rank: int) -> None:
    """Join a rank's namespace to the bridge by a veth pair."""
    here, port = _inside(namespace), f"port{rank}"
    _run(*_inside(switch), "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(namespace))
    _run(*_inside(switch), "ip", "link", "set", port, "master", "bridge", "up")
    _run(*here, "ip", "addr", "add", f"{_address(rank)}/16", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run(*here, "ip", "link", "set", device, "up")


def _shape(inside: tuple[str, ...], device: str, rate: str) -> None:
    """Limit what leaves a device."""
    burst = max(16_000, round(bits_per_second(rate) / 8 * BURST_SECONDS))
    bucket = ("tbf", "rate", rate, "burst", str(burst), "latency", "100ms")
    _run(*inside, "tc", "qdisc", "add", "dev", device, "root", *bucket)


def _use_tcp(namespace: int, congestion_control: str | None) -> None:
    if congestion_control is not None:
        path = "/proc/sys/net/ipv4/tcp_congestion_control"
        _run(*_inside(namespace), "sh", "-c", f"echo {congestion_control} > {path}")


@contextmanager
def _namespace() -> Iterator[int]:
    """A network namespace without a name; yields the id of the process that keeps it alive."""
    # `cat` reads a pipe that closes when this process ends, even by SIGKILL; then the kernel removes everything.
    command = ["unshare", "--net", "sh", "-c", "echo ready && exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            raise NetlabError(f"cannot make a network namespace: {holder.stderr.read().decode().strip()}")
        yield holder.pid


def _inside(namespace: int) -> tuple[str, ...]:
    """What goes before a command to run it in the namespace of this process."""
    return ("nsenter", f"--net=/proc/{namespace}/ns/net", "--")


def _address(rank: int) -> str:
    return f"10.77.{rank // 250}.{rank % 250 + 1}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _require_root_and_tools() -> None:
    """Say what is missing before anything is made."""
    missing = [f"`{tool}` (package {package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        raise NetlabError(f"shaped links need {', '.join(missing)}; install it, or use plain loopback instead")
    if os.geteuid() != 0:
        raise NetlabError("shaped links need root; run under sudo, or use plain loopback instead")


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetlabError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait for all ranks; after a failure wait only a little longer. Raise if any failed or was still running."""
    deadline = time.monotonic() + timeout
    failed = False
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if not failed and any(process.poll() for process in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    codes = {rank: process.poll() for rank, process in enumerate(ranks)}
    if any(code != 0 for code in codes.values()):
        stories = [f"rank {rank} {_story(code)}" for rank, code in codes.items() if code != 0]
        raise NetlabError(f"{', '.join(stories)} (limit {timeout:g} s)")


def _story(code: int | None) -> str:
    if code is None:
        return "was still running and is stopped"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that `finally` blocks run and ranks are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def link_rate(text: str) -> str | None:
    """A rate from the command line: as tc writes it, or `loopback` for None."""
    return None if text == "loopback" else text


def bits_per_second(rate: str) -> float:
    """The number behind a rate such as 200mbit."""
    found = re.fullmatch(r"([0-9.]+)([kmg]?)bit", rate)
    if found is None:
        raise NetlabError(f"a rate is written like 200mbit or 1gbit, or is loopback; got {rate!r}")
    return float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def main() -> None:
    """Run a command on every rank of a shaped network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--rate", default="200mbit", help="each link, as tc writes it, or `loopback` (default 200mbit)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the whole run (default 300)")
    parser.add_argument("command", nargs="+", help="what every rank runs; put -- before it")
    args = parser.parse_args()
    exit_on_sigterm()
    try:
        run_ranks(args.command, args.n, link_rate(args.rate), args.timeout)
    except NetlabError as error:
        sys.exit(f"netlab: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
