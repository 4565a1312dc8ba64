"""Runs code that may hang, crash or ruin its process group: each case on its own ranks, forked from one warm process.

`ranks.py` is for code that is right. As a script, this is the warm process: ``forked_ranks.py FOLDER`` reads
FOLDER/cases.json and writes FOLDER/outcomes.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ptcollect as pc

PACKAGE = Path(pc.__file__).parents[1]
GROUP_TIMEOUT = timedelta(seconds=2)
SILENCE = 4.0
"""Seconds without a word from any rank after which those that have not ended count as waiting forever."""

MESSAGE = 4096
"""Bytes of each message from a rank, all of them in one piece."""


@dataclass(frozen=True)
class Case:
    """Code for every rank, and what to look at afterwards."""

    code: str
    ranks: int = 2
    steps: int = 0
    """How many backward passes to take with the code's `ddp`; 0: look at its `averaged`, or else its `gradients`."""


Outcome = dict[str, list[str]]
"""``"step 1"`` (``""`` outside steps) -> what came of it on each rank: its gradients, an error, or how it ended."""


def run(cases: Mapping[str, Case], *, bound: float) -> dict[str, Outcome]:
    """Run the cases one after another; all of them take at most `bound` seconds."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps({key: dataclasses.asdict(case) for key, case in cases.items()}))
        with (folder / "output.txt").open("w") as output:
            command = [sys.executable, __file__, name]
            code = subprocess.run(
                command, env=environment, stdout=output, stderr=output, timeout=bound, check=False
            ).returncode
        if code:
            raise RuntimeError((folder / "output.txt").read_text())
        outcomes: dict[str, Outcome] = json.loads((folder / "outcomes.json").read_text())
        return outcomes


# The warm process ---------------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    import torch._dynamo  # noqa: F401  (DDP imports it when first made: 1.5 s that no rank should spend again)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some cases crash on purpose
    cases = {name: Case(**fields) for name, fields in json.loads((folder / "cases.json").read_text()).items()}
    outcomes = {name: on_ranks(case, folder / f"store{i}") for i, (name, case) in enumerate(cases.items())}
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


def on_ranks(case: Case, store: Path) -> Outcome:
    """Fork the ranks, listen until each has ended or all are silent, and kill them."""
    outcome: Outcome = {}
    processes, at, pending = {}, [""] * case.ranks, set(range(case.ranks))

    def note(rank: int, what: str) -> None:
        outcome.setdefault(at[rank], [""] * case.ranks)[rank] = what

    with selectors.DefaultSelector() as selector:
        for rank in range(case.ranks):
            reading, writing = os.pipe()
            processes[rank] = os.fork()
            if not processes[rank]:
                one_rank(case, rank, store, writing)
            os.close(writing)
            selector.register(reading, selectors.EVENT_READ, rank)
        heard = time.monotonic()
        while pending and time.monotonic() - heard < SILENCE:
            for key, _ in selector.select(timeout=0.1):
                heard, rank = time.monotonic(), key.data
                message = os.read(key.fd, MESSAGE)
                kind, text = json.loads(message) if message else ("died", how_it_ended(processes.pop(rank)))
                if kind == "at":
                    at[rank] = text
                elif kind != "end":
                    note(rank, text)
                if kind in ("died", "end"):
                    pending.discard(rank)
                    selector.unregister(key.fd)
                    os.close(key.fd)
        for fd in list(selector.get_map()):
            os.close(fd)
    for rank in pending:
        note(rank, "still waiting")
    for process in processes.values():
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return outcome


def how_it_ended(process: int) -> str:
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


# One rank -----------------------------------------------------------------------------------------------------------


def one_rank(case: Case, rank: int, store: Path, writing: int) -> None:
    """Run the case, tell what came of it, and keep still: a rank that exits would be seen by the others."""

    def tell(kind: str, text: str = "") -> None:
        os.write(writing, json.dumps([kind, text[:1000]]).ljust(MESSAGE).encode())

    signal.alarm(60)  # whatever happens to the process above
    try:
        torch.set_num_threads(1)
        files = dist.FileStore(str(store), case.ranks)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=case.ranks, timeout=GROUP_TIMEOUT)
        tell("at")
        namespace: dict[str, Any] = {"__name__": "snippet"}
        if attempt(tell, lambda: exec(case.code, namespace)):
            for step in range(1, case.steps + 1):
                tell("at", f"step {step}")
                attempt(tell, lambda: show(tell, stepped(namespace["ddp"], rank)))
            if not case.steps:
                show(tell, namespace.get("averaged", namespace.get("gradients", [])))
        tell("end")
        signal.pause()
    finally:
        os._exit(1)


def attempt(tell: Callable[[str, str], None], function: Callable[[], None]) -> bool:
    """Whether it went well; tells the error otherwise."""
    try:
        function()
    except Exception as error:
        tell("error", f"{type(error).__name__}: {error}")
        return False
    return True


def stepped(ddp: torch.nn.Module, rank: int) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(10.0**rank).backward()
    return [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]


def show(tell: Callable[[str, str], None], tensors: list[torch.Tensor]) -> None:
    """One number per tensor; several, with bars between them, where its numbers differ."""
    tell("gradients", " ".join("|".join(f"{number:g}" for number in t.unique().tolist()) for t in tensors))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
