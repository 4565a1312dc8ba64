"""Runs a command of ours on ranks in this machine, for a bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch.distributed as dist

from ptcollect.commands.deadline import PARENT

GRACE_SECONDS = 5.0  # for the other ranks, when one has failed


def run_local_ranks(n: int, arguments: Sequence[str], seconds: float) -> int:
    """Run ``python -m ptcollect ARGUMENTS`` on `n` local gloo ranks; the exit code, 1 if any rank failed or was killed.

    Rank 0 writes where this process does; what the others write is shown if one of them fails. Whatever happens, none
    of them is left after `seconds`.
    """
    # Hosted here, as by torchrun's agent: no port has to be guessed.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(n),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        PARENT: str(os.getpid()),
    }
    command = [sys.executable, "-m", "ptcollect", *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as others:
        processes = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=None if rank == 0 else others,
                stderr=None if rank == 0 else others,
            )
            for rank in range(n)
        ]
        try:
            _wait(processes, time.monotonic() + seconds)
        finally:
            late = [rank for rank, process in enumerate(processes) if process.poll() is None]
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes[1:]):
            others.seek(0)
            sys.stderr.write(others.read()[-4000:])
        if late:
            sys.stderr.write(f"killed after {seconds:.0f} s, or because another failed: ranks {late}\n")
    return int(any(process.returncode for process in processes))


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait until all have ended, or one has failed and the others had their grace, or time is over."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
