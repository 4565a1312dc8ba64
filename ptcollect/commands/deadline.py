"""Ends this process when its time is over, or when whoever started it is gone, whatever it is waiting for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PARENT = "PTCOLLECT_PARENT"
"""Names the process without which this one has nothing left to do."""


@contextmanager
def ends_after(seconds: float, who: str) -> Iterator[None]:
    """End the process if the block has not ended in time: a wait inside C++ cannot be interrupted in any other way."""

    def end() -> None:
        os.write(2, f"{who} is not done after {seconds:.0f} s and gives up\n".encode())
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_with_parent() -> None:
    """From now on end with the process that `PARENT` names; nothing if it names none."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="ptcollect parent", daemon=True).start()
