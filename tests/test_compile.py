"""`torch.compile` around pipelines, hooks and `overlap`: one graph break, nothing compiled again, the same bits."""

from __future__ import annotations

import copy
from typing import Any

import oracle
import pytest
import torch
from named_checks import collector, outcomes
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.parallel import DistributedDataParallel

import ptcollect as pc

pytestmark = pytest.mark.timeout(360)

CHECKS, check = collector()

MEAN = pc.chain(pc.bucketize(64), pc.ring_reduce(), pc.clip_by_global_norm(1.0))
RESIDUALS = pc.chain(pc.error_feedback(), pc.bucketize(64), pc.compress("int8"), pc.ring_reduce())


PIPELINES = {"mean": MEAN, "residuals": RESIDUALS}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank + 1))


def same(got: Any, wanted: Any) -> None:
    assert oracle.same_bits(got, wanted), f"got {got}, expected {wanted}"


@check(2)
def a_compiled_step_has_one_break(rank: int, n: int) -> None:
    from torch._dynamo.testing import CompileCounter

    model = network()

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).square().mean()

    def plain(params: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        grads = MEAN(grad(loss)(params, x))
        return {name: p - 0.1 * grads[name] for name, p in params.items()}

    def stateful(params: dict[str, Tensor], x: Tensor, state: Any) -> Any:
        grads, state = RESIDUALS.update(grad(loss)(params, x), state)
        return {name: p - 0.1 * grads[name] for name, p in params.items()}, state

    first = {name: p.detach() for name, p in model.named_parameters()}
    counter = CompileCounter()
    compiled = torch.compile(plain, backend=counter)
    mine = eager = first
    for step in range(4):
        mine, eager = compiled(mine, batch(step, rank)), plain(eager, batch(step, rank))
        assert counter.frame_count == 2, f"{counter.frame_count} graphs after step {step}"  # before and after the break
    same(mine, eager)

    counter = CompileCounter()
    compiled = torch.compile(stateful, backend=counter)
    (mine, state), (eager, wanted) = [(first, RESIDUALS.init(first))] * 2
    for step in range(4):
        mine, state = compiled(mine, batch(step, rank), state)
        eager, wanted = stateful(eager, batch(step, rank), wanted)
        assert counter.frame_count == 2, f"{counter.frame_count} graphs after step {step}"
    same(mine, eager)
    same(state["error_feedback"]["residual"], wanted["error_feedback"]["residual"])


@check(2, name=PIPELINES)
def overlap_and_hooks_around_a_compiled_model(rank: int, n: int, name: str) -> None:
    pipeline = PIPELINES[name]
    loop, overlapped, hooked = (network() for _ in range(3))
    handle = pc.overlap(pipeline, overlapped)
    ddp = DistributedDataParallel(hooked)
    ddp.register_comm_hook(None, pc.as_ddp_hook(pipeline, ddp))
    models = [torch.compile(model, backend="aot_eager") for model in (loop, overlapped, ddp)]
    state: Any = None
    for step in range(3):
        for model in models:
            model(batch(step, rank)).square().mean().backward()
        handle.wait()
        state = pc.sync_grads(pipeline, loop, state)
        wanted = {name: p.grad for name, p in loop.named_parameters()}
        same({name: p.grad for name, p in overlapped.named_parameters()}, wanted)
        same({name: p.grad for name, p in hooked.named_parameters()}, wanted)
        for model in (loop, overlapped, hooked):
            model.zero_grad()


@check(2)
def a_profile_names_stages_and_rounds(rank: int, n: int) -> None:
    one_bucket = pc.chain(pc.error_feedback(), pc.bucketize(), pc.compress("int8"), pc.ring_reduce())
    pipeline = pc.chain(pc.scale(2.0), one_bucket, pc.clip_by_global_norm(1.0))
    tree = {"a": batch(0, rank), "b": batch(1, rank)[0]}
    state = pipeline.init(tree)
    with torch.profiler.profile() as profile:
        pipeline.update(copy.deepcopy(tree), state)
    names = {event.name.removeprefix("ptcollect: ") for event in profile.events() if "ptcollect: " in event.name}
    for wanted in (
        "scale(2.0)",
        "error_feedback, add residuals",
        "agreement, round 1",
        "pack bucket0 (b to a)",
        "encode int8(), bucket0 (b to a)",
        "ring_reduce, round 1 of bucket0 (b to a)",
        "ring_reduce, round 2 of bucket0 (b to a)",
        "decode and add int8(), bucket0 (b to a)",
        "unpack bucket0 (b to a)",
        "clip_by_global_norm(1.0)",
    ):
        assert wanted in names, f"{wanted!r} is not in {sorted(names)}"


@pytest.mark.parametrize(("n", "name"), [(2, name) for name in CHECKS])
def test_compile(n: int, name: str, request: pytest.FixtureRequest):
    report = outcomes(__name__, n, request).report(name)
    if report:
        pytest.fail(report, pytrace=False)
