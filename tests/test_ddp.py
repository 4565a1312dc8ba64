"""`as_ddp_hook` under DistributedDataParallel on real ranks: one launch per world size, every named check is a test.

Each check trains one model up to three times on data that differ by rank: in DDP with the hook, in plain DDP, and in a
loop with `sync_grads`. The hook must equal the loop bit for bit, and all must equal what `oracle` computes in float64.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from named_checks import TIMEOUT, collector, outcomes
from tables import PIPELINES, Row
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ptcollect as pc

# Of the public reports two are met halfway: a checkpoint is read back, through bytes, in the same process by a new
# model, DDP and hook; and half precision is tried on 2 and 4 ranks instead of 8.

# A check that hangs ends its rank after 3 * TIMEOUT; what may take long on a busy machine is the whole launch.
pytestmark = pytest.mark.timeout(360)


def batch(step: int, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that differ between steps and ranks, of different size on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * (rank + 1)


class Crossed(nn.Module):
    """Used in another order than registered, with a 0-d parameter; 380 bytes of gradients."""

    width = 4

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(6)
        self.middle = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.middle(torch.tanh(self.first(x))) * self.scale))


class Branches(nn.Module):
    """Uses only the branches that it is told to, in order."""

    width = 4

    def __init__(self, n: int = 5) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(n))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        for i in used:
            x = torch.tanh(self.branches[i](x))
        return x


def seeded(model: type[nn.Module], *args: Any) -> nn.Module:
    """The same model on every rank."""
    torch.manual_seed(0)
    return model(*args)


CAP = 100 / 2**20
"""A bucket_cap_mb: three buckets or more in each model."""


# Pipelines and what they mean ---------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class momentum(pc.Transform):
    """Sends m = decay * m + g instead of g."""

    decay: float = 0.5
    stateful = True

    def init(self, inner: pc.Pipeline, params: Any) -> Any:
        return {"m": {path: torch.zeros_like(p) for path, p in params.items()}, "inner": inner.begin(params)}

    async def update(self, inner: pc.Pipeline, tree: Any, state: Any, comm: pc.Comm) -> Any:
        m = {path: self.decay * state["m"][path] + g for path, g in tree.items()}
        out, inner_state = await inner.apply(m, state["inner"], comm)
        return out, {"m": {**state["m"], **m}, "inner": inner_state}


def twice(n: int) -> int:
    return 2


MEAN = (oracle.mean(),)
# The ring's bits depend on what is in a bucket together, so they show a tree that was not whole.
RING = Row(pc.chain(pc.bucketize(256), pc.ring_reduce()), MEAN)
# Bits that do not depend on buckets, DDP's included.
LEAFWISE = Row(
    pc.chain(pc.scale(2.0), pc.bucketize(256), pc.compress("bf16"), pc.all_to_all_avg(), pc.scale(0.5)),
    (oracle.scaled(2.0), oracle.mean(torch.bfloat16, twice), oracle.scaled(0.5)),
)
CLIPPED = Row(
    pc.chain(pc.bucketize(256), pc.ring_reduce(), pc.clip_by_global_norm(0.5)), (oracle.mean(), oracle.clipped(0.5))
)
CLIPPED_FIRST = Row(
    pc.chain(pc.clip_by_global_norm(0.5), pc.bucketize(256), pc.ring_reduce()), (oracle.clipped(0.5), oracle.mean())
)
MOMENTUM = Row(pc.chain(momentum(), pc.bucketize(256), pc.ring_reduce()), ())
RESIDUALS = Row(pc.chain(pc.error_feedback(), pc.bucketize(256), pc.compress("int8"), pc.ring_reduce()), ())
LOW_RANK = Row(pc.chain(pc.error_feedback(), pc.low_rank(1), pc.bucketize(64), pc.ring_reduce()), ())
STATEFUL = {"momentum": MOMENTUM, "residuals": RESIDUALS, "low rank": LOW_RANK}
ROWS = {"ring": RING, "clipped": CLIPPED, "clipped first": CLIPPED_FIRST, "momentum": MOMENTUM}


# One model, three ways ----------------------------------------------------------------------------------------------

Grads = dict[str, "Tensor | None"]
Run = Callable[[nn.Module], Any]


def gradients(params: nn.Module | Mapping[str, Tensor]) -> Grads:
    """Copies of the gradients by name."""
    named = dict(params.named_parameters()) if isinstance(params, nn.Module) else params
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in named.items()}


def same(got: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Bit for bit, leaf by leaf."""
    assert got.keys() == wanted.keys(), f"{what}: {list(got)}, expected {list(wanted)}"
    for name, leaf in got.items():
        assert oracle.same_bits(leaf, wanted[name]), f"{what}, {name!r}: got {leaf}, expected {wanted[name]}"


def same_state(got: Any, wanted: Any, what: str) -> None:
    """Bit for bit, through all of its dicts."""
    if isinstance(wanted, dict):
        assert list(got) == list(wanted), f"{what}: {list(got)}, expected {list(wanted)}"
        for key, value in wanted.items():
            same_state(got[key], value, f"{what}, {key!r}")
    elif isinstance(wanted, Tensor):
        assert oracle.same_bits(got, wanted), f"{what}: got {got}, expected {wanted}"
    else:
        assert got == wanted, f"{what}: got {got}, expected {wanted}"


def right(got: Grads, row: Row, raw: Grads, what: str, group: dist.ProcessGroup | None = None, slack: int = 1) -> None:
    """Within the oracle's bound, times `slack`, of what `row` makes of all ranks' raw gradients.

    One that some ranks lack is zeros there.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, raw, group=group)
    filled = {name: next((torch.zeros_like(g[name]) for g in everyone if g[name] is not None), None) for name in raw}
    trees = [{name: filled[name] if leaf is None else leaf for name, leaf in tree.items()} for tree in everyone]
    expected = oracle.expected(row.steps, trees)[rank]
    for name, leaf in zip(sorted(raw), expected, strict=True):  # optree sorts keys
        assert (got[name] is None) == (leaf is None), f"{what}, {name!r}: {got[name]}, expected {leaf}"
        if leaf is not None:
            complaint = oracle.complaint(got[name], dataclasses.replace(leaf, bound=leaf.bound * slack))
            assert complaint is None, f"{what}, {name!r}: {complaint}"


class Trio:
    """One model in DDP with the hook, in plain DDP, and in a loop with `sync_grads`."""

    def __init__(
        self,
        model: nn.Module,
        row: Row,
        *,
        given: str = "ddp",
        cap: float = CAP,
        ignored: Sequence[str] = (),
        group: dist.ProcessGroup | None = None,
        watch: bool = False,
        **options: Any,
    ) -> None:
        options = {"bucket_cap_mb": cap, "process_group": group, **options}
        self.row, self.group, self.ignored = row, group, set(ignored)
        self.loop = copy.deepcopy(model)
        self.plain = DistributedDataParallel(copy.deepcopy(model), **options) if row.steps == MEAN else None
        self.ddp = DistributedDataParallel(model, **options)
        module = {"ddp": self.ddp, "module": model, "nothing": None}[given]
        self.hook = pc.as_ddp_hook(row.pipeline, module, group=None if given == "ddp" else group)
        self.calls: list[tuple[int, bool, int]] = []
        self.ddp.register_comm_hook(None, self.watching() if watch else self.hook)
        self.state: Any = None
        self.steps = 0

    def watching(self) -> Callable[..., Any]:
        """The hook, noting its calls: index, is_last and number of parameters of the bucket."""

        def noting(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            self.calls.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
            return self.hook(state, bucket)

        # DDP refuses annotations that are text.
        noting.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
        return noting

    @property
    def models(self) -> tuple[nn.Module, ...]:
        return tuple(model for model in (self.ddp, self.plain, self.loop) if model is not None)

    @property
    def params(self) -> dict[str, Tensor]:
        """Those of the loop that are synchronised."""
        return {name: p for name, p in self.loop.named_parameters() if name not in self.ignored}

    def step(self, run: Run, *, to_none: bool = True, zero: bool = True) -> None:
        """`run` makes gradients in the model that it is given."""
        for model in self.models:
            if zero:
                model.zero_grad(set_to_none=to_none)
            run(model)
        self.compare()
        self.descend()

    def compare(self) -> None:
        """Synchronise the loop's gradients, and compare the hook's with them, with the oracle and with plain DDP."""
        what = f"step {self.steps}"
        raw = gradients(self.params)
        self.state = pc.sync_grads(self.row.pipeline, self.params, self.state, group=self.group)
        hooked = gradients(self.ddp.module)
        same(hooked, gradients(self.loop), f"{what}, hook and loop")
        hooked = {name: grad for name, grad in hooked.items() if name in raw}
        if self.row.steps:
            right(hooked, self.row, raw, f"{what}, hook and oracle", self.group)
        if self.plain is not None:
            plain = {name: grad for name, grad in gradients(self.plain.module).items() if name in raw}
            right(plain, self.row, raw, f"{what}, plain DDP and oracle", self.group, slack=4)  # it divides first
        same_state(self.hook.state, self.state, f"{what}, state")
        self.steps += 1

    def descend(self) -> None:
        """A step of SGD in the model with the hook and in the loop; plain DDP gets the same parameters."""
        with torch.no_grad():
            for model in (self.ddp.module, self.loop):
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
            if self.plain is not None:
                for p, q in zip(self.plain.module.parameters(), self.ddp.module.parameters(), strict=True):
                    p.copy_(q)


def squares(x: Tensor, *args: Any) -> Run:
    """Backward of the sum of squares of the model's output for `x`."""
    return lambda model: model(x, *args).pow(2).sum().backward()


CHECKS, check = collector()

# Every way in which DDP delivers gradients --------------------------------------------------------------------------


@check(view=(False, True), given=("ddp", "module", "nothing"))
def fresh_tensors_arrive(rank: int, n: int, view: bool, given: str) -> None:
    # The tensor that a hook made was lost after the first iteration: pytorch#43307.
    row = LEAFWISE if given == "nothing" else RING
    trio = Trio(seeded(Crossed), row, given=given, watch=True, gradient_as_bucket_view=view)
    for step in range(5):
        trio.calls.clear()
        trio.step(squares(batch(step, rank, 3, 4)), to_none=step % 2 == 0)
        assert len(trio.calls) >= 3 if step else trio.calls == [(0, True, 9)], f"step {step}: {trio.calls}"


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "find unused, view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static, view": {"static_graph": True, "gradient_as_bucket_view": True},
    "batched copy": {"batched_grad_copy": True},
    "list of caps": {"bucket_cap_mb": None, "bucket_cap_mb_list": [CAP, 2 * CAP]},
    "skip unused": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
}


@check(mode=MODES, row=("ring", "clipped", "momentum"))
def every_mode_equals_the_loop(rank: int, n: int, mode: str, row: str) -> None:
    trio = Trio(seeded(Crossed), ROWS[row], **MODES[mode])
    for step in range(4):
        trio.step(squares(batch(step, rank, 3, 4)), to_none=step != 2)


# DDP delivers zeros for a parameter that no rank used, where `sync_grads` sees that it is missing; so only bits that do
# not depend on buckets can be the same.
UNUSED = {
    "leafwise": LEAFWISE,
    "clipped": Row(
        pc.chain(pc.bucketize(256), pc.all_to_all_avg(), pc.clip_by_global_norm(0.5)),
        (oracle.mean(), oracle.clipped(0.5)),
    ),
    "clipped first": Row(
        pc.chain(pc.clip_by_global_norm(0.5), pc.bucketize(256), pc.all_to_all_avg()),
        (oracle.clipped(0.5), oracle.mean()),
    ),
}


@check(mode=("find unused", "static", "skip unused"))
def buckets_come_as_the_modes_promise(rank: int, n: int, mode: str) -> None:
    # What the other checks rest on. `is_last` cannot be relied on: pytorch#63210.
    trio = Trio(seeded(Branches), UNUSED["clipped"], watch=True, cap=80 / 2**20, **MODES[mode])
    counts = []
    for step in range(4):
        trio.calls.clear()
        trio.step(squares(batch(step, rank, 3, 4), (1, 3)))
        counts.append(len(trio.calls))
        if mode == "skip unused":
            assert not any(last for _, last, _ in trio.calls), f"step {step}: {trio.calls}"
            assert all(index > 0 for index, _, _ in trio.calls), f"step {step}: {trio.calls}"
    assert counts == {"find unused": [5, 5, 5, 5], "static": [1, 1, 5, 5], "skip unused": [2, 2, 2, 2]}[mode], counts


@check()
def two_forwards_before_one_backward(rank: int, n: int) -> None:
    trio = Trio(seeded(Crossed), CLIPPED, static_graph=True)
    for step in range(4):
        x, y = batch(step, rank, 3, 4), batch(step + 50, rank, 3, 4)
        trio.step(lambda model, x=x, y=y: (model(x).pow(2).sum() + model(y).sum()).backward())


@check(view=(False, True))
def gradients_add_up_without_zero_grad(rank: int, n: int, view: bool) -> None:
    trio = Trio(seeded(Crossed), RING, gradient_as_bucket_view=view)
    for step in range(4):
        trio.step(squares(batch(step, rank, 3, 4)), zero=step in (0, 3))


@check(view=(False, True))
def no_sync_reduces_the_sum_once(rank: int, n: int, view: bool) -> None:
    # pytorch#69031
    trio = Trio(seeded(Crossed), CLIPPED, watch=True, gradient_as_bucket_view=view)
    for step in range(3):
        trio.calls.clear()

        def run(model: nn.Module, step: int = step) -> None:
            with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
                for part in range(2):
                    squares(batch(10 * step + part, rank, 3, 4))(model)
                assert not trio.calls, f"step {step}: the hook was called in no_sync: {trio.calls}"
            if model is not trio.ddp:
                trio.calls.clear()
            squares(batch(10 * step + 2, rank, 3, 4))(model)
            if model is trio.ddp:
                assert sum(count for *_, count in trio.calls) == 9, f"step {step}: {trio.calls}"
                trio.calls.clear()

        trio.step(run)


# Parameters of every kind -------------------------------------------------------------------------------------------


class Products(nn.Module):
    """One product with the input per parameter."""

    def __init__(self, *params: Tensor) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(p) for p in params)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        products = [p * x for p, x in zip(self.params, inputs, strict=True)]
        flat = [torch.view_as_real(y).flatten() if y.is_complex() else y.flatten() for y in products]
        return torch.cat([y.double() for y in flat])

    def inputs(self, step: int, rank: int) -> list[Tensor]:
        reals = [batch(step + 10 * i, rank, *p.shape, 2, dtype=torch.float64) for i, p in enumerate(self.params)]
        return [
            (torch.view_as_complex(x) if p.is_complex() else x[..., 0]).to(p.dtype)
            for p, x in zip(self.params, reals, strict=True)
        ]


def products(*params: Tensor) -> Products:
    return Products(*params)


def number(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Parameters that are the same on every rank."""
    return batch(7, 0, *shape, dtype=dtype)


def train(rank: int, model: Products, row: Row, steps: int = 4, **options: Any) -> Trio:
    trio = Trio(model, row, **options)
    for step in range(steps):
        trio.step(squares(model.inputs(step, rank)))
    return trio


GIVEN = {"ddp": RING, "nothing": LEAFWISE}


@check(mode=("plain", "view", "static"), given=GIVEN)
def dtypes_side_by_side(rank: int, n: int, mode: str, given: str) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    model = products(*(number(size, dtype=dtype) for size in (5, 30) for dtype in dtypes))
    trio = train(rank, model, GIVEN[given], given=given, watch=True, **MODES[mode])
    first = trio.calls[:4]
    assert sum(count for *_, count in first) == 8, f"{trio.calls}"
    if mode == "static":  # pytorch#63210
        assert not any(last for _, last, _ in first), f"{first}"


@check(view=(False, True), given=GIVEN)
def complex_parameters(rank: int, n: int, view: bool, given: str) -> None:
    # pytorch#158753, #74039; torch's own views of a bucket of complex gradients are wrong from the second on.
    def pairs(*shape: int) -> Tensor:
        return torch.view_as_complex(number(*shape, 2))

    model = products(pairs(3, 2), pairs(4), pairs(), pairs(2, 5).T, pairs(7).to(torch.complex128), number(6))
    trio = train(rank, model, GIVEN[given], given=given, gradient_as_bucket_view=view)
    assert trio.loop.params[1].grad.imag.abs().min() > 0


@check(2)
def a_parameter_without_dims_in_every_pipeline(rank: int, n: int) -> None:
    # torch's PowerSGD hook ends with an IndexError.
    for row in PIPELINES:
        if row.pipeline.consensus and row.ranks <= n and not row.mesh:
            train(rank, products(number(), number(3)), row, steps=2)
    for row in (CLIPPED_FIRST, MOMENTUM):
        train(rank, products(number()), row, steps=2)
    train(rank, products(number()), LEAFWISE, steps=2, given="nothing")


@check(4)
def a_mesh_as_the_group_of_the_hook(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    dense = pc.chain(pc.bucketize(64), pc.shard("local"), pc.all_to_all_avg(axis="node"))
    int8 = pc.chain(
        pc.error_feedback(), pc.bucketize(64), pc.shard("local"), pc.compress("int8"), pc.ring_reduce(axis="node")
    )
    for pipeline in (dense, int8):
        model = products(number(3, 4), number(7), number())
        ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=CAP)
        hook = pc.as_ddp_hook(pipeline, ddp, group=mesh)
        ddp.register_comm_hook(None, hook)
        states = None
        for step in range(3):
            trees = []
            for each in range(n):
                alone = copy.deepcopy(model)
                squares(alone.inputs(step, each))(alone)
                trees.append({name: p.grad for name, p in alone.named_parameters()})
            ddp.zero_grad()
            squares(model.inputs(step, rank))(ddp)
            want = pc.simulate(pipeline, trees, states, axes={"node": 2, "local": 2})
            states = want.states if pipeline.stateful else None
            for name, p in ddp.module.named_parameters():
                assert torch.equal(p.grad, want.trees[rank][name]), f"{pipeline!r}, step {step}: {name}"


SEEN: list[dict[str, Tensor | None]] = []


def seeing(tree: Any) -> Any:
    SEEN.append({name: None if leaf is None else leaf.clone() for name, leaf in tree.items()})
    return tree


@check(given=GIVEN)
def parameters_without_elements(rank: int, n: int, given: str) -> None:
    train(rank, products(number(0, 3), number(4), number(0)), GIVEN[given], given=given)


STRIDED = {
    "leafwise": LEAFWISE,
    "clipped": CLIPPED,
    "momentum": MOMENTUM,
    "seen": Row(pc.chain(pc.stateless(seeing), pc.bucketize(256), pc.all_to_all_avg()), MEAN),
}


@check(row=STRIDED)
def strides_of_parameters(rank: int, n: int, row: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 3))
    net = net.to(memory_format=torch.channels_last)
    net[4].weight = nn.Parameter(torch.randn(8, 3).T)
    assert not net[0].weight.is_contiguous()
    assert not net[4].weight.is_contiguous()
    for view in (False, True):
        given = "nothing" if row == "leafwise" else "ddp"
        trio = Trio(copy.deepcopy(net), STRIDED[row], given=given, gradient_as_bucket_view=view)
        for step in range(3):
            SEEN.clear()
            trio.step(squares(batch(step, rank, 2, 2, 4, 4)))
            if SEEN:
                same(SEEN[0], SEEN[1], f"step {step}, what the pipeline sees in the hook and in the loop")


class Odd(nn.Module):
    """With a frozen parameter, one that DDP ignores, and one with two names."""

    width = 4

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.own.weight
        self._ddp_params_and_buffers_to_ignore = ["own.bias"]

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.frozen(torch.tanh(self.own(x)))))


@check(given=("ddp", "module"), row=("clipped", "momentum"))
def frozen_ignored_and_tied_parameters(rank: int, n: int, given: str, row: str) -> None:
    trio = Trio(seeded(Odd), ROWS[row], given=given, ignored=["own.bias"], watch=True)
    for step in range(4):
        trio.calls.clear()
        trio.step(squares(batch(step, rank, 3, 4)))
        assert sum(count for *_, count in trio.calls) == 2, f"step {step}: {trio.calls}"


# Parameters that are not used ---------------------------------------------------------------------------------------


@check(view=(False, True), row=UNUSED)
def used_on_one_rank_only(rank: int, n: int, view: bool, row: str) -> None:
    # Zeros elsewhere, and the mean everywhere: pytorch#28294, #151503.
    trio = Trio(seeded(Branches, n + 2), UNUSED[row], find_unused_parameters=True, gradient_as_bucket_view=view)
    for step in range(4):
        trio.step(squares(batch(step, rank, 3, 4), [0, 1 + (rank + step) % n]))  # the last one on none
        unused = trio.ddp.module.branches[n + 1]
        assert unused.weight.grad is None
        assert unused.bias.grad is None
        assert trio.ddp.module.branches[1].weight.grad is not None


@check(mode=("find unused", "find unused, view", "skip unused", "static"), given=GIVEN)
def used_on_no_rank_keeps_its_gradient(rank: int, n: int, mode: str, given: str) -> None:
    model = seeded(Branches)
    plain = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=CAP, **MODES[mode])
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP, **MODES[mode])
    ddp.register_comm_hook(None, pc.as_ddp_hook(GIVEN[given].pipeline, ddp if given == "ddp" else None))
    # Where gradients are views of buckets DDP reduces an old gradient again, with any hook or none.
    old = 7.0 + ((n - 1) / 2 if mode == "find unused, view" else rank)
    for step, each in itertools.product(range(4), (plain, ddp)):
        each.zero_grad()
        kept = each.module.branches[2].weight
        kept.grad = torch.full((4, 4), 7.0 + rank) if step % 2 else None
        squares(batch(step, rank, 3, 4), (1, 3))(each)
        for name, p in each.module.named_parameters():
            what = f"step {step}, {name!r} of {'the hook' if each is ddp else 'plain DDP'}: {p.grad}"
            if p is kept and step % 2:
                assert p.grad is not None, what
                assert bool((p.grad == old).all()), what
            else:
                assert (p.grad is not None) == name.startswith(("branches.1.", "branches.3.")), what


# Autograd's corners -------------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """Its middle layers are computed again in the backward pass, in a pass of their own if it is reentrant."""

    width = 4

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        first, *middle, last = self.layers
        x = first(x)
        for layer in middle:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return last(x)


@check(reentrant=(False, True), mode=("plain", "static"), row=("clipped", "momentum", "ring"))
def activation_checkpointing(rank: int, n: int, reentrant: bool, mode: str, row: str) -> None:
    trio = Trio(seeded(Recomputed, reentrant), ROWS[row], watch=True, **MODES[mode])
    for step in range(4):
        trio.calls.clear()
        trio.step(squares(batch(step, rank, 3, 4)))
    assert len(trio.calls) >= 3, f"{trio.calls}"


@check(given=GIVEN)
def create_graph(rank: int, n: int, given: str) -> None:
    # pytorch#63812. In torch 2.13 plain DDP itself fails if a bucket has two parameters, so each has its own here.
    model = products(number(3), number(), number(2, 2), torch.view_as_complex(number(3, 2)))
    trio = Trio(
        model, GIVEN[given], given=given, watch=True, cap=1 / 2**20, find_unused_parameters=True, ignored=["nothing"]
    )
    for step in range(3):
        trio.calls.clear()
        x = model.inputs(step, rank)

        def run(each: nn.Module, x: list[Tensor] = x) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
                each(x).pow(3).sum().backward(create_graph=True)

        trio.step(run)
        assert len(trio.calls) == 4, f"{trio.calls}"
        for each in trio.models:
            each.zero_grad()  # else a reference cycle


def no_gradient(grad: Tensor) -> Tensor:
    raise Boom("no gradient")


class Boom(Exception):  # noqa: N818
    """What the checks raise."""


@check(mode=("plain", "find unused", "static"), row=("clipped", "momentum"))
def a_backward_that_breaks_off_before_the_first_bucket(rank: int, n: int, mode: str, row: str) -> None:
    trio = Trio(seeded(Crossed), ROWS[row], **MODES[mode])
    for step in range(5):
        if step in (1, 3):
            out = trio.ddp(batch(step, rank, 3, 4))
            out.register_hook(no_gradient)
            with pytest.raises(Boom, match="no gradient"):
                out.sum().backward()
        trio.step(squares(batch(step, rank, 3, 4)))


@check(mode=("plain", "find unused", "static, view"), row=("momentum",))
def a_backward_that_breaks_off_between_buckets(rank: int, n: int, mode: str, row: str) -> None:
    # DDP itself cannot go on then, with any hook or none; a new DDP around the model can, with the same hook.
    trio = Trio(seeded(Branches), ROWS[row], watch=True, **MODES[mode])
    used = range(5)
    for step in range(3):
        trio.step(squares(batch(step, rank, 3, 4), used))
    trio.calls.clear()
    handle = trio.ddp.module.branches[1].register_full_backward_hook(lambda module, before, after: no_gradient(after))
    with pytest.raises(Boom, match="no gradient"):
        squares(
            batch(
                9,
                rank,
                3,
                4,
            ).requires_grad_(),
            used,
        )(trio.ddp)
    assert 0 < len(trio.calls) < 5, f"{trio.calls}"
    handle.remove()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        squares(batch(9, rank, 3, 4), used)(trio.ddp)
    model = trio.ddp.module
    model.zero_grad()
    del trio.ddp
    gc.collect()
    trio.ddp = DistributedDataParallel(model, bucket_cap_mb=2 * CAP, **MODES[mode])
    trio.ddp.register_comm_hook(None, trio.hook)
    for step in range(3, 6):
        trio.step(squares(batch(step, rank, 3, 4), used))


@check(mode=("plain", "view"))
def a_backward_that_breaks_off_on_one_rank(rank: int, n: int, mode: str) -> None:
    # The others had begun, and waited for it until the group's timeout. (With find_unused_parameters they still do, in
    # a collective of DDP's own.)
    trio = Trio(seeded(Branches), MOMENTUM, **MODES[mode])
    for step in range(3):
        trio.step(squares(batch(step, rank, 3, 4), range(5)))
    culprit = n - 1
    branch = trio.ddp.module.branches[1]
    if rank == culprit:
        branch.register_full_backward_hook(lambda module, before, after: no_gradient(after))
    start = time.monotonic()
    with pytest.raises(Boom if rank == culprit else pc.PeerLostError) as caught:
        squares(batch(9, rank, 3, 4).requires_grad_(), range(5))(trio.ddp)
    if rank != culprit:
        assert f"rank {culprit} failed" in str(caught.value), str(caught.value)
        assert "backward pass on this rank broke off" in str(caught.value), str(caught.value)
    assert time.monotonic() - start < TIMEOUT / 2
    del caught
    loop = trio.loop
    for step in range(2):  # the group is as good as new
        loop.zero_grad()
        squares(batch(step, rank, 3, 4), range(5))(loop)
        raw = gradients(loop)
        pc.sync_grads(RING.pipeline, loop)
        right(gradients(loop), RING, raw, f"step {step}")


# What the pipeline sees and gives -----------------------------------------------------------------------------------


@check(mode=("plain", "static", "find unused", "skip unused"))
def the_pipeline_gets_raw_local_gradients_once(rank: int, n: int, mode: str) -> None:
    # DDP divides by the world size before a hook of its own sees them: pytorch#42399.
    pipeline = pc.chain(pc.stateless(seeing), pc.bucketize(256), pc.ring_reduce())
    trio = Trio(seeded(Branches), Row(pipeline, MEAN), cap=80 / 2**20, **MODES[mode])
    for step in range(4):
        SEEN.clear()
        for model in trio.models:
            model.zero_grad()
            squares(batch(step, rank, 3, 4), (1, 2) if mode == "skip unused" else range(5))(model)
        assert len(SEEN) == 1, f"step {step}: the pipeline ran {len(SEEN)} times"
        same(SEEN[0], gradients(trio.loop), f"step {step}")
        trio.compare()
        trio.descend()


@check(given=GIVEN)
def half_precision_neither_overflows_nor_underflows(rank: int, n: int, given: str) -> None:
    # Summed and then divided 4e4 overflows, divided and then summed 1e-7 becomes zero: pytorch#57410, #78774.
    numbers = torch.tensor([4e4, 1e-7, 6e-8, -6.5e4, 1.0])
    plain = pc.chain(pc.bucketize(256), pc.ring_reduce())
    half = pc.chain(pc.bucketize(256), pc.compress("fp16"), pc.all_to_all_avg())
    for pipeline, dtype in ((plain, torch.float16), (half, torch.float16), (half, torch.float32)):
        model = products(torch.ones(5, dtype=dtype))
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, pc.as_ddp_hook(pipeline, ddp if given == "ddp" else None))
        for _ in range(2):
            ddp.zero_grad()
            ddp([numbers.to(dtype)]).sum().backward()
            expected = numbers.half().to(dtype)
            got = model.params[0].grad
            assert torch.equal(got, expected), f"{pipeline!r}, {dtype}: {got}, expected {expected}"


@check()
def a_momentum_follows_its_formula(rank: int, n: int) -> None:
    trio = Trio(seeded(Crossed), MOMENTUM, gradient_as_bucket_view=True)
    momenta: dict[str, Tensor] = {}
    for step in range(5):
        for model in trio.models:
            model.zero_grad()
            squares(batch(step, rank, 3, 4))(model)
        everyone: list[Any] = [None] * n
        dist.all_gather_object(everyone, gradients(trio.loop))
        trio.compare()
        trio.descend()
        for name, p in trio.ddp.module.named_parameters():
            mean = torch.stack([grads[name].double() for grads in everyone]).mean(0)
            momenta[name] = 0.5 * momenta.get(name, torch.zeros_like(mean)) + mean
            largest = max(float(grads[name].abs().max()) for grads in everyone)
            off = float((p.grad - momenta[name]).abs().max())
            assert off <= 20 * n * oracle.eps(torch.float32) * largest, f"step {step}, {name!r} is off by {off}"


@check(4)
def twenty_steps_of_low_rank(rank: int, n: int) -> None:
    # torch's PowerSGD hook aborts: pytorch#48478, #62300.
    trio = Trio(seeded(Branches, 9), LOW_RANK, watch=True)
    for step in range(20):
        trio.calls.clear()
        trio.step(squares(batch(step, rank, 3, 4), range(9)))
    assert len(trio.calls) >= 4, f"{trio.calls}"


@dataclass(frozen=True, repr=False)
class halving(pc.Transform):
    """Wrong: gives another dtype back."""

    async def update(self, inner: pc.Pipeline, tree: Any, state: Any, comm: pc.Comm) -> Any:
        out, inner_state = await inner.apply(tree, state["inner"], comm)
        return {path: leaf.half() for path, leaf in out.items()}, {"inner": inner_state}


@dataclass(frozen=True, repr=False)
class shortening(pc.Pipeline):
    """Wrong: gives one element of each leaf back, which would broadcast."""

    async def apply(self, tree: Any, state: Any, comm: pc.Comm) -> Any:
        return {path: leaf.reshape(-1)[:1] for path, leaf in tree.items()}, state


@dataclass(frozen=True, repr=False)
class dropping(pc.Pipeline):
    """Wrong: loses a leaf."""

    async def apply(self, tree: Any, state: Any, comm: pc.Comm) -> Any:
        return dict(list(tree.items())[1:]), state


WRONG = {
    "halving": pc.chain(halving(), pc.ring_reduce()),
    "shortening": pc.chain(pc.ring_reduce(), shortening()),
    "dropping": pc.chain(pc.ring_reduce(), dropping()),
}


@check(which=WRONG)
def a_stage_that_gives_something_else_back_is_named(rank: int, n: int, which: str) -> None:
    # The wrong thing in DDP's future fails far away: pytorch#62074.
    ddp = DistributedDataParallel(seeded(Crossed), bucket_cap_mb=CAP)
    ddp.register_comm_hook(None, pc.as_ddp_hook(WRONG[which], ddp))
    for _ in range(2):
        with pytest.raises(pc.PipelineError, match=which):
            squares(batch(0, rank, 3, 4))(ddp)


@check(given=("ddp", "nothing"))
def sparse_gradients_are_right_or_one_clear_error(rank: int, n: int, given: str) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(n + 1, 3, sparse=True)
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.embedding(x))

    model = seeded(Words)
    plain = DistributedDataParallel(copy.deepcopy(model))
    ddp = DistributedDataParallel(model)
    words = torch.tensor([rank, rank + 1])
    squares(words)(plain)
    ddp.register_comm_hook(None, pc.as_ddp_hook(pc.ring_reduce(), ddp if given == "ddp" else None))
    for _ in range(3):  # not poisoned by the error before
        with pytest.raises(TypeError, match="sparse") as caught:
            squares(words)(ddp)
        assert given == "nothing" or "embedding.weight" in str(caught.value), str(caught.value)


# State --------------------------------------------------------------------------------------------------------------


def bytes_of(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@check(row=("residuals", "low rank"), mode=("plain", "view", "find unused", "static"))
def state_equals_the_loops(rank: int, n: int, row: str, mode: str) -> None:
    # Residuals by bucket index were mixed up when DDP rebuilt its buckets: pytorch#48867, #51427, #55271.
    trio = Trio(seeded(Crossed), STATEFUL[row], watch=True, **MODES[mode])
    for step in range(5):
        trio.step(squares(batch(step, rank, 3, 4)))
    assert len(trio.calls) > 5, f"{trio.calls}"
    residuals: list[Any] = [None] * n
    dist.all_gather_object(residuals, trio.hook.state["error_feedback"]["residual"]["first.weight"])
    assert all(bool(residual.any()) for residual in residuals), f"{residuals}"
    assert not torch.equal(residuals[0], residuals[1])


@check(row=STATEFUL, view=(False, True))
def a_checkpoint_goes_on_with_other_buckets(rank: int, n: int, row: str, view: bool) -> None:
    # pytorch#75666, #102721: state by bucket index did not survive.
    trio = Trio(seeded(Crossed), STATEFUL[row], watch=True)
    for step in range(3):
        trio.step(squares(batch(step, rank, 3, 4)))
    saved = bytes_of((trio.ddp.module.state_dict(), trio.hook.state_dict()))
    before = len(trio.calls)
    for step in range(3, 6):
        trio.step(squares(batch(step, rank, 3, 4)))
    assert len(trio.calls) - before > 6
    params, state = torch.load(saved, weights_only=True)
    model = seeded(Crossed)
    model.load_state_dict(params)
    again = Trio(model, STATEFUL[row], cap=3 * CAP, gradient_as_bucket_view=view, find_unused_parameters=view)
    again.hook.load_state_dict(state)
    assert again.hook.state["step"] == 3
    again.state = state
    for step in range(3, 6):
        again.step(squares(batch(step, rank, 3, 4)))
    same(gradients(model), gradients(trio.ddp.module), "gradients")
    same(dict(model.named_parameters()), dict(trio.ddp.module.named_parameters()), "parameters")
    same_state(again.hook.state, trio.hook.state, "state")
    assert trio.hook.state["step"] == 6


@check()
def states_are_left_as_they_were(rank: int, n: int) -> None:
    ddp = DistributedDataParallel(seeded(Crossed), bucket_cap_mb=CAP)
    hook = pc.as_ddp_hook(MOMENTUM.pipeline, ddp)
    ddp.register_comm_hook(None, hook)
    squares(batch(0, rank, 3, 4))(ddp)
    before = hook.state_dict()
    kept = copy.deepcopy(before)
    squares(batch(1, rank, 3, 4))(ddp)
    assert before["step"] == 1
    assert hook.state["step"] == 2
    same_state(before, kept, "the state of the step before")


# Failures -----------------------------------------------------------------------------------------------------------

FUSE: dict[str, int] = {}
"""``{"left": k}``: the k-th next `fused` raises."""


def fused(value: Any) -> Any:
    if "left" in FUSE:
        FUSE["left"] -= 1
        if FUSE["left"] == 0:
            FUSE.clear()
            raise Boom("the fuse blew")
    return value


@pc.reducer
async def fragile(x: Tensor, comm: pc.Comm) -> Tensor:
    """The mean, or a blown fuse."""
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    received = await comm.exchange(
        send=dict.fromkeys(others, comm.encode(fused(x))), recv=dict.fromkeys(others, x.numel())
    )
    parts = [x if rank == comm.rank else comm.decode(received[rank]) for rank in range(comm.size)]
    return torch.stack(parts).double().mean(0).to(x.dtype)


FRAGILE = {
    "before": Row(pc.chain(pc.stateless(fused), momentum(), pc.bucketize(256), pc.ring_reduce()), ()),
    "after": Row(pc.chain(pc.bucketize(256), pc.ring_reduce(), pc.stateless(fused)), MEAN),
    "within": Row(fragile(), MEAN),
    "within, by bucket": Row(fragile(), MEAN),
}


def failing(trio: Trio, x: Tensor, kind: type[Exception] | None, *parts: str) -> None:
    """A backward pass that raises just that, at once."""
    trio.ddp.zero_grad()
    start = time.monotonic()
    caught: Exception | None = None
    try:
        squares(x)(trio.ddp)
    except Exception as error:
        caught = error
    took = time.monotonic() - start
    assert type(caught) is (kind or type(None)), f"expected {kind}, got {caught!r}"
    for part in parts:
        assert part in str(caught), f"{part!r} is not in {str(caught)!r}"
    assert took < TIMEOUT / 2, f"after {took:.1f} s"


@check(where=FRAGILE, mode=("plain", "find unused", "static", "view"))
def a_rank_that_raises_at_step_2(rank: int, n: int, where: str, mode: str) -> None:
    # The others hung, or the next step was poisoned: pytorch#53212.
    given = "nothing" if "bucket" in where else "ddp"
    trio = Trio(seeded(Crossed), FRAGILE[where], given=given, **MODES[mode])
    trio.step(squares(batch(0, rank, 3, 4)))
    culprit = n - 1
    if rank == culprit:
        FUSE["left"] = 1
        failing(trio, batch(1, rank, 3, 4), Boom, "the fuse blew")
    elif where == "after":
        failing(trio, batch(1, rank, 3, 4), None)  # it had ended here
    else:
        failing(trio, batch(1, rank, 3, 4), pc.PeerLostError, f"rank {culprit}", "Boom", "the fuse blew")
    if where == "after":
        failing(trio, batch(2, rank, 3, 4), pc.PeerLostError, f"rank {culprit}", "previous call failed", "restore")
    for step in range(3, 6):
        trio.step(squares(batch(step, rank, 3, 4)))


@check(where=("before", "after"), mode=("plain", "find unused", "static"))
def all_ranks_raise(rank: int, n: int, where: str, mode: str) -> None:
    trio = Trio(seeded(Crossed), FRAGILE[where], **MODES[mode])
    for step in range(4):
        if step in (0, 2):
            FUSE["left"] = 1
            failing(trio, batch(9, rank, 3, 4), Boom, "the fuse blew")
        trio.step(squares(batch(step, rank, 3, 4)))


@check()
def ranks_with_other_hooks_are_told(rank: int, n: int) -> None:
    trio = Trio(seeded(Crossed), CLIPPED if rank == 1 else CLIPPED_FIRST)
    for _ in range(2):
        failing(trio, batch(0, rank, 3, 4), pc.TreeMismatchError, "different pipelines", "rank 0", "rank 1")
    Trio(seeded(Crossed), CLIPPED).step(squares(batch(1, rank, 3, 4)))


@check()
def the_module_of_another_ddp_is_refused(rank: int, n: int) -> None:
    ddp = DistributedDataParallel(seeded(Crossed))
    ddp.register_comm_hook(None, pc.as_ddp_hook(RING.pipeline, seeded(Crossed)))
    for _ in range(3):
        with pytest.raises(pc.PipelineError, match=r"the module it was made for does not have; pass the module inside"):
            squares(batch(0, rank, 3, 4))(ddp)


@check(2)
def parameters_that_never_come_are_named_in_time(rank: int, n: int) -> None:
    # With static_graph DDP waits in the first backward's last callback, so no callback can tell the hook the end.
    model = seeded(Branches)
    parent = nn.ModuleList([model, nn.Linear(2, 2)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP, static_graph=True)
    group = dist.new_group(timeout=timedelta(seconds=3))
    ddp.register_comm_hook(None, pc.as_ddp_hook(CLIPPED.pipeline, parent, group=group))
    with pytest.raises(pc.PeerLostError, match=r"no gradient of '1.weight' and 1 more arrived.*give the DDP module"):
        squares(batch(0, rank, 3, 4), range(5))(ddp)


# Several at once, and the end ---------------------------------------------------------------------------------------


@check(row=("ring", "momentum"))
def two_models_in_turn(rank: int, n: int, row: str) -> None:
    one, other = Trio(seeded(Crossed), ROWS[row]), Trio(seeded(Branches), RING, static_graph=True)
    for step in range(4):
        one.step(squares(batch(step, rank, 3, 4)))
        other.step(squares(batch(step, rank, 3, 4), range(5)))


@check(row=("clipped", "momentum"), mode=("plain", "view", "find unused"))
def two_models_in_one_backward(rank: int, n: int, row: str, mode: str) -> None:
    one, other = Trio(seeded(Branches), ROWS[row], **MODES[mode]), Trio(seeded(Crossed), ROWS[row], **MODES[mode])
    for step in range(4):
        x = batch(step, rank, 3, 4)
        for first, second in zip(one.models, other.models, strict=True):
            first.zero_grad()
            second.zero_grad()
            (first(x, range(5)).pow(2).sum() + second(first(x * 2, range(5))).sum()).backward()
        for trio in (one, other):
            trio.compare()
            trio.descend()


@check(2, row=("ring", "residuals"))
def a_replicated_module_takes_the_hook(rank: int, n: int, row: str) -> None:
    # torch's composable replicate is DDP behind a module of the same kind.
    pipeline = {**ROWS, **STATEFUL}[row].pipeline
    loop = seeded(Crossed)
    model = replicate(copy.deepcopy(loop), bucket_cap_mb=CAP)
    hook = pc.as_ddp_hook(pipeline, model)
    model.register_comm_hook(None, hook)
    state: Any = None
    for step in range(4):
        for each in (model, loop):
            each.zero_grad()
            squares(batch(step, rank, 3, 4))(each)
        state = pc.sync_grads(pipeline, loop, state)
        same(gradients(model), gradients(loop), f"step {step}")
        same_state(hook.state, state, f"step {step}, state")


@check(4, given=("ddp", "module"))
def ddp_on_a_subgroup(rank: int, n: int, given: str) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    trio = Trio(seeded(Crossed), CLIPPED, given=given, group=groups[rank % 2])
    for step in range(3):
        trio.step(squares(batch(step, rank, 3, 4)))


@check(row=("clipped", "momentum"), mode=("plain", "static"))
def ddp_is_freed_with_its_hook(rank: int, n: int, row: str, mode: str) -> None:
    # DDP and the hook's state kept each other alive: pytorch#63211.
    ddp = DistributedDataParallel(seeded(Crossed), bucket_cap_mb=CAP, **MODES[mode])
    hook = pc.as_ddp_hook(ROWS[row].pipeline, ddp)
    ddp.register_comm_hook(None, hook)
    for step in range(3):
        squares(batch(step, rank, 3, 4))(ddp)
    parameter = weakref.ref(ddp.module.scale)
    alive = {"ddp": weakref.ref(ddp), "module": weakref.ref(ddp.module), "hook": weakref.ref(hook)}
    gc.collect()  # of what DDP's constructor leaves, with any hook or none
    gc.disable()
    try:
        del ddp, hook
        for _ in range(100):  # the communication thread may still be putting its things away
            left = [name for name, ref in {**alive, "parameter": parameter}.items() if ref() is not None]
            time.sleep(0.01 * bool(left))
        assert not left, f"still alive: {left}"
    finally:
        gc.enable()


@check(row=("ring", "clipped", "leafwise", "residuals", "low rank"), mode=("plain", "find unused"))
def joining_with_uneven_batches(rank: int, n: int, row: str, mode: str) -> None:
    # Collectives did not match: pytorch#61020.
    pipeline = {**ROWS, **STATEFUL, "leafwise": LEAFWISE}[row].pipeline
    batches = (3, 5, 4, 1)[rank]
    loop = seeded(Crossed)
    plain, ddp = (DistributedDataParallel(copy.deepcopy(loop), bucket_cap_mb=CAP, **MODES[mode]) for _ in range(2))
    hook = pc.as_ddp_hook(pipeline, None if row == "leafwise" else ddp)
    ddp.register_comm_hook(None, hook)
    state: Any = None

    def descend(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad

    for model in (ddp, plain):
        with model.join():
            for step in range(batches):
                model.zero_grad()
                squares(batch(step, rank, 3, 4))(model)
                descend(model)
    for step in range(5):  # one that has joined adds zeros, and keeps what it had still to add
        loop.zero_grad()
        kept = {}
        if step < batches:
            squares(batch(step, rank, 3, 4))(loop)
        elif "error_feedback" in (state or {}):
            kept = state["error_feedback"]["residual"]
            zeros = {name: torch.zeros_like(e) for name, e in kept.items()}
            state = {**state, "error_feedback": {"residual": zeros}}
        state = pc.sync_grads(pipeline, loop, state)
        for name, e in kept.items():
            state["error_feedback"]["residual"][name] += e
        descend(loop)
    same_state(hook.state, state, "state")
    same(dict(ddp.module.named_parameters()), dict(loop.named_parameters()), "hook and loop")
    if row == "ring":
        for p, q in zip(ddp.module.parameters(), plain.module.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-4, atol=1e-5), f"{p}, plain DDP {q}"


@check(
    2,
    case=(
        ("delayed", "plain"),
        ("delayed", "find unused"),
        ("delayed", "static"),
        ("of the parent", "plain"),
        ("of the parent", "find unused"),
    ),
    row=("ring", "momentum"),
)
def parameters_that_ddp_does_not_manage(rank: int, n: int, case: tuple[str, str], row: str) -> None:
    # The hook never sees them: those of delay_all_reduce_named_params, and a module that contains the one in DDP.
    model = seeded(Branches)
    parent = nn.ModuleList([model, nn.Linear(2, 2)])
    extra, mode = case
    options: dict[str, Any] = {}
    if extra == "delayed":
        options["delay_all_reduce_named_params"] = [("branches.0.bias", model.branches[0].bias)]
        options["param_to_hook_all_reduce"] = model.branches[0].weight
    loop = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP, **options, **MODES[mode])
    ddp.register_comm_hook(None, pc.as_ddp_hook(ROWS[row].pipeline, ddp if extra == "delayed" else parent))
    params = dict(loop.named_parameters())
    if extra == "delayed":
        del params["branches.0.bias"]
    state: Any = None
    for step in range(4):
        for each in (ddp, loop):
            each.zero_grad()
            squares(batch(step, rank, 3, 4), range(5))(each)
        state = pc.sync_grads(ROWS[row].pipeline, params, state)
        hooked = gradients(model)
        same({name: hooked[name] for name in params}, gradients(params), f"step {step}")


# Tests --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "name"), [(n, name) for n in (2, 4) for name in CHECKS if n in CHECKS[name].sizes])
def test_hook(n: int, name: str, request: pytest.FixtureRequest):
    ended = outcomes(__name__, n, request)
    report = ended.report(name)
    if report:
        pytest.fail(report, pytrace=False)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_exit_cleanly(n: int, request: pytest.FixtureRequest):
    ended = outcomes(__name__, n, request)
    assert ended.exit_codes == [0] * n, ended.output  # -6: gloo aborted
    assert ended.output == [""] * n


@pytest.mark.parametrize("row", PIPELINES, ids=lambda row: row.id)
def test_only_consensus_is_accepted(row: Row):
    model = Crossed()
    if row.pipeline.consensus:
        hook = pc.as_ddp_hook(row.pipeline, model)
        assert repr(hook) == f"as_ddp_hook({row.pipeline!r})"
        assert hook.state == hook.state_dict() == row.pipeline.init(model) == {}
    else:
        with pytest.raises(pc.PipelineError, match="ranks would end with different gradients") as caught:
            pc.as_ddp_hook(row.pipeline, model)
        assert repr(row.pipeline) in str(caught.value)
        assert "ring_reduce()" in str(caught.value)


@pytest.mark.parametrize(
    "pipeline", [MOMENTUM.pipeline, CLIPPED.pipeline, CLIPPED_FIRST.pipeline, FRAGILE["after"].pipeline]
)
def test_whole_tree_and_state_need_the_module(pipeline: pc.Pipeline):
    with pytest.raises(pc.PipelineError, match=r"write as_ddp_hook\(pipeline, module\)") as caught:
        pc.as_ddp_hook(pipeline)
    assert repr(pipeline) in str(caught.value)
    assert pc.as_ddp_hook(pipeline, Crossed()).pipeline == pipeline


@pytest.mark.parametrize(
    "pipeline", [LEAFWISE.pipeline, pc.ring_reduce(), fragile(), pc.chain(pc.bucketize(), pc.all_reduce())]
)
def test_leafwise_pipelines_need_no_module(pipeline: pc.Pipeline):
    assert pc.as_ddp_hook(pipeline).state_dict() == {}


def test_what_is_no_pipeline_is_refused():
    with pytest.raises(pc.PipelineError, match=r"option 'pipeline'.*the tree afterwards"):
        pc.as_ddp_hook({"w": torch.ones(2)})
    with pytest.raises(pc.PipelineError, match=r"function squares.*stateless"):
        pc.as_ddp_hook(squares)
    with pytest.raises(pc.PipelineError, match=r"expected a pipeline, got Bucketize: bucketize\(\)"):
        pc.as_ddp_hook(pc.bucketize())
    with pytest.raises(pc.PipelineError, match="expected a pipeline, got str"):
        pc.as_ddp_hook("ring_reduce")


@dataclass(frozen=True, repr=False)
class averaging(pc.Pipeline):
    """Meant for parameters."""

    works_on = "parameters"
    consensus = True
    communicates = True


def test_pipelines_that_work_on_parameters_are_refused():
    with pytest.raises(pc.PipelineError, match=r"averaging\(\).*works on parameters.*use sync_params"):
        pc.as_ddp_hook(averaging(), Crossed())
    with pytest.raises(pc.PipelineError, match=r"works on parameters.*use sync_params"):
        pc.as_ddp_hook(pc.chain(pc.clip_by_value(1.0), averaging()), Crossed())


def test_state_of_another_pipeline_is_refused():
    model = Crossed()
    hook = pc.as_ddp_hook(MOMENTUM.pipeline, model)
    assert hook.state["step"] == 0
    assert hook.state["momentum"]["m"].keys() == dict(model.named_parameters()).keys()
    for wrong in ({}, {"step": 1}, {"step": 1, "other": {}}, {**hook.state, "other": {}}):
        with pytest.raises(pc.PipelineError, match=r"expected the keys \['step', 'momentum'\]"):
            hook.load_state_dict(wrong)
    assert hook.state["step"] == 0
    hook.load_state_dict({**hook.state, "step": 5})
    assert hook.state_dict()["step"] == 5
    with pytest.raises(pc.PipelineError, match="expected the keys"):
        pc.as_ddp_hook(RING.pipeline, model).load_state_dict(hook.state)
