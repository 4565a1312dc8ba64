"""Starts real ranks that run compressed pipelines over gloo, and leaves what they end with in files.

As a script it is one rank: ``compression_ranks.py RANK SIZE FOLDER STORE TASK...`` runs the named tasks in order.
Tasks compare nothing: tests do, with the simulator or with each other.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from codec_table import CODECS, REDUCERS, gradients
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ptcollect as pc

C = pc.codecs
TESTS, PACKAGE = Path(__file__).parent, Path(pc.__file__).parents[1]


def launch(n: int, folder: Path, tasks: Sequence[str], *, bound: float = 60) -> None:
    """Run the tasks on `n` new processes; all of them must end well within `bound` seconds."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(TESTS)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    store = folder / f"store{time.monotonic_ns()}"
    command = [sys.executable, "-W", "error", __file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(n), str(folder), str(store), *tasks],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n)
    ]
    deadline, trouble = time.monotonic() + bound, []
    for rank, process in enumerate(processes):
        try:
            output = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = f"killed after {bound} s\n" + process.communicate()[0]
        if process.returncode or output:
            trouble.append(f"--- rank {rank}, exit code {process.returncode}\n{output[-4000:]}")
    if trouble:
        raise RuntimeError("\n".join(trouble))


def ended(folder: Path, task: str, n: int) -> list[Any]:
    """What each rank left."""
    return [torch.load(folder / f"{task}{rank}.pt", weights_only=True) for rank in range(n)]


# The table of pipelines ---------------------------------------------------------------------------------------------


def feedback(*stages: Any) -> pc.Pipeline:
    return pc.chain(pc.error_feedback(), *stages)


PIPELINES: tuple[pc.Pipeline, ...] = (
    *(pc.chain(pc.compress(codec), REDUCERS[i % 3]) for i, codec in enumerate(CODECS)),
    *(feedback(pc.bucketize(200), pc.compress(codec), reducer) for codec in CODECS for reducer in REDUCERS),
    *(feedback(pc.low_rank(2), pc.bucketize(), pc.compress(codec), REDUCERS[0]) for codec in CODECS),
    *(feedback(pc.low_rank(1), reducer) for reducer in REDUCERS),
    pc.chain(pc.low_rank(2), REDUCERS[1]),
    pc.partition(
        {
            "m*": feedback(pc.low_rank(2), pc.compress("int8"), pc.ring_reduce()),
            "s*": feedback(pc.bucketize(), pc.compress("sign"), pc.all_to_all_avg()),
            "nothing": feedback(pc.bucketize(), pc.compress("int4"), pc.ring_reduce()),
            "*": pc.all_gather_avg(),
        }
    ),
    pc.piecewise(
        {
            0: pc.ring_reduce(),
            1: feedback(pc.compress("sign"), pc.all_to_all_avg()),
            2: feedback(pc.low_rank(2), pc.compress("int4"), pc.ring_reduce()),
        }
    ),
    pc.chain(pc.skip_nonfinite(), feedback(pc.bucketize(), pc.compress("int8"), pc.ring_reduce())),
    pc.chain(pc.skip_nonfinite(), feedback(pc.low_rank(2), pc.all_to_all_avg())),
)


def steps(pipeline: pc.Pipeline) -> int:
    """Three where something changes with the step, and else two, so that the first one's state is used."""
    return 3 if pipeline.uses_step or "skip_nonfinite" in pipeline.state_names else 2


def one_spoilt(pipeline: pc.Pipeline, rank: int, n: int, step: int) -> dict[str, Tensor]:
    """The last rank's gradients have a NaN in step 1, where the pipeline is made for that."""
    tree = gradients(rank, step)
    if step == 1 and rank == n - 1 and "skip_nonfinite" in pipeline.state_names:
        tree["matrix"][1, 1] = float("nan")
    return tree


def table(rank: int, n: int, folder: Path) -> list[Any]:
    rows = []
    for pipeline in PIPELINES:
        state = pipeline.init(gradients(rank, 0)) if pipeline.stateful else None
        done = []
        for step in range(steps(pipeline)):
            with pc.traffic() as sent:
                tree, state = pipeline.update(one_spoilt(pipeline, rank, n, step), state)
            done.append({"tree": tree, "state": state, "sent": [sent.bytes, sent.messages, sent.rounds]})
        rows.append(done)
    return rows


# Checkpoints --------------------------------------------------------------------------------------------------------

TRAINED = pc.chain(
    pc.skip_nonfinite(),
    pc.error_feedback(),
    pc.low_rank(2),
    pc.bucketize(300),
    pc.compress(C.int8(stochastic=True)),
    pc.ring_reduce(),
)
SAVED_AT = 7


def seven_steps(rank: int, n: int, folder: Path) -> dict[str, Any]:
    """Train, save in both ways, and go on."""
    state = TRAINED.init(gradients(rank, 0))
    for step in range(SAVED_AT):
        _, state = TRAINED.update(gradients(rank, step), state)
    torch.save(state, folder / f"saved{rank}.pt")
    dcp.save({"sync": pc.rank_local(state)}, checkpoint_id=folder / "checkpoint")
    tree, after = TRAINED.update(gradients(rank, SAVED_AT), state)
    return {"state": state, "tree": tree, "after": after}


def eighth_step(rank: int, n: int, folder: Path) -> dict[str, Any]:
    """In a new process: load in both ways, and take the next step."""
    found = {"sync": pc.rank_local(TRAINED.init(gradients(rank, 0)))}
    dcp.load(found, checkpoint_id=folder / "checkpoint")
    loaded = {
        "distributed": pc.from_rank_local(found["sync"]),
        "torch": torch.load(folder / f"saved{rank}.pt", weights_only=True),
    }
    outcome: dict[str, Any] = {}
    for way, state in loaded.items():
        tree, after = TRAINED.update(gradients(rank, SAVED_AT), state)
        outcome[way] = {"state": state, "tree": tree, "after": after}
    return outcome


# DDP ----------------------------------------------------------------------------------------------------------------

HOOKED = pc.chain(pc.error_feedback(), pc.low_rank(2), pc.bucketize(), pc.compress("bf16"), pc.ring_reduce())
DDP_STEPS = 20


def model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), *hidden, nn.Linear(32, 4))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def hook(rank: int, n: int, folder: Path) -> dict[str, Any]:
    """Train twice: in DDP with `low_rank` as its hook, and in a plain loop."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    made = pc.as_ddp_hook(HOOKED, ddp)
    buckets: set[int] = set()

    def counted(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.add(bucket.index())
        return made(state, bucket)

    ddp.register_comm_hook(None, counted)
    plain = model()
    state = HOOKED.init(dict(plain.named_parameters()))
    for step in range(DDP_STEPS):
        data, target = batch(rank, step)
        for net in (ddp, plain):
            net.zero_grad()
            nn.functional.mse_loss(net(data), target).backward()
        mean, state = HOOKED.update({name: p.grad for name, p in plain.named_parameters()}, state)
        for name, p in plain.named_parameters():
            p.grad = mean[name]
        for net in (ddp, plain):
            for p in net.parameters():
                p.data -= 0.1 * p.grad
    return {
        "buckets": len(buckets),
        "hook": {"model": dict(ddp.module.state_dict()), "state": made.state},
        "loop": {"model": dict(plain.state_dict()), "state": state},
    }


# One rank -----------------------------------------------------------------------------------------------------------

TASKS = {task.__name__: task for task in (table, seven_steps, eighth_step, hook)}


def main(rank: int, n: int, folder: Path, store: str, tasks: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, n), rank=rank, world_size=n, timeout=timedelta(seconds=20)
    )
    for task in tasks:
        torch.save(TASKS[task](rank, n, folder), folder / f"{task}{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
