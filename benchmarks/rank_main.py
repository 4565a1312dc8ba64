"""One rank of a scenario: `run.py` starts as many as the scenario has ranks; rank 0 writes what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from hierarchical import hierarchical
from memory import memory
from ranks import Measured
from sync import Settings, compression, dense, sizes, small, tuning
from training import training

SCENARIOS: dict[str, Callable[[Settings], list[Measured]]] = {
    "sizes": sizes,
    "dense": dense,
    "small": small,
    "compression": compression,
    "tuning": tuning,
    "training": training,
    "memory": memory,
    "hierarchical": hierarchical,
}


def main(scenario: str, settings: str, out: str) -> None:
    """Run one scenario on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    measured = SCENARIOS[scenario](Settings(**json.loads(settings)))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps([asdict(each) for each in measured]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
