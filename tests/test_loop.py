"""`sync_grads` and `sync_params` on real ranks, against a loop over a list of ranks in float64."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from tables import PIPELINES
from test_ddp import (
    CLIPPED,
    FUSE,
    MOMENTUM,
    RESIDUALS,
    RING,
    TIMEOUT,
    Boom,
    Branches,
    Crossed,
    averaging,
    batch,
    collector,
    fused,
    gradients,
    outcomes,
    right,
    same,
    seeded,
    squares,
)
from torch import Tensor, nn

import ptcollect as pc

CHECKS, check = collector()
pytestmark = pytest.mark.timeout(360)  # of the launch, as in test_ddp.py

SYNCS: Sequence[Callable[..., Any]] = (pc.sync_grads, pc.sync_params)


# Parameters ---------------------------------------------------------------------------------------------------------


def parameters(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """The same values on every rank, with gradients that differ; one is strided, one has no dims."""
    params = {
        "b.10": nn.Parameter(batch(1, 0, 3, 4, dtype=dtype)),
        "b.2": nn.Parameter(batch(2, 0, 5, dtype=dtype)),
        "a": nn.Parameter(batch(3, 0, dtype=dtype)),
        "t": nn.Parameter(batch(4, 0, 2, 3, dtype=dtype).T),
    }
    for i, p in enumerate(params.values()):
        p.grad = torch.empty_like(p).copy_(batch(10 * step + i + 5, rank, *p.shape, dtype=dtype))
    return params


def places(params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which tensor objects and memory the gradients are."""
    return {name: p.grad is not None and (id(p.grad), p.grad.data_ptr(), p.grad.stride()) for name, p in params.items()}


class Net(nn.Module):
    """Parameters and buffers of several dtypes, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)  # has an integer buffer without dims
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.low = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.low.float().sum()


def everyone(value: Any) -> list[Any]:
    """`value` of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": lambda params: params,
    "list": lambda params: list(params.values()),
    "tuple": lambda params: tuple(params.values()),
    "iterator": lambda params: iter(params.values()),
    "pairs": lambda params: list(params.items()),
    "iterator of pairs": lambda params: iter(params.items()),
    "module": lambda params: nn.ParameterDict({name.replace(".", "-"): p for name, p in params.items()}),
    "named_parameters": lambda params: nn.ParameterList(params.values()).named_parameters(),
    "parameters": lambda params: nn.ParameterList(params.values()).parameters(),
}


# sync_grads ---------------------------------------------------------------------------------------------------------


@check(form=FORMS, donate=(False, True))
def gradients_become_means_in_place(rank: int, n: int, form: str, donate: bool) -> None:
    params = parameters(rank)
    raw, before = gradients(params), places(params)
    values = {name: p.detach().clone() for name, p in params.items()}
    state = pc.sync_grads(RING.pipeline, FORMS[form](params), donate=donate)
    assert state == {}, state
    right(gradients(params), RING, raw, form)
    assert places(params) == before, "not the same tensors"
    same({name: p.detach() for name, p in params.items()}, values, "parameters")
    assert all(p.requires_grad and not p.grad.requires_grad for p in params.values())


@check()
def every_pipeline_of_the_table(rank: int, n: int) -> None:
    for row, donate in zip(PIPELINES, itertools.cycle((False, True)), strict=False):
        if row.ranks <= n:
            params = parameters(rank)
            raw, before = gradients(params), places(params)
            pc.sync_grads(row.pipeline, params, donate=donate, group=row.group(n))
            right(gradients(params), row, raw, row.id)
            assert places(params) == before, f"{row.id}: not the same tensors"
            expected = row.simulate(everyone(raw)).trees[rank]
            if "all_reduce" not in row.id:  # to rounding only
                same(gradients(params), expected, f"{row.id} and the simulator")


@check(form=("dict", "list", "module"))
def state_is_threaded_by_name(rank: int, n: int, form: str) -> None:
    names = {
        "dict": ["b.10", "b.2", "a", "t"],
        "list": ["0", "1", "2", "3"],
        "module": ["b-10", "b-2", "a", "t"],
    }[form]
    state: Any = None
    momenta = [torch.zeros(())] * 4
    for step in range(4):
        params = parameters(rank, step)
        raw = everyone(list(gradients(params).values()))
        kept = copy.deepcopy(state)
        new = pc.sync_grads(MOMENTUM.pipeline, FORMS[form](params), state)
        if state is not None:
            assert state["step"] == kept["step"], "the old state changed"
            same(state["momentum"]["m"], kept["momentum"]["m"], "the old state")
        state = new
        assert state["step"] == step + 1
        assert sorted(state["momentum"]["m"]) == sorted(names)
        for i, p in enumerate(params.values()):
            momenta[i] = 0.5 * momenta[i] + torch.stack([grads[i].double() for grads in raw]).mean(0)
            largest = max(float(grads[i].abs().max()) for grads in raw)
            off = float((p.grad - momenta[i]).abs().max())
            assert off <= 20 * n * oracle.eps(torch.float32) * (1 + largest), f"step {step}, {names[i]}: off by {off}"


@check()
def one_that_is_missing_on_some_ranks_counts_as_zeros(rank: int, n: int) -> None:
    params = parameters(rank)
    params["none"] = nn.Parameter(torch.ones(2))
    if rank != 1:
        params["t"].grad = None
    if rank == 0:
        params["a"].grad = None
    raw, before = gradients(params), places(params)
    with pytest.raises(pc.TreeMismatchError, match=r"'a' is None.*rank 0.*rank 1.*missing=\"zeros\""):
        pc.sync_grads(RING.pipeline, params, missing="error")
    same(gradients(params), raw, "after the error")
    assert places(params) == before
    pc.sync_grads(RING.pipeline, params)
    right(gradients(params), RING, raw, "missing")
    for name, p in params.items():
        assert not before[name] or places(params)[name] == before[name], f"{name}: not the same tensor"
        assert p.grad is None or (p.grad.dtype == p.dtype and p.grad.shape == p.shape)
    assert params["none"].grad is None
    mine = [params["t"].grad.data_ptr(), params["a"].grad.data_ptr()]
    pc.sync_grads(RING.pipeline, params)  # and now it is the gradient, in place
    assert [params["t"].grad.data_ptr(), params["a"].grad.data_ptr()] == mine
    for p in params.values():
        p.grad = None
    assert pc.sync_grads(RING.pipeline, params) == {}
    assert all(p.grad is None for p in params.values())


@check()
def what_requires_no_gradient_is_left_out(rank: int, n: int) -> None:
    params = parameters(rank)
    params["b.2"].requires_grad_(False)
    params["a"].requires_grad_(False)
    params["a"].grad = None
    raw = gradients(params)
    state = pc.sync_grads(MOMENTUM.pipeline, params)
    assert sorted(state["momentum"]["m"]) == ["b.10", "t"]
    assert oracle.same_bits(params["b.2"].grad, raw["b.2"])
    assert params["a"].grad is None
    listed = pc.sync_grads(MOMENTUM.pipeline, list(params.values()))
    assert sorted(listed["momentum"]["m"]) == ["0", "3"]  # places in the list that was given


FRAGILE = {
    "before": pc.chain(pc.stateless(fused), pc.bucketize(256), pc.ring_reduce()),
    "after": pc.chain(pc.bucketize(256), pc.ring_reduce(), pc.stateless(fused)),
}


@check(where=FRAGILE)
def gradients_are_what_they_were_after_an_error(rank: int, n: int, where: str) -> None:
    params = parameters(rank)
    raw, before = gradients(params), places(params)
    start = time.monotonic()
    if rank == n - 1:
        FUSE["left"] = 1
        with pytest.raises(Boom, match="the fuse blew"):
            pc.sync_grads(FRAGILE[where], params)
        same(gradients(params), raw, "after the error")
    elif where == "before":
        with pytest.raises(pc.PeerLostError, match=f"rank {n - 1} failed: Boom: the fuse blew"):
            pc.sync_grads(FRAGILE[where], params)
        same(gradients(params), raw, "after the error")
    else:
        pc.sync_grads(FRAGILE[where], params)
        params = parameters(rank)
        before = places(params)
    if where == "after":
        with pytest.raises(pc.PeerLostError, match=f"previous call failed on rank {n - 1}"):
            pc.sync_grads(FRAGILE[where], params)
        same(gradients(params), raw, "after the error that tells of the error")
    assert time.monotonic() - start < TIMEOUT / 2
    assert places(params) == before
    pc.sync_grads(FRAGILE[where], params)
    right(gradients(params), RING, raw, "the next call")


@check()
def gradients_are_what_they_were_after_a_mismatch(rank: int, n: int) -> None:
    params = parameters(rank)
    if rank == 1:
        params["b.2"] = nn.Parameter(torch.zeros(6))
        params["b.2"].grad = torch.ones(6)
    raw, before = gradients(params), places(params)
    state = MOMENTUM.pipeline.init(params)
    with pytest.raises(pc.TreeMismatchError, match=r"'b\.2'.*rank 0 has \(5,\).*rank 1 has \(6,\)"):
        pc.sync_grads(MOMENTUM.pipeline, params, state)
    same(gradients(params), raw, "after the error")
    assert places(params) == before
    assert state["step"] == 0
    with pytest.raises(pc.TreeMismatchError, match=r"'b\.2'"):
        pc.sync_grads(RING.pipeline, params)
    same(gradients(params), raw, "after the error")


@check()
def a_sparse_gradient_is_named(rank: int, n: int) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    linear = nn.Linear(2, 2)
    linear(embedding(torch.tensor([rank % 4]))).sum().backward()
    params = {**{f"linear.{name}": p for name, p in linear.named_parameters()}, "embedding.weight": embedding.weight}
    raw = gradients(linear)
    with pytest.raises(TypeError, match=r"'embedding\.weight'.*sparse"):
        pc.sync_grads(RING.pipeline, params)
    same(gradients(linear), raw, "after the error")
    assert embedding.weight.grad.is_sparse
    pc.sync_grads(RING.pipeline, linear)
    right(gradients(linear), RING, raw, "the next call")


@check()
def gradients_that_repeat_memory(rank: int, n: int) -> None:
    params = parameters(rank)
    params["b.2"].grad = torch.full((1,), 1.0 + rank).expand(5)
    params["t"].grad = torch.arange(2.0).add(rank).expand(3, 2)
    raw = gradients(params)
    try:
        pc.sync_grads(RING.pipeline, params)
    except Exception:
        same(gradients(params), raw, "after the error")
        raise
    right(gradients(params), RING, raw, "expanded")


@check()
def state_of_another_pipeline_is_refused(rank: int, n: int) -> None:
    params = parameters(rank)
    raw = gradients(params)
    for sync in SYNCS:
        with pytest.raises(pc.PipelineError, match=r"expected the keys \['step', 'momentum'\], got \['step'\]"):
            sync(MOMENTUM.pipeline, params, {"step": 1})
        # On one rank only: the others hear of it.
        state = MOMENTUM.pipeline.init(params) if rank else {}
        with pytest.raises(pc.PeerLostError if rank else pc.PipelineError, match=r"expected the keys.*got \[\]"):
            sync(MOMENTUM.pipeline, params, state)
    same(gradients(params), raw, "after the errors")
    pc.sync_grads(MOMENTUM.pipeline, params, MOMENTUM.pipeline.init(params))
    right(gradients(params), RING, raw, "the next call")


@check(2)
def one_gradient_of_two_parameters(rank: int, n: int) -> None:
    for donate in (False, True):
        shared = torch.full((3,), 1.0 + rank)
        params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        for p in params:
            p.grad = shared
        pc.sync_grads(RING.pipeline, params, donate=donate)
        assert all(p.grad is shared for p in params)
        assert shared.tolist() == [1.5, 1.5, 1.5]


@check()
def options_are_passed_on(rank: int, n: int) -> None:
    params = parameters(rank)
    raw = gradients(params)
    weights = [float(r + 1) for r in range(n)]
    pc.sync_grads(RING.pipeline, params, weight=weights[rank])
    expected = pc.simulate(RING.pipeline, everyone(raw), weights=weights).trees[rank]
    same(gradients(params), expected, "weights")
    groups = [dist.new_group([r for r in range(n) if r % 2 == side]) for side in (0, 1)]
    params = parameters(rank)
    pc.sync_grads(CLIPPED.pipeline, params, group=groups[rank % 2])
    right(gradients(params), CLIPPED, raw, "group", groups[rank % 2])


@check(dtype=(torch.float64, torch.float32))
def training_equals_one_process_on_all_data(rank: int, n: int, dtype: torch.dtype) -> None:
    model, whole = seeded(Crossed).to(dtype), seeded(Crossed).to(torch.float64)
    for step in range(6):
        for each in (model, whole):
            each.zero_grad()
        squares(batch(step, rank, 3, 4, dtype=dtype))(model)
        pc.sync_grads(RING.pipeline, model)
        for each_rank in range(n):
            x = batch(step, each_rank, 3, 4, dtype=dtype).double()
            (whole(x).pow(2).sum() / n).backward()
        with torch.no_grad():
            for p in (*model.parameters(), *whole.parameters()):
                p -= 0.02 * p.grad
    bound = 1e-12 if dtype == torch.float64 else 1e-3
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert float((p - q).detach().abs().max()) <= bound
    values = everyone({name: p.detach() for name, p in model.named_parameters()})
    for other in values:
        same(other, values[0], "replicas")


# sync_params --------------------------------------------------------------------------------------------------------


def diverged(rank: int) -> Net:
    """A model that differs from rank to rank, buffers too."""
    torch.manual_seed(rank)
    net = Net()
    net(batch(0, rank, 8, 4))
    for _ in range(rank):
        net(batch(1, rank, 8, 4))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p += batch(20 + i, rank, *p.shape).to(p.dtype)
    return net


@check(root=(0, 1), donate=(False, True))
def broadcast_makes_replicas_equal(rank: int, n: int, root: int, donate: bool) -> None:
    net = diverged(rank)
    net.linear.weight.grad = torch.full((6, 4), float(rank))
    before = {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in net.named_parameters()}
    sources = everyone(copy.deepcopy(net.state_dict()))
    named = {name for name, _ in net.named_parameters()}
    assert pc.sync_params(pc.broadcast(root), net, donate=donate) == {}
    for name, value in net.state_dict().items():
        source = sources[root if name in named else rank]  # a module's buffers stay
        assert oracle.same_bits(value, source[name]), f"{name!r}: {value}, expected {source[name]}"
    assert before == {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in net.named_parameters()}
    assert bool((net.linear.weight.grad == rank).all()), "gradients are no parameters"
    pc.sync_params(pc.broadcast(root), net.state_dict(), donate=donate)
    for name, value in net.state_dict().items():
        assert oracle.same_bits(value, sources[root][name]), f"{name!r}: {value}, expected {sources[root][name]}"
    assert int(net.norm.num_batches_tracked) == root + 1
    net(batch(0, rank, 8, 4)).sum().backward()  # still a model that trains


@check(donate=(False, True))
def parameters_are_averaged_in_place(rank: int, n: int, donate: bool) -> None:
    net = diverged(rank)
    del net.low
    raw = {name: p.detach().clone() for name, p in net.named_parameters()}
    before = {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in net.named_parameters()}
    pc.sync_params(RING.pipeline, net, donate=donate)
    right({name: p.detach() for name, p in net.named_parameters()}, RING, raw, "average")
    assert before == {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in net.named_parameters()}
    assert not net.frozen.requires_grad


@check()
def parameters_are_averaged_by_every_consensus_pipeline(rank: int, n: int) -> None:
    rows = [row for row in PIPELINES if row.pipeline.consensus and row.ranks <= n and not row.mesh]
    for part in ("compress", "bucketize", "ring_reduce", "all_to_all_avg", "all_gather_avg", "all_reduce", "clip"):
        assert any(part in row.id for row in rows), f"the table has lost {part}"
    for row, donate in zip(rows, itertools.cycle((False, True)), strict=False):
        params = {name: p.detach() + batch(40, rank, *p.shape) for name, p in parameters(0).items()}
        raw = {name: p.clone() for name, p in params.items()}
        before = {name: (p.data_ptr(), p.stride()) for name, p in params.items()}
        assert pc.sync_params(row.pipeline, params, donate=donate) == {}
        right(params, row, raw, row.id)
        assert before == {name: (p.data_ptr(), p.stride()) for name, p in params.items()}, f"{row.id}: not in place"
        for other in everyone(params):
            same(other, params, f"{row.id}: replicas")


@check()
def what_int8_drops_of_parameters_is_booked(rank: int, n: int) -> None:
    params = {"w": batch(41, rank, 300)}
    total = torch.stack([other["w"].double() for other in everyone(params)]).sum(0)
    state = pc.sync_params(RESIDUALS.pipeline, params)
    kept_back = torch.stack(everyone(state["error_feedback"]["residual"]["w"].double())).sum(0)
    assert float(kept_back.abs().max()) > 1e-3, "int8 drops something of these"
    assert float((n * params["w"].double() + kept_back - total).abs().max()) <= 1e-5


@check()
def forms_of_parameters(rank: int, n: int) -> None:
    for form, make in FORMS.items():
        params = parameters(rank)
        with torch.no_grad():
            for p in params.values():
                p += rank
        raw = {name: p.detach().clone() for name, p in params.items()}
        pc.sync_params(RING.pipeline, make(params))
        right({name: p.detach() for name, p in params.items()}, RING, raw, form)


@check()
def state_of_parameters_is_threaded(rank: int, n: int) -> None:
    state: Any = None
    for step in range(3):
        params = {"w": torch.full((3,), float(rank + step))}
        state = pc.sync_params(MOMENTUM.pipeline, params, state)
        assert state["step"] == step + 1
    start = (n - 1) / 2
    expected = 0.5 * (0.5 * start + start + 1) + start + 2
    assert torch.allclose(params["w"], torch.full((3,), expected)), params


@check()
def parameters_are_what_they_were_after_an_error(rank: int, n: int) -> None:
    net = diverged(rank)
    before = copy.deepcopy(net.state_dict())
    if rank == 0:
        FUSE["left"] = 1
    with pytest.raises(Boom if rank == 0 else pc.PeerLostError, match="the fuse blew"):
        pc.sync_params(pc.chain(pc.stateless(fused), pc.broadcast()), net)
    same(net.state_dict(), before, "after the error")
    other = nn.Linear(3, 2 + (rank == 1))
    kept = copy.deepcopy(other.state_dict())
    with pytest.raises(pc.TreeMismatchError, match=r"'bias'.*\(2,\).*\(3,\)"):
        pc.sync_params(pc.broadcast(), other)
    same(other.state_dict(), kept, "after the mismatch")
    pc.sync_params(pc.broadcast(), net)
    replicas = everyone({name: p.detach() for name, p in net.named_parameters()})
    for replica in replicas:
        same(replica, replicas[0], "replicas")


@check()
def a_loop_that_starts_from_one_ranks_parameters(rank: int, n: int) -> None:
    torch.manual_seed(rank)
    model = Branches()
    pc.sync_params(pc.chain(pc.bucketize(), pc.broadcast(n - 1)), model)
    state: Any = None
    for step in range(4):
        model.zero_grad()
        squares(batch(step, rank, 3, 4), [0, 1 + (rank + step) % 3])(model)
        state = pc.sync_grads(CLIPPED.pipeline, model, state)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    replicas = everyone({name: p.detach() for name, p in model.named_parameters()})
    torch.manual_seed(n - 1)
    start = dict(Branches().named_parameters())
    for replica in replicas:
        same(replica, replicas[0], "replicas")
        assert oracle.same_bits(replica["branches.4.weight"], start["branches.4.weight"].detach())
        assert not torch.equal(replica["branches.0.weight"], start["branches.0.weight"])


# Tests --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "name"), [(n, name) for n in (2, 4) for name in CHECKS if n in CHECKS[name].sizes])
def test_loop(n: int, name: str, request: pytest.FixtureRequest):
    ended = outcomes(__name__, n, request)
    report = ended.report(name)
    if report:
        pytest.fail(report, pytrace=False)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_exit_cleanly(n: int, request: pytest.FixtureRequest):
    ended = outcomes(__name__, n, request)
    assert ended.exit_codes == [0] * n, ended.output  # -6: gloo aborted
    assert ended.output == [""] * n


LOCAL = pc.clip_by_value(1.0)  # sends nothing, and so needs no ranks


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("params", [torch.ones(2), nn.Parameter(torch.ones(2)), None, 3])
def test_what_are_no_parameters_is_refused(sync: Callable[..., Any], params: Any):
    with pytest.raises(TypeError, match=rf"module\.parameters\(\).*got {type(params).__name__}"):
        sync(LOCAL, params)


@pytest.mark.parametrize("sync", SYNCS)
def test_options_are_checked(sync: Callable[..., Any]):
    with pytest.raises(TypeError, match="unknown option 'grop'"):
        sync(LOCAL, nn.Linear(1, 1), grop=None)
    with pytest.raises(ValueError, match='missing: expected "error" or "zeros"'):
        sync(LOCAL, nn.Linear(1, 1), missing="skip")


@dataclass(frozen=True, repr=False)
class descending(pc.Pipeline):
    """Meant for gradients."""

    works_on = "gradients"


def test_pipelines_for_the_other_are_refused():
    with pytest.raises(pc.PipelineError, match=r"averaging\(\).*works on parameters.*use sync_params"):
        pc.sync_grads(pc.chain(LOCAL, averaging()), nn.Linear(1, 1))
    with pytest.raises(pc.PipelineError, match=r"descending\(\).*works on gradients.*use sync_grads"):
        pc.sync_params(pc.chain(LOCAL, descending()), nn.Linear(1, 1))


@pytest.mark.parametrize("sync", SYNCS)
def test_state_of_another_pipeline_is_refused(sync: Callable[..., Any]):
    model = nn.Linear(1, 1)
    with pytest.raises(pc.PipelineError, match=r"expected the keys \[\]"):
        sync(LOCAL, model, {"step": 1})


def test_local_pipelines_need_no_group():
    model = nn.Linear(2, 1)
    model(torch.tensor([[3.0, 0.5]])).sum().backward()
    grad = model.weight.grad
    assert pc.sync_grads(LOCAL, model) == {}
    assert model.weight.grad is grad
    assert grad.tolist() == [[1.0, 0.5]]
    weight = model.weight
    assert pc.sync_params(pc.scale(0.0), model) == {}
    assert model.weight is weight
    assert weight.tolist() == [[0.0, 0.0]]
