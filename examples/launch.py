"""Start an example on several ranks: `launch(main)` is all that the examples need of this file.

Under torchrun the ranks exist already and `main` runs in this process. Otherwise the ranks are started here, on this
machine. Either way `main` finds a gloo process group.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SILENCE = timedelta(seconds=60)  # a rank that waits longer than this for another one fails


def launch(main: Callable[..., None], *args: Any, ranks: int = 2, timeout: float = 300) -> None:
    """Run ``main(*args)`` on every rank and return when all have ended.

    Args:
        main: a function at the top level of a module, as other processes have to find it.
        *args: its arguments, the same on all ranks.
        ranks: how many to start; under torchrun, its own number counts.
        timeout: seconds after which the ranks started here are killed.

    Raises:
        ProcessRaisedException: a rank raised; its traceback is in the message. The others have been stopped.
        TimeoutError: not all ranks ended in time.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _run(main, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = Path(folder) / "store"
        started = mp.spawn(_started, (ranks, meeting_point, main, args), nprocs=ranks, join=False, daemon=True)
        deadline = time.monotonic() + timeout
        try:
            while not started.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"not all of the {ranks} ranks ended within {timeout:g} s")
        finally:
            for process in started.processes:
                process.kill()
                process.join()


def _started(rank: int, ranks: int, meeting_point: Path, main: Callable[..., None], args: tuple[Any, ...]) -> None:
    # A wait inside gloo never returns to the interpreter, so only the default action lets Ctrl-C end a rank at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Linux sends that signal too when the parent dies; this is for a parent that died before it was asked to.
    parent = parent_process()
    if parent is None or not parent.is_alive():
        raise SystemExit("the process that started this rank is gone")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # the host's name may not resolve
    _run(main, args, store=dist.FileStore(str(meeting_point), ranks), rank=rank, world_size=ranks)


def _run(main: Callable[..., None], args: tuple[Any, ...], **where: Any) -> None:
    torch.set_num_threads(1)  # ranks share the cores of one machine
    dist.init_process_group("gloo", timeout=SILENCE, **where)
    main(*args)
    dist.destroy_process_group()
