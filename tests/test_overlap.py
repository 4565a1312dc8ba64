"""`overlap` on real ranks: after every step gradients and state equal those of `sync_grads`, bit for bit."""

from __future__ import annotations

import copy
import gc
import random
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from named_checks import TIMEOUT, collector, outcomes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ptcollect as pc

pytestmark = pytest.mark.timeout(360)

CHECKS, check = collector()

PIPELINES = {
    "ring": pc.chain(pc.bucketize(256), pc.ring_reduce()),
    "without buckets": pc.ring_reduce(),
    "native": pc.chain(pc.bucketize(128), pc.all_reduce()),
    "scaled": pc.chain(pc.scale(0.5), pc.clip_by_value(0.1), pc.bucketize(200), pc.all_to_all_avg(), pc.scale(2.0)),
    "clipped after": pc.chain(pc.bucketize(256), pc.ring_reduce(), pc.clip_by_global_norm(0.1)),
    "clipped before": pc.chain(pc.clip_by_global_norm(0.1), pc.bucketize(256), pc.ring_reduce()),
    "residuals": pc.chain(pc.error_feedback(), pc.bucketize(256), pc.compress("int8"), pc.ring_reduce()),
    "random": pc.chain(pc.error_feedback(), pc.compress(pc.codecs.randk(0.3)), pc.all_to_all_avg()),
    "low rank": pc.chain(pc.error_feedback(), pc.low_rank(1), pc.ring_reduce()),
    "finite": pc.chain(pc.skip_nonfinite(), pc.error_feedback(), pc.compress("bf16"), pc.all_gather_avg()),
    "partition": pc.partition(
        {
            "*.bias": pc.all_to_all_avg(),
            "*": pc.chain(pc.error_feedback(), pc.bucketize(128), pc.compress("sign"), pc.all_to_all_avg()),
        }
    ),
    "pieces": pc.piecewise(
        {
            0: pc.chain(pc.bucketize(), pc.ring_reduce()),
            2: pc.chain(pc.error_feedback(), pc.bucketize(), pc.compress("int4"), pc.ring_reduce()),
        }
    ),
}


class Net(nn.Module):
    """Layers whose forward order is not that of registration, a tied weight, a frozen one, and optional branches."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 2)
        self.first = nn.Linear(4, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6, bias=i % 2 == 0) for i in range(4))
        self.branches[2].weight = self.branches[0].weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: Tensor, used: Sequence[int] = range(4), *, again: bool = False) -> Tensor:
        x = self.first(x) * self.frozen + self.shift
        for i in used:
            layer = self.branches[i]
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if again else layer(x))
        return self.last(x)


def seeded() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank + 1))


class Pair:
    """Two copies of a model: one under `overlap`, one under `sync_grads`."""

    def __init__(self, pipeline: pc.Pipeline, **options: Any) -> None:
        self.pipeline = pipeline
        self.model, self.loop = seeded(), seeded()
        self.handle = pc.overlap(pipeline, self.model, **options)
        self.group = options.get("group")
        self.state: Any = None

    def backward(self, run: Callable[[Net], Tensor]) -> None:
        for model in (self.model, self.loop):
            run(model).square().sum().backward()

    def compare(self) -> None:
        self.handle.wait()
        self.state = pc.sync_grads(self.pipeline, self.loop, self.state, group=self.group)
        same(
            {n: p.grad for n, p in self.model.named_parameters()}, {n: p.grad for n, p in self.loop.named_parameters()}
        )
        same(self.handle.state, self.state)
        with torch.no_grad():
            for model in (self.model, self.loop):
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.05 * p.grad
        for model in (self.model, self.loop):
            model.zero_grad()


def same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            same(got[key], value)
    elif isinstance(wanted, Tensor):
        assert oracle.same_bits(got, wanted), f"got {got}, expected {wanted}"
    else:
        assert got == wanted


@check(2, 4, name=PIPELINES)
def every_pipeline_equals_the_loop(rank: int, n: int, name: str) -> None:
    pair = Pair(PIPELINES[name])
    for step in range(4):
        pair.backward(lambda net, step=step: net(batch(step, rank)))
        pair.compare()


@check(2, 4)
def the_result_is_the_mean(rank: int, n: int) -> None:
    model = seeded()
    handle = pc.overlap(PIPELINES["ring"], model)
    model(batch(0, rank)).sum().backward()
    handle.wait()
    wanted = []
    for other in range(n):
        alone = seeded()
        alone(batch(0, other)).sum().backward()
        wanted.append([p.grad for p in alone.parameters() if p.grad is not None])
    for mine, *theirs in zip([p for p in model.parameters() if p.requires_grad], *wanted, strict=True):
        mean = torch.stack([t.double() for t in theirs]).mean(0)
        assert torch.allclose(mine.grad.double(), mean, rtol=1e-6, atol=1e-7)


USES: dict[str, Callable[[int, int], Sequence[int]]] = {
    "the same on all ranks": lambda step, rank: (0, 3),
    "others at every step": lambda step, rank: (step % 4,),
    "others on every rank": lambda step, rank: (rank % 4, (rank + step) % 4),
    "first few, then all": lambda step, rank: range(4) if step > 1 else (1,),
    "none on rank 1": lambda step, rank: () if rank == 1 else (1, 2),
}


@check(2, 4, use=USES, name=("ring", "residuals", "clipped before", "low rank", "native"))
def unused_parameters_follow_the_loop(rank: int, n: int, use: str, name: str) -> None:
    pair = Pair(PIPELINES[name])
    for step in range(5):
        pair.backward(lambda net, step=step: net(batch(step, rank), USES[use](step, rank)))
        pair.compare()


@check(2, name=("ring", "residuals"))
def one_rank_has_no_gradient_at_all(rank: int, n: int, name: str) -> None:
    pair = Pair(PIPELINES[name])
    for step in range(3):
        if rank == 0 or step == 1:
            pair.backward(lambda net, step=step: net(batch(step, rank)))
        pair.compare()


@check(2, name=("ring", "residuals", "native"))
def reentrant_checkpoints(rank: int, n: int, name: str) -> None:
    pair = Pair(PIPELINES[name])
    for step in range(3):
        pair.backward(lambda net, step=step: net(batch(step, rank).requires_grad_(), (0, 1, 3), again=True))
        pair.compare()


@check(2, 4, name=("ring", "residuals"))
def accumulation_is_synchronised_once(rank: int, n: int, name: str) -> None:
    pair = Pair(PIPELINES[name])
    for step in range(3):
        with pc.traffic() as nothing, pair.handle.no_sync():
            # A branch that only the first micro-batch uses counts too.
            pair.backward(lambda net, step=step: net(batch(step, rank), (0, 1)))
            pair.backward(lambda net, step=step: net(batch(step + 50, rank), (0,)))
        assert nothing.bytes == 0
        pair.backward(lambda net, step=step: net(batch(step + 99, rank), (0, 3)))
        pair.compare()


@check(2)
def a_second_backward_without_wait_is_an_error(rank: int, n: int) -> None:
    model = seeded()
    handle = pc.overlap(PIPELINES["ring"], model)
    model(batch(0, rank)).sum().backward()
    with pytest.raises(
        pc.PipelineError, match=r"gradient of '.*' was added to while it is being synchronised.*no_sync"
    ):
        model(batch(1, rank)).sum().backward()
    dist.barrier()
    handle.remove()


@check(2)
def a_call_before_wait_is_an_error_and_not_a_wait(rank: int, n: int) -> None:
    # The call would wait for the unused branch, which only handle.wait() can declare missing.
    pair = Pair(PIPELINES["ring"])
    pair.backward(lambda net: net(batch(0, rank), (0,)))
    with pytest.raises(pc.PipelineError, match=r"still expected from backward.*call handle.wait\(\)"):
        pc.ring_reduce()(torch.ones(1))
    pair.compare()
    assert pc.ring_reduce(op="sum")(torch.ones(1)).item() == n


class Boom(Exception):  # noqa: N818
    pass


def explode(*_: Any) -> None:
    raise Boom("no gradient")


@check(2, 4, name=("ring", "residuals", "native"))
def a_backward_that_breaks_off_and_a_good_one(rank: int, n: int, name: str) -> None:
    pair = Pair(PIPELINES[name])
    for step in range(4):
        if step in (1, 2):
            hook = pair.model.branches[1].register_full_backward_hook(explode)
            with pytest.raises(Boom, match="no gradient"):
                pair.model(batch(9, rank).requires_grad_()).sum().backward()
            hook.remove()
            pair.model.zero_grad()
        pair.backward(lambda net, step=step: net(batch(step, rank)))
        pair.compare()


@check(2, 4)
def a_backward_that_breaks_off_on_one_rank(rank: int, n: int) -> None:
    model = seeded()
    handle = pc.overlap(PIPELINES["residuals"], model)
    culprit = n - 1
    before = copy.deepcopy(handle.state)
    if rank == culprit:
        model.branches[1].register_full_backward_hook(explode)
    start = time.monotonic()
    with pytest.raises(Boom if rank == culprit else pc.PeerLostError) as caught, handle:
        model(batch(0, rank).requires_grad_()).sum().backward()
    assert rank == culprit or f"rank {culprit} failed" in str(caught.value), str(caught.value)
    took = time.monotonic() - start
    assert took < TIMEOUT / 2, f"after {took:.1f} s: {caught.value}"
    same(handle.state, before)


@check(2)
def a_raising_stage_leaves_gradients_and_state(rank: int, n: int) -> None:
    def raising(tree: Any) -> Any:
        if rank == 0:
            raise Boom("stage")
        return tree

    model = seeded()
    handle = pc.overlap(pc.chain(pc.ring_reduce(), pc.stateless(raising)), model)
    model(batch(0, rank)).sum().backward()
    raw = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(Boom if rank == 0 else pc.PeerLostError, match="stage"):
        handle.wait()
    same(dict(enumerate(p.grad for p in model.parameters() if p.grad is not None)), dict(enumerate(raw)))


@check(2, 4)
def replicas_that_start_different_are_named(rank: int, n: int) -> None:
    model = seeded()
    if rank == n - 1:
        with torch.no_grad():
            model.branches[1].weight[2, 3] += 1e-6
            model.last.weight[0, 0] += 1
    with pytest.raises(
        pc.TreeMismatchError, match=rf"'branches.1.weight' has other values on rank {n - 1} than on rank 0"
    ):
        pc.overlap(PIPELINES["ring"], model)
    pc.overlap(PIPELINES["ring"], model, replicas="trust").remove()
    handle = pc.overlap(PIPELINES["ring"], model, replicas="broadcast")
    same(dict(model.named_parameters()), dict(seeded().named_parameters()))
    handle.remove()
    other = seeded()
    other.shift += rank
    with pytest.raises(pc.TreeMismatchError, match="'shift' has other values on rank 1"):
        pc.overlap(PIPELINES["ring"], other)


@check(2)
def state_goes_on_in_a_new_handle(rank: int, n: int) -> None:
    pair = Pair(PIPELINES["residuals"])
    for step in range(4):
        if step == 2:
            pair.handle.remove()
            pair.handle = pc.overlap(pair.pipeline, pair.model, pair.handle.state)
        pair.backward(lambda net, step=step: net(batch(step, rank)))
        pair.compare()


@check(4)
def a_subgroup(rank: int, n: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = Pair(PIPELINES["residuals"], group=groups[rank % 2])
    for step in range(3):
        pair.backward(lambda net, step=step: net(batch(step, rank)))
        pair.compare()


@check(2)
def it_works_while_backward_goes_on(rank: int, n: int) -> None:
    # The last layer's bucket has been sent before the first layer's gradient is made.
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for i, layer in enumerate(model):
        nn.init.constant_(layer.weight, 0.1 * (i + 1))
    handle = pc.overlap(pc.chain(pc.bucketize(8 * 8 * 4), pc.ring_reduce()), model)
    sent: list[int] = []

    def look(*_: Any) -> None:
        end = time.monotonic() + 5
        while t.messages < 2 * (n - 1) and time.monotonic() < end:
            time.sleep(0.01)
        sent.append(t.messages)

    model[0].register_full_backward_pre_hook(look)
    with pc.traffic() as t:
        model(batch(0, rank).repeat(1, 2).requires_grad_()).sum().backward()
        handle.wait()
    assert sent[0] >= 2 * (n - 1), f"{sent} messages had been sent"
    assert t.messages == 4 * 2 * (n - 1)


class Dawdle(torch.autograd.Function):
    """Its backward takes a while, another one on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


@check(4, name=("ring", "without buckets", "residuals"))
def ranks_at_different_paces_never_wait_in_a_circle(rank: int, n: int, name: str) -> None:
    # Two earlier versions of the schedule did, within a few steps.
    pipeline = PIPELINES[name]
    mine = random.Random(rank)
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(60, 60) for _ in range(12))
    handle = pc.overlap(pipeline, layers)
    for step in range(12):
        order = random.Random(step).sample(range(12), 12)
        if step % 3 == 1:
            mine.shuffle(order)  # even in another order
        x = torch.full((2, 60), float(rank + 1))
        for i in order:
            x = Dawdle.apply(torch.tanh(layers[i](x)), mine.choice([0.0, 0.001, 0.01]) * mine.random())
        x.sum().backward()
        raw = {name: p.grad.clone() for name, p in layers.named_parameters()}
        handle.wait()
        if name == "ring":
            for path, p in layers.named_parameters():
                total = raw[path].double()
                dist.all_reduce(total)
                assert torch.allclose(p.grad.double(), total / n, rtol=1e-5, atol=1e-6), f"step {step}, {path}"
        layers.zero_grad()


@check(2)
def a_handle_is_freed(rank: int, n: int) -> None:
    model = seeded()
    handle = pc.overlap(PIPELINES["ring"], model)
    model(batch(0, rank)).sum().backward()
    handle.wait()
    alive = weakref.ref(handle)
    gc.collect()
    gc.disable()
    try:
        del handle
        for _ in range(100):
            time.sleep(0.01 * (alive() is not None))
        assert alive() is None
    finally:
        gc.enable()
    model(batch(0, rank)).sum().backward()  # nobody listens any more


@pytest.mark.parametrize(("n", "name"), [(n, name) for n in (2, 4) for name in CHECKS if n in CHECKS[name].sizes])
def test_overlap(n: int, name: str, request: pytest.FixtureRequest):
    report = outcomes(__name__, n, request).report(name)
    if report:
        pytest.fail(report, pytrace=False)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_exit_cleanly(n: int, request: pytest.FixtureRequest):
    ended = outcomes(__name__, n, request)
    assert ended.exit_codes == [0] * n, ended.output
    assert ended.output == [""] * n


def test_what_cannot_be_overlapped_is_refused():
    model = seeded()
    with pytest.raises(pc.PipelineError, match="ranks would end with different bits"):
        pc.overlap(pc.gather_avg(), model)
    with pytest.raises(pc.PipelineError, match="expected a pipeline, got Bucketize"):
        pc.overlap(pc.bucketize(), model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='replicas: expected "check"'):
        pc.overlap(pc.ring_reduce(), model, replicas="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="check: expected"):
        pc.overlap(pc.ring_reduce(), model, check="yes")  # type: ignore[arg-type]
    handle = pc.overlap(pc.ring_reduce(), model, replicas="trust")
    handle.remove()
    with pytest.raises(pc.PipelineError, match="the handle was removed"):
        handle.wait()
