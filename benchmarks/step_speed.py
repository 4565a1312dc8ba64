"""How long a whole training step takes with each way to synchronise, as ratios to plain DDP in the same run.

    sudo python benchmarks/step_speed.py                                     # 200 Mbit/s, 1 Gbit/s and loopback
    python benchmarks/step_speed.py --rates loopback --repeats 21 --json out.json

Four gloo ranks train a perceptron with 26 MB of parameters: forward, backward, synchronisation, SGD. See README.md
beside this file for what is measured and how.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import netlab
import torch
import torch.distributed as dist
from sync_speed import Row, format_table
from sync_speed import _row as compared
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ptcollect as pc

WORLD_SIZE = 4
TIMEOUT_SECONDS = 500.0
BATCH = 32

# A bucket for each large layer: it can leave when the layer's gradient is there.
RING = pc.chain(pc.bucketize("4MiB"), pc.ring_reduce())
NATIVE = pc.all_reduce()
BF16 = pc.chain(pc.bucketize("4MiB"), pc.compress("bf16"), pc.ring_reduce())

# The largest ratio that is good enough, and to whose time.
SHAPED: dict[str, tuple[float, str]] = {
    "hook_ring": (1.0, "ddp"),
    "hook_bf16": (0.95, "ddp_fp16"),
    "overlap_ring": (1.0, "ddp"),
}
LOOPBACK: dict[str, tuple[float, str]] = {"hook_native": (1.05, "ddp")}


@dataclass(frozen=True)
class Contender:
    """A way to train: `make` returns a function that makes one step, up to and without the optimiser's."""

    key: str
    title: str
    make: Callable[[nn.Module], Callable[[torch.Tensor], None]]


def under_ddp(hook: Callable[[DistributedDataParallel], tuple[Any, Any] | None]) -> Callable[[nn.Module], Any]:
    """Steps under DDP with what `hook` gives for it."""

    def make(model: nn.Module) -> Callable[[torch.Tensor], None]:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        registered = hook(ddp)
        if registered is not None:
            ddp.register_comm_hook(*registered)
        return lambda x: ddp(x).square().mean().backward()

    return make


def overlapping(**options: Any) -> Callable[[nn.Module], Callable[[torch.Tensor], None]]:
    """Steps with `pc.overlap`, without DDP."""

    def make(model: nn.Module) -> Callable[[torch.Tensor], None]:
        handle = pc.overlap(RING, model, **options)

        def step(x: torch.Tensor) -> None:
            with handle:
                model(x).square().mean().backward()

        return step

    return make


def with_sync_grads(model: nn.Module) -> Callable[[torch.Tensor], None]:
    """Steps that synchronise after backward: nothing is hidden."""

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        pc.sync_grads(RING, model)

    return step


def alone(model: nn.Module) -> Callable[[torch.Tensor], None]:
    """Steps without synchronisation: what computing alone takes."""
    return lambda x: model(x).square().mean().backward()


def hooked(pipeline: pc.Pipeline, **options: Any) -> Callable[[nn.Module], Callable[[torch.Tensor], None]]:
    """Steps under DDP with a pipeline as its hook."""
    return under_ddp(lambda ddp: (None, pc.as_ddp_hook(pipeline, ddp, **options)))


CONTENDERS = [
    Contender("ddp", "plain DDP (baseline)", under_ddp(lambda ddp: None)),
    Contender("ddp_fp16", "DDP, fp16_compress_hook", under_ddp(lambda ddp: (None, default_hooks.fp16_compress_hook))),
    Contender("hook_ring", "DDP, as_ddp_hook(bucketize, ring_reduce)", hooked(RING)),
    Contender("hook_ring_first", 'the same with check="first"', hooked(RING, check="first")),
    Contender("hook_bf16", "DDP, as_ddp_hook(bucketize, bf16, ring_reduce)", hooked(BF16)),
    Contender("hook_native", "DDP, as_ddp_hook(all_reduce)", under_ddp(lambda ddp: (None, pc.as_ddp_hook(NATIVE)))),
    Contender("overlap_ring", "overlap(bucketize, ring_reduce)", overlapping()),
    Contender("overlap_first", 'overlap(bucketize, ring_reduce), check="first"', overlapping(check="first")),
    Contender("sync_grads", "sync_grads(bucketize, ring_reduce) after backward", with_sync_grads),
    Contender("alone", "no synchronisation", alone),
]
TITLES = {contender.key: contender.title for contender in CONTENDERS}


# One rank -----------------------------------------------------------------------------------------------------------


def perceptron() -> nn.Module:
    """26 MB of parameters in seven layers."""
    torch.manual_seed(0)
    widths = [256, *[1024] * 6, 1000]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def rank_main(out: Path, rounds: int) -> None:
    """Time every contender in turn; rank 0 writes seconds by contender and round, the worst over the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    x = torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = [perceptron() for _ in CONTENDERS]
    steps = [contender.make(model) for contender, model in zip(CONTENDERS, models, strict=True)]
    optimisers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    seconds = torch.zeros(len(CONTENDERS), rounds, dtype=torch.float64)
    for turn in range(-3, rounds):  # DDP rebuilds its buckets in the second step
        for offset in range(len(CONTENDERS)):
            i = (turn + offset) % len(CONTENDERS)
            dist.barrier()
            start = time.perf_counter()
            steps[i](x)
            optimisers[i].step()
            optimisers[i].zero_grad()
            if turn >= 0:
                seconds[i, turn] = time.perf_counter() - start
    check_equal(models)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seconds.tolist()))
    dist.barrier()
    dist.destroy_process_group()


def check_equal(models: Sequence[nn.Module]) -> None:
    """Raise if a contender has not trained what plain DDP has."""
    for contender, model in zip(CONTENDERS, models, strict=True):
        tolerance = 1e-2 if contender.key in ("ddp_fp16", "hook_bf16") else 1e-4
        for p, q in zip(model.parameters(), models[0].parameters(), strict=True):
            error = float((p - q).detach().abs().max() / q.detach().abs().max())
            if contender.key != "alone" and not error <= tolerance:
                raise RuntimeError(f"{contender.title}: parameters are off by {error:.1e}")


# Table --------------------------------------------------------------------------------------------------------------


def measure(rate: str, rounds: int, tcp: str) -> list[Row]:
    """The rows for one kind of link."""
    link = netlab.link_rate(rate)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        command = [sys.executable, __file__, "--rank-out", str(out), "--repeats", str(rounds)]
        netlab.run_ranks(command, WORLD_SIZE, link, TIMEOUT_SECONDS, tcp=None if tcp == "machine" else tcp)
        seconds = dict(zip([each.key for each in CONTENDERS], json.loads(out.read_text()), strict=True))
    goals = {key: goal for key, (goal, _) in ({} if link else LOOPBACK).items()}
    rows = [
        compared(f"{rate}: {title}", seconds[key], seconds["ddp"], "ms", goals.get(key))
        for key, title in TITLES.items()
    ]
    for key, (goal, other) in (SHAPED if link else {}).items():
        what = f"{rate}: {TITLES[key]} : {TITLES[other]}"
        rows.append(compared(what, seconds[key], seconds[other], "ms", goal))
    return rows


def hidden(rows: Sequence[Row], rate: str) -> str:
    """How much of what `sync_grads` adds to a step the others save, by working while backward does."""
    medians = {row.what.removeprefix(f"{rate}: "): row.value for row in rows}
    computing, exposed = medians[TITLES["alone"]], medians[TITLES["sync_grads"]]
    shares = [
        f"{key} {(exposed - medians[TITLES[key]]) / (exposed - computing):.0%}"
        for key in ("hook_ring", "overlap_ring", "ddp")
    ]
    most = min(1.0, computing / (exposed - computing))
    return (
        f"{rate}: of the {exposed - computing:.0f} ms that sync_grads adds to {computing:.0f} ms, saved by "
        f"{', '.join(shares)}; no more than {most:.0%} can be hidden"
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit", "loopback"])
    parser.add_argument("--repeats", type=int, default=9, help="rounds after the warm-up (default 9)")
    parser.add_argument(
        "--tcp", default="reno", help="congestion control behind shaped links, or `machine` for its own"
    )
    parser.add_argument("--json", type=Path, help="also write the rows and all samples here")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_out:
        rank_main(args.rank_out, args.repeats)
        return
    netlab.exit_on_sigterm()
    by_rate = {rate: measure(rate, args.repeats, args.tcp) for rate in args.rates}
    rows = [row for each in by_rate.values() for row in each]
    print(format_table(rows, markdown=args.markdown))
    for rate, each in by_rate.items():
        print(hidden(each, rate))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) | {"cpus": os.cpu_count()} for row in rows], indent=1))


if __name__ == "__main__":
    main()
