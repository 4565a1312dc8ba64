"""What a call costs in Python when its plan is made and nothing travels: microseconds of a warm `update`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from echo_transport import echo_group
from ranks import Carried, Measured

import ptcollect as pc

WORLD = 4
CALLS = 50


def overhead(seconds: float) -> list[Measured]:
    """Pipelines on trees of 16 and 200 leaves of 1 KiB, on rank 0 of 4 whose peers answer at once."""
    rows = []
    for count in (16, 200):
        tree = {f"layer{i}.weight": torch.ones(16, 16) for i in range(count)}
        for key, pipeline in pipelines().items():
            with echo_group(WORLD):
                run = Carried(pipeline, tree)
                for _ in range(5):
                    run(tree)
                samples: list[float] = []
                begin = time.perf_counter()
                while len(samples) < 5 or (len(samples) < 40 and time.perf_counter() - begin < seconds / 12):
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        run(tree)
                    samples.append((time.perf_counter() - start) / CALLS)
            rows.append(Measured(f"{key}, {count} leaves", f"{pipeline!r}, {count} leaves", samples, size=count * 1024))
    return rows


def pipelines() -> dict[str, pc.Pipeline]:
    """Whose overhead is stated."""
    return {
        "ring": pc.chain(pc.bucketize(), pc.ring_reduce()),
        "direct": pc.chain(pc.bucketize(), pc.all_to_all_avg()),
        "int8": pc.chain(pc.error_feedback(), pc.bucketize(), pc.compress("int8"), pc.ring_reduce()),
        "low_rank": pc.chain(pc.error_feedback(), pc.low_rank(4), pc.bucketize(), pc.ring_reduce()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[2]).write_text(json.dumps([asdict(row) for row in overhead(float(sys.argv[1]))]))
