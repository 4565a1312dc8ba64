"""PowerSGD as a communication hook of DistributedDataParallel: torch's own beside `pc.as_ddp_hook(low_rank)`.

Each case trains a small model for 20 steps on 4 gloo ranks, in processes of its own that are ended after a time limit,
since torch's hook hangs. Training stops at gradients that are NaN or infinite.

| case | is |
|---|---|
| one bucket | 4 linear layers of 64 x 64 in one bucket of DDP's |
| several buckets | the same in a bucket per layer |
| zero matrix | one bucket, and a loss whose gradients are all zero |
"""

from __future__ import annotations

import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import netlab
import torch
import torch.distributed as dist
from torch import nn

import ptcollect as pc

WORLD_SIZE = 4
STEPS = 20
CASES = ("one bucket", "several buckets", "zero matrix")
HOOKS = {"torch": "torch powerSGD_hook, rank 2", "ptcollect": "pc.as_ddp_hook, low_rank(2)"}


# One rank -----------------------------------------------------------------------------------------------------------


def train(hook: str, case: str, out: Path) -> None:
    """Train on this rank, and write how it went after every step, so that an abort leaves its mark too."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    buckets = 64 * 64 * 4 / 2**20 if case == "several buckets" else 25.0
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=buckets)
    register(hook, ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        result = ddp(torch.randn(8, 64, generator=generator)).square().mean()
        (result * 0 if case == "zero matrix" else result).backward()
        bad = sum(int((~torch.isfinite(p.grad)).sum()) for p in model.parameters() if p.grad is not None)
        out.with_suffix(f".{dist.get_rank()}").write_text(f"{step + 1} {bad}")
        if bad:
            break
        optimizer.step()
    dist.destroy_process_group()


def register(hook: str, ddp: nn.parallel.DistributedDataParallel) -> None:
    """Give `ddp` the hook, with a rank of 2 from the first step that torch allows on."""
    if hook == "ptcollect":
        sync = pc.chain(pc.error_feedback(), pc.low_rank(2), pc.bucketize(), pc.ring_reduce())
        ddp.register_comm_hook(None, pc.as_ddp_hook(sync, ddp))
        return
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


# All ----------------------------------------------------------------------------------------------------------------


def outcome(hook: str, case: str, limit: float) -> tuple[int, str]:
    """Run one case on all ranks, for `limit` seconds at most: steps made by all ranks, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rank"
        command = [sys.executable, __file__, hook, case, str(out)]
        try:
            netlab.run_ranks(command, WORLD_SIZE, None, limit, {"TORCH_CPP_LOG_LEVEL": "FATAL"})
            ended = "finishes"
        except netlab.NetlabError as error:
            ended = f"hangs, stopped after {limit:g} s" if "still running" in str(error) else f"fails: {error}"
        wrote = [tuple(map(int, file.read_text().split())) for file in Path(folder).iterdir()]
    steps = min((step for step, _ in wrote), default=0) if len(wrote) == WORLD_SIZE else 0
    bad = max((numbers for _, numbers in wrote), default=0)
    if bad:
        return steps - 1, f"{bad} numbers of the gradients not finite at step {steps}"
    return steps, ended


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
