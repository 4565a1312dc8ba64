"""Whole training steps: forward, backward, synchronisation and SGD, each way to synchronise beside plain DDP."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks import Measured, slowest
from sync import Settings
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ptcollect as pc

BATCH = 16
ROUNDS = 25

# A bucket for each large layer: it can leave when the layer's gradient is there.
BUCKETS = pc.bucketize("4MiB")
RING = pc.chain(BUCKETS, pc.ring_reduce())
BF16 = pc.chain(BUCKETS, pc.compress("bf16"), pc.ring_reduce())
INT8 = pc.chain(pc.error_feedback(), BUCKETS, pc.compress("int8"), pc.ring_reduce())
LOW_RANK = pc.chain(pc.error_feedback(), pc.low_rank(4), pc.bucketize(), pc.ring_reduce())

Step = Callable[[Tensor], None]


@dataclass(frozen=True)
class Way:
    """A way to train: `make` returns a function that makes one step, up to and without the optimiser's."""

    key: str
    title: str
    make: Callable[[nn.Module], Step]
    tolerance: float | None = 1e-4
    """How far parameters may be from plain DDP's in the end, of the largest; None: only equal on all ranks."""


def under_ddp(hook: Callable[[DistributedDataParallel], tuple[Any, Any] | None], **options: Any) -> Any:
    """Steps under DDP with what `hook` gives for it."""

    def make(model: nn.Module) -> Step:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
        registered = hook(ddp)
        if registered is not None:
            ddp.register_comm_hook(*registered)
        return lambda x: ddp(x).square().mean().backward()

    return make


def hooked(pipeline: pc.Pipeline, **options: Any) -> Any:
    """Steps under DDP with a pipeline as its hook."""
    return under_ddp(lambda ddp: (None, pc.as_ddp_hook(pipeline, ddp, **options)))


def power_sgd(ddp: DistributedDataParallel) -> tuple[Any, Any]:
    """Torch's own PowerSGD of rank 4, as early as it allows; with several buckets it hangs on gloo."""
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


def overlapping(model: nn.Module) -> Step:
    """Steps with `pc.overlap`, without DDP."""
    handle = pc.overlap(RING, model)

    def step(x: Tensor) -> None:
        with handle:
            model(x).square().mean().backward()

    return step


def with_sync_grads(model: nn.Module) -> Step:
    """Steps that synchronise after backward: nothing is hidden."""

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        pc.sync_grads(RING, model)

    return step


def alone(model: nn.Module) -> Step:
    """Steps without synchronisation: what computing alone takes."""
    return lambda x: model(x).square().mean().backward()


WAYS = [
    Way("ddp", "plain DDP", under_ddp(lambda ddp: None)),
    Way(
        "ddp_fp16",
        "DDP, torch's fp16_compress_hook",
        under_ddp(lambda ddp: (None, default_hooks.fp16_compress_hook)),
        1e-2,
    ),
    Way(
        "ddp_power_sgd",
        "DDP in one bucket, torch's powerSGD_hook of rank 4",
        under_ddp(power_sgd, bucket_cap_mb=100),
        None,
    ),
    # Without the module, whose parameters it would take one by one: DDP's buckets are what is reduced.
    Way(
        "hook_native", "DDP, as_ddp_hook(all_reduce())", under_ddp(lambda ddp: (None, pc.as_ddp_hook(pc.all_reduce())))
    ),
    Way("hook_ring", f"DDP, as_ddp_hook({RING!r})", hooked(RING)),
    Way("hook_bf16", f"DDP, as_ddp_hook({BF16!r})", hooked(BF16), 1e-2),
    Way("hook_int8", f"DDP, as_ddp_hook({INT8!r})", hooked(INT8), 1e-2),
    Way("hook_low_rank", f"DDP, as_ddp_hook({LOW_RANK!r})", hooked(LOW_RANK), None),
    Way("overlap_ring", f"overlap({RING!r})", overlapping),
    Way("sync_grads", f"sync_grads({RING!r}) after backward", with_sync_grads),
    Way("alone", "no synchronisation", alone, None),
]


def perceptron() -> nn.Module:
    """6.57 million parameters, 26 MB, in eight layers."""
    torch.manual_seed(0)
    widths = [256, *[1024] * 7, 10]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def training(settings: Settings) -> list[Measured]:
    """Seconds of a step each way, in turn; every way trains a model of its own on the same data."""
    x = torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = [perceptron() for _ in WAYS]
    steps = [way.make(model) for way, model in zip(WAYS, models, strict=True)]
    optimisers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    size = sum(p.nbytes for p in models[0].parameters())
    taken: list[list[float]] = [[] for _ in WAYS]
    begin = time.perf_counter()
    for turn in range(-2, ROUNDS):  # DDP rebuilds its buckets in the second step
        if turn == 0:
            begin = time.perf_counter()
        elif turn >= 3 and slowest(time.perf_counter() - begin) > settings.seconds:
            break
        for offset in range(len(WAYS)):
            i = (turn + offset) % len(WAYS)
            dist.barrier()
            start = time.perf_counter()
            steps[i](x)
            optimisers[i].step()
            optimisers[i].zero_grad()
            if turn >= 0:
                taken[i].append(time.perf_counter() - start)
    check_models(models)
    samples = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(samples, op=dist.ReduceOp.MAX)
    sent = sent_bytes(models[0])
    return [
        Measured(way.key, way.title, seconds, "ddp", sent.get(way.key), size)
        for way, seconds in zip(WAYS, samples.tolist(), strict=True)
    ]


def check_models(models: Sequence[nn.Module]) -> None:
    """Raise if a way has not trained what plain DDP has, or ranks have trained different models."""
    for way, model in zip(WAYS, models, strict=True):
        for p, q in zip(model.parameters(), models[0].parameters(), strict=True):
            error = float((p - q).detach().abs().max() / q.detach().abs().max())
            if way.tolerance is not None and not error <= way.tolerance:
                raise RuntimeError(f"{way.title}: parameters are off by {error:.1e}")
        numbers = torch.cat([p.detach().view(-1) for p in model.parameters()])
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, hashlib.sha256(numbers.numpy().tobytes()).hexdigest())
        if way.key != "alone" and len(set(digests)) > 1:
            raise RuntimeError(f"{way.title}: ranks have different parameters")


def sent_bytes(model: nn.Module) -> dict[str, float]:
    """What one rank sends in a step, by way; measured with `pc.traffic` for ours, a ring's for torch's all_reduce."""
    grads = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    n = dist.get_world_size()
    dense = sum(leaf.nbytes for leaf in grads.values()) * 2 * (n - 1) / n
    sent = {"ddp": dense, "ddp_fp16": dense / 2, "hook_native": dense}
    for key, pipeline in (("hook_ring", RING), ("hook_bf16", BF16), ("hook_int8", INT8), ("hook_low_rank", LOW_RANK)):
        with pc.traffic() as traffic:
            pipeline.update(grads, pipeline.init(grads))
        sent[key] = float(traffic.bytes)
    return {**sent, "overlap_ring": sent["hook_ring"], "sync_grads": sent["hook_ring"]}
