"""Named checks on real ranks: one launch per test module and world size runs them all, and each is a test of its own.

A module fills a table with `check` and asks `outcomes` for what became of it. Every check runs in a process group of
its own with a short timeout, and one that hangs ends its rank, so that nothing ever hangs the suite.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ptcollect as pc

TIMEOUT = 10.0
"""Seconds that a group waits; a check that says "at once" means less than half."""


@dataclass(frozen=True)
class Check:
    """What every rank does, a function of (rank, n), and on how many ranks."""

    function: Callable[[int, int], None]
    sizes: tuple[int, ...]


def collector() -> tuple[dict[str, Check], Callable[..., Any]]:
    """An empty table of checks and the decorator that fills it.

    Two ranks run every combination of the options' values, more ranks as many as show every value once.
    """
    checks: dict[str, Check] = {}

    def check(*sizes: int, **options: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def made(function: Callable[..., None]) -> Callable[..., None]:
            lists = [list(values) for values in options.values()]
            longest = max(map(len, lists), default=1)
            diagonal = {tuple(values[i % len(values)] for values in lists) for i in range(longest)}
            for values in itertools.product(*lists):
                chosen = dict(zip(options, values, strict=True))
                name = function.__name__ + "".join(f", {key}={value}" for key, value in chosen.items())
                wanted = sizes or (2, 4)
                if values not in diagonal:
                    wanted = tuple(n for n in wanted if n == 2)
                checks[name] = Check(functools.partial(function, **chosen), wanted)
            return function

        return made

    return checks, check


@dataclass(frozen=True)
class Ended:
    """What became of the checks on each rank."""

    names: Sequence[str]
    """The checks in order."""
    outcomes: list[dict[str, str]]
    """By rank: name of the check -> "" or the traceback."""
    exit_codes: list[int | None]
    """None: killed here, after too long."""
    output: list[str]

    def report(self, name: str) -> str:
        """What went wrong with a check, on all ranks; "" if nothing did."""
        troubles = {rank: self._trouble(name, rank) for rank in range(len(self.outcomes))}
        return "\n".join(f"--- rank {rank}\n{trouble}" for rank, trouble in troubles.items() if trouble)

    def _trouble(self, name: str, rank: int) -> str:
        ended = self.outcomes[rank]
        if name in ended:
            return ended[name]
        last = self.names[len(ended)]
        if name != last:
            return f"never came to this check: it ended in {last!r}"
        return f"never ended the check: exit code {self.exit_codes[rank]}, output\n{self.output[rank]}"


def launch(module: str, n: int, names: Sequence[str], *, bound: float = 300.0, **environment: str) -> Ended:
    """Run checks of `module` on `n` ranks, each in a world of its own, and wait for at most `bound` seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(pc.__file__).parents[1]), str(Path(__file__).parent)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # DDP's advice on find_unused_parameters and create_graph
        "TORCH_DISTRIBUTED_DEBUG": "OFF",  # with DETAIL torch 2.13's DDP segfaults, with any hook or none
        **environment,
    }
    code = "import sys, named_checks; named_checks.work(*sys.argv[1:])"
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / f"{rank}.jsonl", Path(folder) / f"{rank}.txt") for rank in range(n)]
        processes = []
        for rank, (lines, text) in enumerate(files):
            command = [
                sys.executable,
                "-W",
                "error",
                "-c",
                code,
                module,
                str(rank),
                str(n),
                str(store.port),
                str(lines),
            ]
            with text.open("w") as stream:
                processes.append(
                    subprocess.Popen(
                        [*command, *names], env=environment, stdout=stream, stderr=subprocess.STDOUT, cwd=folder
                    )
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
        return Ended(names, outcomes, exit_codes, [text.read_text()[-4000:] for _, text in files])


def work(module: str, rank: str, n: str, port: str, out: str, *names: str) -> None:
    """One rank: runs the checks in order and writes one line of JSON per check."""
    checks: dict[str, Check] = importlib.import_module(module).CHECKS
    torch.set_num_threads(1)
    gc.freeze()  # torch's own objects make every collection slow
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    for name in names:
        faulthandler.dump_traceback_later(3 * TIMEOUT, exit=True)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, store),
            rank=int(rank),
            world_size=int(n),
            timeout=timedelta(seconds=TIMEOUT),
        )
        trouble = ""
        try:
            checks[name].function(int(rank), int(n))
        except Exception:
            trouble = traceback.format_exc()
        with Path(out).open("a") as lines:
            lines.write(json.dumps([name, trouble]) + "\n")
        if store.add(f"{name}/ended", 1) == int(n):
            store.set(f"{name}/all", "")
        store.wait([f"{name}/all"])  # nobody leaves a group in which others still work
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def outcomes(module: str, n: int, request: pytest.FixtureRequest) -> Ended:
    """What became of the checks on `n` ranks; launches once, and only what the session selected."""
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function.__module__ == module
        and hasattr(item, "callspec")
        and item.callspec.params.get("n") == n
        and "name" in item.callspec.params
    ]
    return _launched(module, n, tuple(chosen))


@functools.cache
def _launched(module: str, n: int, names: tuple[str, ...]) -> Ended:
    return launch(module, n, names)


# Models and data ----------------------------------------------------------------------------------------------------
