"""Starts real ranks: n processes that run the same checks over gloo, and says what became of each check on each rank.

As a script it is one rank: ``ranks.py RANK SIZE PORT OUT NAME...`` runs the named checks of `gloo_checks.py` in order
and writes one line of JSON per check to OUT.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ptcollect as pc

TESTS = Path(__file__).parent
PACKAGE = Path(pc.__file__).parents[1]
GROUP_TIMEOUT = timedelta(seconds=20)
STUCK = 150  # seconds after which a rank prints where it is; whoever launches must give it a little more


@dataclass(frozen=True)
class Launch:
    """What became of the ranks."""

    names: Sequence[str]
    """The checks in order."""
    outcomes: list[dict[str, str]]
    """By rank: name of the check -> "" or the traceback."""
    exit_codes: list[int | None]
    """None: killed here, after too long."""
    output: list[str]

    def report(self, name: str) -> str:
        """What went wrong with a check, on all ranks; "" if nothing did."""
        troubles = [(rank, self._trouble(name, rank)) for rank in range(len(self.outcomes))]
        return "\n".join(f"--- rank {rank}\n{trouble}" for rank, trouble in troubles if trouble)

    def _trouble(self, name: str, rank: int) -> str:
        ended = self.outcomes[rank]
        if name in ended:
            return ended[name]
        stuck = self.names[len(ended)]
        if name != stuck:
            return f"never came to this check: it ended, exit code {self.exit_codes[rank]}, in {stuck}"
        return f"never ended the check: exit code {self.exit_codes[rank]}, output\n{self.output[rank]}"


def launch(n: int, names: Sequence[str], *, bound: float, **environment: str) -> Launch:
    """Run the checks on `n` ranks and wait for at most `bound` seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every rank, as torchrun's
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(TESTS)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / f"{rank}.jsonl", Path(folder) / f"{rank}.txt") for rank in range(n)]
        processes = []
        for rank, (lines, text) in enumerate(files):
            command = [sys.executable, "-W", "error", __file__, str(rank), str(n), str(store.port), str(lines), *names]
            with text.open("w") as stream:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT, cwd=folder)
                )
        deadline = time.monotonic() + bound
        exit_codes: list[int | None] = []
        for process in processes:
            try:
                exit_codes.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                exit_codes.append(None)
        outcomes = [
            dict(json.loads(line) for line in lines.read_text().splitlines()) if lines.exists() else {}
            for lines, _ in files
        ]
        return Launch(names, outcomes, exit_codes, [text.read_text()[-4000:] for _, text in files])


# One rank -----------------------------------------------------------------------------------------------------------


def main(rank: int, n: int, port: int, out: str, names: Sequence[str]) -> None:
    import gloo_checks

    faulthandler.dump_traceback_later(STUCK, exit=False)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=GROUP_TIMEOUT)
    with Path(out).open("a") as lines:

        def write(name: str, trouble: str) -> None:
            lines.write(json.dumps([name, trouble]) + "\n")
            lines.flush()

        for name in names:
            together(store, name, n)
            check = gloo_checks.CHECKS[name]
            if check.fatal:
                write(name, "")  # the rank that dies has no other chance; the others' word counts if they differ
            try:
                check.function(rank, n)
                trouble = ""
            except BaseException:
                trouble = traceback.format_exc()
            write(name, trouble)


def together(store: dist.Store, name: str, n: int) -> None:
    """Wait until every rank is here, without gloo."""
    store.add(f"start/{name}", 1)
    deadline = time.monotonic() + 60
    while store.add(f"start/{name}", 0) < n:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks came to the check {name!r}")
        time.sleep(0.002)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
