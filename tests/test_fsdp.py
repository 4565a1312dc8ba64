"""`as_fsdp_hook` on four ranks, two replicas of a model that two ranks share, against one process and `simulate`."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from named_checks import TIMEOUT, collector, outcomes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import ptcollect as pc

pytestmark = pytest.mark.timeout(360)

CHECKS, check = collector()

RING = pc.chain(pc.bucketize(64), pc.ring_reduce())
RESIDUALS = pc.chain(pc.error_feedback(), pc.bucketize(64), pc.compress("int8"), pc.ring_reduce())


class Net(nn.Module):
    """Layers of sizes that two ranks cannot share evenly, and parameters of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7, bias=False), nn.Linear(7, 3)])
        self.shift = nn.Parameter(torch.zeros(3))
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, more: bool = False) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.unused(x + self.shift) if more else x + self.shift


def seeded(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank)) * (rank + 1)


def loss_of(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return model(x, **options).square().mean()


def meshed() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


Made = Callable[[], Callable[[Tensor], None]]


class Sharded:
    """A model in FSDP with a hook on each of its modules, and SGD."""

    def __init__(self, made: Made, mesh: DeviceMesh, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model = seeded(dtype)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh["shard"], **options)
        fully_shard(self.model, mesh=mesh["shard"], **options)
        self.hooks: dict[str, Any] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, FSDPModule):
                self.hooks[name] = made()
                module.set_all_reduce_hook(self.hooks[name])

    def step(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
        self.model.zero_grad()

    def equals(self, alone: nn.Module, tolerance: float) -> None:
        """Its gradients are those of `alone`, to so many times the largest number."""
        for (name, p), q in zip(self.model.named_parameters(), alone.parameters(), strict=True):
            if q.grad is None:
                continue
            error = (p.grad.full_tensor().double() - q.grad.double()).abs().max()
            assert error <= tolerance * q.grad.abs().max(), f"{name}: off by {error}"


def alone_on_all(dtype: torch.dtype, *steps: int) -> Net:
    """One process in float64 on the batches of all ranks, that of each step added."""
    model = seeded(dtype).double()
    for step in steps:
        loss_of(model, torch.cat([batch(step, rank) for rank in range(4)]).double()).backward()
    return model


def same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            same(got[key], value)
    elif isinstance(wanted, Tensor):
        assert oracle.same_bits(got, wanted), f"got {got}, expected {wanted}"
    else:
        assert got == wanted


def gathered(value: Any, group: Any = None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


@check(4, dtype=(torch.float32, torch.float64, torch.bfloat16), group=("mesh", "group"))
def the_mean_is_exact(rank: int, n: int, dtype: torch.dtype, group: str) -> None:
    mesh = meshed()
    replicas = mesh["replicate"] if group == "mesh" else mesh["replicate"].get_group()
    options = {}
    if dtype == torch.bfloat16:  # bf16 reduces, on float32 parameters
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=dtype)
        dtype = torch.float32
    tolerance = 2.0**-7 if options else 4 * torch.finfo(dtype).eps
    shared = pc.as_fsdp_hook(RING, replicas)  # without state one hook may serve all
    sharded = Sharded(
        lambda: shared if group == "mesh" else pc.as_fsdp_hook(RING, group=replicas), mesh, dtype, **options
    )
    loss_of(sharded.model, batch(0, rank).to(dtype)).backward()
    sharded.equals(alone_on_all(dtype, 0), tolerance)
    mine = [p.grad.to_local() for p in sharded.model.parameters() if p.grad is not None]
    for ours, theirs in zip(*gathered(mine, mesh["replicate"].get_group()), strict=True):
        assert oracle.same_bits(ours, theirs), "replicas differ"


@check(4)
def compressed_steps_equal_the_simulation(rank: int, n: int) -> None:
    mesh = meshed()
    seen: dict[int, list[Tensor]] = {}

    def made() -> Callable[[Tensor], None]:
        hook = pc.as_fsdp_hook(RESIDUALS, mesh["replicate"])
        assert hook.state == {}

        def spied(shard: Tensor) -> None:
            before = shard.clone()
            hook(shard)
            seen[id(hook)] = [before, shard.clone()]

        spied.hook = hook  # type: ignore[attr-defined]
        return spied

    sharded = Sharded(made, mesh)
    states: dict[str, Any] = dict.fromkeys(sharded.hooks)
    replicas, mine = mesh["replicate"].get_group(), mesh["replicate"].get_local_rank()
    for step in range(4):
        loss_of(sharded.model, batch(step, rank)).backward()
        for name, spied in sharded.hooks.items():
            before, after = seen.pop(id(spied.hook))
            run = pc.simulate(RESIDUALS, [{"shard": x} for x in gathered(before, replicas)], states[name])
            states[name] = run.states
            same(after, run.trees[mine]["shard"])
            same(spied.hook.state, run.states[mine])
            assert step == 0 or not oracle.same_bits(before, after)
        sharded.step()
    assert sharded.hooks[""].hook.state["step"] == 4


@check(4)
def a_checkpoint_goes_on_with_the_same_bits(rank: int, n: int) -> None:
    mesh = meshed()
    first = Sharded(lambda: pc.as_fsdp_hook(RESIDUALS, mesh["replicate"]), mesh)
    saved = io.BytesIO()
    for step in range(4):
        if step == 2:
            model = {name: p.to_local() for name, p in first.model.state_dict().items()}
            torch.save({"model": model, "sync": {k: hook.state_dict() for k, hook in first.hooks.items()}}, saved)
        loss_of(first.model, batch(step, rank)).backward()
        first.step()
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    second = Sharded(lambda: pc.as_fsdp_hook(RESIDUALS, mesh["replicate"]), mesh)
    with torch.no_grad():
        for name, p in second.model.state_dict().items():
            p.to_local().copy_(loaded["model"][name])
    for name, hook in second.hooks.items():
        hook.load_state_dict(loaded["sync"][name])
    for step in (2, 3):
        loss_of(second.model, batch(step, rank)).backward()
        second.step()
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        same(q.to_local(), p.to_local())
    same({k: hook.state for k, hook in second.hooks.items()}, {k: hook.state for k, hook in first.hooks.items()})
    assert any(hook.state["error_feedback"]["residual"]["shard"].any() for hook in first.hooks.values())


@check(4)
def accumulated_gradients_are_synchronised_once(rank: int, n: int) -> None:
    mesh = meshed()
    sharded = Sharded(lambda: pc.as_fsdp_hook(RING, mesh["replicate"]), mesh)
    sharded.model.set_requires_gradient_sync(False)
    with pc.traffic() as nothing:
        loss_of(sharded.model, batch(0, rank)).backward()
    assert nothing.messages == 0
    sharded.model.set_requires_gradient_sync(True)
    loss_of(sharded.model, batch(1, rank)).backward()
    sharded.equals(alone_on_all(torch.float32, 0, 1), 4 * torch.finfo(torch.float32).eps)


class Boom(Exception):  # noqa: N818
    pass


ARMED: set[str] = set()


@dataclass(frozen=True, repr=False)
class raising(pc.Transform):
    """Raises on one rank, before or after the reducer, while its name is in `ARMED`."""

    name = "raising"
    works_in_buckets = True
    at: str
    rank: int
    before: bool = True

    async def update(self, inner: pc.Pipeline, tree: Any, state: Any, comm: pc.Comm) -> Any:
        mine = dist.get_rank() == self.rank and self.at in ARMED
        if mine and self.before:
            raise Boom("of the stage")
        out, inner_state = await inner.apply(tree, state["inner"], comm)
        if mine:
            raise Boom("of the stage")
        return out, {"inner": inner_state}


@check(4, where=("first of backward", "in the middle", "last of backward", "everywhere", "in the middle, late"))
def a_raising_stage_is_an_error_on_its_replicas_and_the_next_step_works(rank: int, n: int, where: str) -> None:
    mesh, culprit, replica = meshed(), 2, 0
    every = ["", "layers.0", "layers.1", "layers.2"]
    failing = {"first of backward": ["layers.2"], "last of backward": ["layers.0"], "everywhere": every}

    def started() -> Sharded:
        names = iter(every)

        def made() -> Callable[[Tensor], None]:
            stage = raising(next(names), culprit, before="late" not in where)
            return pc.as_fsdp_hook(
                pc.chain(pc.error_feedback(), stage, pc.compress("int8"), pc.ring_reduce()), mesh["replicate"]
            )

        sharded = Sharded(made, mesh)
        assert list(sharded.hooks) == every
        loss_of(sharded.model, batch(0, rank)).backward()
        sharded.step()
        return sharded

    sharded, good = started(), started()
    loss_of(good.model, batch(1, rank)).backward()
    kept = {name: hook.state_dict() for name, hook in sharded.hooks.items()}
    ARMED.update(failing.get(where, ["layers.1"]))
    caught: Exception | None = None
    start = time.monotonic()
    try:
        loss_of(sharded.model, batch(1, rank)).backward()
    except (Boom, pc.PeerLostError) as error:
        caught = error
    ARMED.clear()
    assert time.monotonic() - start < TIMEOUT / 2
    assert isinstance(caught, {culprit: Boom, replica: pc.PeerLostError}.get(rank, type(None))), repr(caught)
    if rank == replica:
        # Where the stage fails after the reducer, its replica has finished that call and learns of it by the next.
        word = "the previous call failed on rank 1" if "late" in where else "failed: Boom: of the stage"
        assert word in str(caught), str(caught)
    sharded.model.zero_grad()
    for name, hook in sharded.hooks.items():
        hook.load_state_dict(kept[name])
    loss_of(sharded.model, batch(1, rank)).backward()
    for p, q in zip(sharded.model.parameters(), good.model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            same(p.grad.to_local(), q.grad.to_local())
    same({k: hook.state for k, hook in sharded.hooks.items()}, {k: hook.state for k, hook in good.hooks.items()})


@check(4)
def one_hook_with_state_on_several_modules_is_an_error(rank: int, n: int) -> None:
    mesh = meshed()
    shared = pc.as_fsdp_hook(RESIDUALS, mesh["replicate"])
    sharded = Sharded(lambda: shared, mesh)
    with pytest.raises(
        pc.PipelineError, match=r"called with \d+ numbers of torch.float32 and before with .*one hook for"
    ):
        loss_of(sharded.model, batch(0, rank)).backward()
    alike = nn.Sequential(*(fully_shard(nn.Linear(4, 4), mesh=mesh["shard"]) for _ in range(2)))
    shared = pc.as_fsdp_hook(RESIDUALS, mesh["replicate"])
    for module in fully_shard(alike, mesh=mesh["shard"]):
        module.set_all_reduce_hook(shared)
    with pytest.raises(pc.PipelineError, match=r"called twice in one backward pass.*make one hook for each module"):
        alike(torch.ones(2, 4)).sum().backward()


@check(4)
def parameters_used_in_some_steps_only(rank: int, n: int) -> None:
    mesh = meshed()
    for unused in (False, True):
        sharded = Sharded(lambda: pc.as_fsdp_hook(RESIDUALS, mesh["replicate"]), mesh)
        sharded.model.set_reduce_scatter_unused_params(unused)
        loss_of(sharded.model, batch(0, rank)).backward()
        sharded.model.zero_grad()
        if unused:
            loss_of(sharded.model, batch(0, rank), more=True).backward()
            assert {hook.state["step"] for hook in sharded.hooks.values()} == {2}
        else:
            with pytest.raises(pc.PipelineError, match=r"set_reduce_scatter_unused_params\(True\)"):
                loss_of(sharded.model, batch(0, rank), more=True).backward()


@check(4)
def parameters_used_on_one_replica_only(rank: int, n: int) -> None:
    mesh = meshed()
    for pipeline in (RING, RESIDUALS):
        sharded = Sharded(lambda pipeline=pipeline: pc.as_fsdp_hook(pipeline, mesh["replicate"]), mesh)
        loss_of(sharded.model, batch(0, rank)).backward()
        with pytest.raises(pc.TreeMismatchError, match=r"leaf 'shard': rank 0 .*has \(\d+,\) float32, rank 1"):
            loss_of(sharded.model, batch(0, rank), more=rank // 2 == 1).backward()


PAGE = Path(__file__).parents[1] / "docs" / "meshes.md"


@check(4)
def the_page_trains_as_one_process_and_skips_what_is_not_finite(rank: int, n: int) -> None:
    parts = re.split(r"^###? (.*)\n", PAGE.read_text(), flags=re.MULTILINE)[1:]
    code = {
        title: "\n".join(re.findall(r"^```python\n(.*?)^```$", body, flags=re.MULTILINE | re.DOTALL))
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }
    page: dict[str, Any] = {"torch": torch, "dist": dist, "pc": pc, "init_device_mesh": init_device_mesh}

    def run(title: str) -> None:
        exec(
            compile(
                code[title].replace("(1, 1)", "(2, 2)").replace("dist.destroy_process_group()", ""), str(PAGE), "exec"
            ),
            page,
        )

    def apart() -> float:
        return max(
            float((p.full_tensor() - q).detach().abs().max())
            for p, q in zip(page["model"].parameters(), alone.parameters(), strict=True)
        )

    run("Hybrid sharding with FSDP2")
    everything = gathered((page["inputs"], page["targets"]))
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    inputs, targets = (torch.cat(numbers).double() for numbers in zip(*everything, strict=True))

    def step_alone(times: int) -> None:
        optimizer.zero_grad()
        (times * nn.functional.mse_loss(alone(inputs), targets)).backward()
        optimizer.step()

    step_alone(1)
    assert apart() < 1e-3, apart()  # what int8 rounds in a step of 0.1
    run("Accumulation")
    step_alone(2)
    assert apart() < 2e-3, apart()
    run("Checkpoints")
    run("A step that went wrong")
    step_alone(1)
    assert apart() < 3e-3, apart()

    before = {name: hook.state_dict() for name, hook in page["hooks"].items()}
    good = page["inputs"]
    page["inputs"] = good * float("nan") if rank == 1 else good
    run("A step that went wrong")
    assert apart() < 3e-3, apart()
    same({name: hook.state_dict() for name, hook in page["hooks"].items()}, before)
    page["inputs"] = good
    run("A step that went wrong")
    step_alone(1)
    assert apart() < 4e-3, apart()


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("n", [4])
def test_fsdp(n: int, name: str, request: pytest.FixtureRequest):
    report = outcomes(__name__, n, request).report(name)
    if report:
        pytest.fail(report, pytrace=False)


def test_ranks_exit_cleanly(request: pytest.FixtureRequest):
    ended = outcomes(__name__, 4, request)
    assert ended.exit_codes == [0] * 4, ended.output
    assert ended.output == [""] * 4


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (pc.gather_avg(), "replicas would end with different gradients.*ring_reduce"),
        (pc.bucketize(), "expected a pipeline, got Bucketize"),
        (pc.partition({"*": pc.ring_reduce()}), "partition.*a pipeline for each module"),
        (pc.chain(pc.error_feedback(), pc.low_rank(2), pc.ring_reduce()), r"low_rank\(2\) needs.*compress"),
        (pc.chain(pc.ring_reduce(), pc.clip_by_global_norm(1.0)), r"clip_by_global_norm\(1.0\) needs.*after backward"),
        (pc.piecewise({0: pc.chain(pc.stateless(dict), pc.ring_reduce())}), r"stateless\(.*needs.*after backward"),
        (pc.chain(pc.skip_nonfinite(), pc.ring_reduce()), r"skip_nonfinite\(\) needs.*on all ranks"),
    ],
)
def test_what_a_flat_part_cannot_do_is_refused(pipeline: Any, message: str):
    with pytest.raises(pc.PipelineError, match=message):
        pc.as_fsdp_hook(pipeline, None)  # type: ignore[arg-type]  # told before the group


@pytest.mark.parametrize(("gone", "reached"), [(False, ["later", "earlier"]), (True, ["later"])])
def test_only_the_loss_of_a_silent_peer_interrupts_backward(gone: bool, reached: list[str], monkeypatch: Any):
    def lost(*_: Any, **__: Any) -> Any:
        error = pc.PeerLostError("rank 1 is lost")
        error.gone = gone
        raise error

    monkeypatch.setattr(pc.Pipeline, "update", lost)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        hook = pc.as_fsdp_hook(RING, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    calls: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    x.register_hook(lambda grad: calls.append("earlier"))
    y.register_hook(lambda grad: (calls.append("later"), hook(grad.clone()))[1])
    with pytest.raises(pc.PeerLostError, match="rank 1 is lost"):
        y.backward()
    assert calls == reached
    with pytest.raises(pc.PeerLostError, match="rank 1 is lost"):  # where no backward pass could raise it
        hook(torch.ones(1))


def test_a_group_is_needed():
    with pytest.raises(TypeError, match=r'name the replicas, as in mesh\["replicate"\]'):
        pc.as_fsdp_hook(pc.ring_reduce(), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="group: expected a ProcessGroup"):
        pc.as_fsdp_hook(pc.ring_reduce(), "replicate")  # type: ignore[arg-type]
