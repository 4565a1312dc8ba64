"""docs/migration.md: every pipeline gives what its row says, and torch's own hooks give the same where it says so.

Pipelines are read from the page. What they must give is written here once more, in numbers and by a loop over ranks.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_ddp import batch, collector, outcomes
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import ptcollect as pc

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"
SECTIONS = ("torch_hooks", "horovod", "deepspeed", "bagua", "jax")

CHECKS, check = collector()
pytestmark = pytest.mark.timeout(360)  # of the launch, as in test_ddp.py


@functools.cache
def page() -> dict[str, Any]:
    """What the page's blocks define."""
    module = types.ModuleType("migration")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(re.sub(r"^print\(.*\n", "", block, flags=re.MULTILINE), str(PAGE), "exec"), vars(module))
    return vars(module)


# In one process: four ranks, 1536 + 48 numbers ------------------------------------------------------------------------

Tree = dict[str, Tensor]
N = 4


def mean(trees: list[Tree]) -> Tree:
    return {name: torch.stack([tree[name].double() for tree in trees]).mean(0) for name in trees[0]}


def total(trees: list[Tree]) -> Tree:
    return {name: N * leaf for name, leaf in mean(trees).items()}


def clipped(trees: list[Tree]) -> Tree:
    tree = mean(trees)
    norm = torch.cat([leaf.flatten() for leaf in tree.values()]).norm().item()
    assert norm > 1
    return {name: leaf / norm for name, leaf in tree.items()}


def clamped(trees: list[Tree]) -> Tree:
    return {name: leaf.clamp(-0.1, 0.1) for name, leaf in mean(trees).items()}


def half(trees: list[Tree]) -> Tree:
    return {name: leaf / 2 for name, leaf in mean(trees).items()}


@dataclass(frozen=True)
class Meaning:
    """What a row must give."""

    value: Callable[[list[Tree]], Tree] = mean
    bytes: int = 9504
    """Sent per rank; dense: 2 * 3 chunks of 396 numbers of 4 bytes."""
    off: float = 1e-6
    """Largest error, in units of the largest number put in."""
    rounding: float = 0.0
    """And beyond that, element by element, in units of the mean magnitude over ranks."""
    later: tuple[int, int] | None = None
    """A step in the second piece, and the bytes there."""


FP16, BF16 = 5 * 2.0**-11, 5 * 2.0**-8  # rounded once at the ranks, at each of 3 sums, and as the result
INT8 = 2.01 / 254  # once for its owner and once as the result, each to half a step of the block's largest
INT4 = 2.01 / 14

MEANINGS: dict[tuple[str, str], Meaning] = {
    ("torch_hooks", "allreduce_hook"): Meaning(),
    ("torch_hooks", "fp16_compress_hook"): Meaning(bytes=4752, rounding=FP16),
    ("torch_hooks", "bf16_compress_hook"): Meaning(bytes=4752, rounding=BF16),
    # All 1584 codes and the scales, to 3 others.
    ("torch_hooks", "quantization_pertensor_hook"): Meaning(bytes=3 * (1584 + 4), off=INT8 / 2),
    ("torch_hooks", "quantization_perchannel_hook"): Meaning(bytes=3 * (1584 + 4 * 4), off=INT8 / 2),
    # P with the vector, then Q: 48 * 4 + 48 and 32 * 4 numbers.
    ("torch_hooks", "powerSGD_hook"): Meaning(later=(2, 2 * 3 * (60 + 32) * 4)),
    ("torch_hooks", "fp16_compress_wrapper(powerSGD_hook)"): Meaning(later=(2, 2 * 3 * (60 + 32) * 2)),
    ("horovod", "op=Average"): Meaning(),
    ("horovod", "op=Sum"): Meaning(total, off=4e-6),
    ("horovod", "compression=Compression.fp16"): Meaning(bytes=4752, rounding=FP16),
    ("horovod", "gradient_predivide_factor=f"): Meaning(),
    ("horovod", "HOROVOD_FUSION_THRESHOLD=67108864"): Meaning(),
    ("horovod", "synchronize(), clip_grad_norm_, skip_synchronize()"): Meaning(clipped),
    ("deepspeed", '"communication_data_type": "bf16"'): Meaning(bytes=4752, rounding=BF16),
    ("deepspeed", '"communication_data_type": "fp32"'): Meaning(),
    ("deepspeed", '"reduce_bucket_size": 5e8'): Meaning(),
    ("deepspeed", '"gradient_clipping": 1.0'): Meaning(clipped),
    # Chunks of 396: 198 bytes and 7 scales.
    ("deepspeed", '"zero_quantized_gradients": true'): Meaning(bytes=6 * (198 + 28), off=INT4),
    ("deepspeed", '"OneBitAdam", of gradients'): Meaning(later=(400, 6 * (50 + 4))),
    ("bagua", "GradientAllReduceAlgorithm()"): Meaning(),
    ("bagua", "GradientAllReduceAlgorithm(average=False)"): Meaning(total, off=4e-6),
    ("bagua", "ByteGradAlgorithm()"): Meaning(bytes=6 * (396 + 8), off=INT8),
    ("bagua", "QAdamAlgorithm(), of gradients"): Meaning(later=(100, 6 * (396 + 8))),
    ("bagua", 'DecentralizedAlgorithm(peer_selection_mode="all")'): Meaning(),
    ("jax", 'lax.pmean(grads, "i")'): Meaning(),
    ("jax", 'lax.psum(grads, "i")'): Meaning(total, off=4e-6),
    ("jax", "optax.clip_by_global_norm(1.0)"): Meaning(clipped),
    ("jax", "optax.clip(0.1)"): Meaning(clamped),
    ("jax", "optax.scale(0.5)"): Meaning(half),
    ("jax", "optax.stateless(f)"): Meaning(),
    ("jax", "optax.apply_if_finite(..., 5)"): Meaning(),
    # The vector dense, the matrix in half the bytes.
    ("jax", "optax.multi_transform"): Meaning(bytes=6 * (12 * 4 + 384 * 2), rounding=BF16),
}


def test_every_row_has_a_meaning_here():
    assert {(section, name) for section in SECTIONS for name in page()[section]} == set(MEANINGS)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_pipeline_has_a_row_on_the_page(section: str):
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), flags=re.MULTILINE)  # their first columns
    words = {word.lower().replace("_", "") for row in rows for word in re.findall(r"\w+", row)}
    for name in page()[section]:
        for word in re.findall(r"\w{4,}", re.split("Algorithm|,|=", name)[0]):
            assert word.lower().replace("_", "") in words, f"no row has {word}, of {name}"


def gradients(step: int = 0) -> list[Tree]:
    return [{"fc.weight": batch(2 * step, r, 48, 32), "fc.bias": batch(2 * step + 1, r, 48)} for r in range(N)]


@pytest.mark.parametrize(("section", "name"), MEANINGS)
def test_a_row_gives_what_it_says(section: str, name: str):
    pipeline, meaning = page()[section][name], MEANINGS[section, name]
    trees = gradients()
    run = pc.simulate(pipeline, trees)
    largest = max(float(leaf.abs().max()) for tree in trees for leaf in tree.values())
    magnitudes = mean([{path: leaf.abs() for path, leaf in tree.items()} for tree in trees])
    for path, expected in meaning.value(trees).items():
        bound = meaning.off * largest + meaning.rounding * magnitudes[path]
        assert bool(((run.trees[0][path].double() - expected).abs() <= bound).all())
        assert run.trees[0][path].dtype == torch.float32
    for other in run.trees:
        assert all(torch.equal(other[path], leaf) for path, leaf in run.trees[0].items())
    assert run.bytes == [meaning.bytes] * N


LATER = [key for key, meaning in MEANINGS.items() if meaning.later]


@pytest.mark.parametrize(("section", "name"), LATER)
def test_the_second_piece_gives_what_it_says(section: str, name: str):
    """From its first step on: the bytes, and nothing lost over steps."""
    pipeline, meaning = page()[section][name], MEANINGS[section, name]
    begins, size = meaning.later or (0, 0)
    before = pc.simulate(pipeline, gradients(), [{**pipeline.init(gradients()[0]), "step": begins - 1}] * N)
    assert before.bytes == [meaning.bytes] * N
    states: Any = before.states
    owed = {path: torch.zeros(leaf.shape).double() for path, leaf in gradients()[0].items()}
    for step in range(1, 4):
        trees = gradients(step)
        run = pc.simulate(pipeline, trees, states)
        states = run.states
        assert run.bytes == [size] * N
        for path, put_in in total(trees).items():
            owed[path] += put_in - N * run.trees[0][path].double()
    for path, expected in owed.items():
        kept = sum(state["error_feedback"]["residual"][path].double() for state in states)
        assert float((kept - expected).abs().max()) <= 1e-4
        assert path == "fc.bias" or float(expected.abs().max()) > 0.01, "it loses nothing here"


def test_unless_it_is_finite_nothing_is_applied():
    pipeline = page()["jax"]["optax.apply_if_finite(..., 5)"]
    bad = gradients()
    bad[2]["fc.bias"][3] = torch.inf
    states: Any = None
    for _ in range(5):
        run = pc.simulate(pipeline, bad, states)
        states = run.states
        assert all(not leaf.any() for tree in run.trees for leaf in tree.values())
    with pytest.raises(pc.NonFiniteError, match="6 steps in a row"):
        pc.simulate(pipeline, bad, states)


# Side by side with torch's hooks, on two ranks ------------------------------------------------------------------------


class Net(nn.Module):
    """A matrix and a vector whose gradients are what is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(batch(90, 0, 24, 16))
        self.vector = nn.Parameter(batch(91, 0, 33))

    def forward(self, matrix: Tensor, vector: Tensor) -> Tensor:
        return (self.matrix * matrix).sum() + (self.vector * vector).sum()


def both(torchs: Callable[..., Any], state: object, name: str) -> tuple[Any, Any]:
    """DDP with torch's hook, and with the page's pipeline."""
    theirs, ours = DistributedDataParallel(Net()), DistributedDataParallel(Net())
    theirs.register_comm_hook(state, torchs)
    ours.register_comm_hook(None, pc.as_ddp_hook(page()["torch_hooks"][name], ours))
    return theirs, ours


SAME_BITS = {
    "allreduce_hook": (default_hooks.allreduce_hook, "allreduce_hook"),
    "fp16_compress_hook": (default_hooks.fp16_compress_hook, "fp16_compress_hook"),
    "wrapper": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), "fp16_compress_hook"),
}


@check(2, which=SAME_BITS)
def hooks_with_the_same_bits(rank: int, n: int, which: str) -> None:
    hook, name = SAME_BITS[which]
    theirs, ours = both(hook, None, name)
    for step in range(3):
        for ddp in (theirs, ours):
            ddp.zero_grad()
            ddp(batch(step, rank, 24, 16), batch(50 + step, rank, 33)).backward()
        for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), f"step {step}: off by {(p.grad - q.grad).abs().max()}"
    exact = (batch(2, 0, 24, 16) + batch(2, 1, 24, 16)) / 2
    assert torch.equal(ours.module.matrix.grad, exact) == (which == "allreduce_hook")


@check(2)
def power_sgd(rank: int, n: int) -> None:
    """On gradients of rank two each, so that four columns hold their mean whatever the random start."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    theirs, ours = both(powerSGD_hook.powerSGD_hook, state, "powerSGD_hook")

    def thin(step: int, each: int) -> Tensor:
        return batch(step, each, 24, 2) @ batch(20 + step, each, 2, 16)

    for step in range(4):  # rounding grows with each power iteration, in both alike
        for ddp in (theirs, ours):
            ddp.zero_grad()
            ddp(thin(step, rank), batch(50 + step, rank, 33)).backward()
        exact = (thin(step, 0) + thin(step, 1)) / 2
        for ddp in (theirs, ours):
            assert float((ddp.module.matrix.grad - exact).abs().max()) <= 1e-3
        if step < 2:
            assert torch.equal(theirs.module.matrix.grad, ours.module.matrix.grad)
        # Torch's residual of a vector is its rank's distance from the mean, which cancels out but for rounding.
        torch.testing.assert_close(theirs.module.vector.grad, ours.module.vector.grad, rtol=0, atol=1e-6)


@check(2, steps=(2, 3, 5, 6))
def post_local_sgd(rank: int, n: int, steps: int) -> None:
    """Right before and after either of two averages."""
    theirs, ours = DistributedDataParallel(Net()), Net()
    theirs.register_comm_hook(
        PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False), post_localSGD_hook
    )
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, ours)]

    def loss(step: int) -> Callable[[nn.Module], Tensor]:
        return lambda model: model(batch(step, rank, 24, 16), batch(50 + step, rank, 33)).square()

    for step in range(steps):
        optimizers[0].zero_grad()
        loss(step)(theirs).backward()
        optimizers[0].step()
        averager.average_parameters(theirs.parameters())
    page()["post_local_sgd"](ours, optimizers[1], [loss(step) for step in range(steps)], start=2, period=3)
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    replicas: list[Any] = [None] * n
    dist.all_gather_object(replicas, ours.matrix.detach())
    assert torch.equal(replicas[0], replicas[1]) == (steps != 5)


@check(2)
def what_torch_refuses_on_cpu(rank: int, n: int) -> None:
    ddp = DistributedDataParallel(Net())
    with pytest.raises(TypeError, match="BF16 all reduce communication hook required"):
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    for hook in (quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook):
        ddp = DistributedDataParallel(Net())
        ddp.register_comm_hook(None, hook)
        with pytest.raises(RuntimeError, match="IndexError"):
            ddp(batch(0, rank, 24, 16), batch(50, rank, 33)).backward()


@check(2)
def one_bit_adam(rank: int, n: int) -> None:
    step = page()["one_bit_adam_step"]
    shapes = {"matrix": (24, 16), "vector": (33,)}
    params = {name: batch(70, 0, *shape) for name, shape in shapes.items()}
    momentum = {name: torch.zeros(shape) for name, shape in shapes.items()}
    variance = {name: batch(71, 0, *shape).square() for name, shape in shapes.items()}
    state = page()["one_bit"].init(params)
    put_in = {name: torch.zeros(shape).double() for name, shape in shapes.items()}
    got_out = {name: torch.zeros(shape).double() for name, shape in shapes.items()}
    for i in range(6):
        grads = {name: batch(i, rank, *shape) for name, shape in shapes.items()}
        old, before = params, momentum
        params, momentum, state = step(params, momentum, variance, grads, state)
        for name in shapes:
            put_in[name] += (0.9 * before[name] + 0.1 * grads[name]).double()
            got_out[name] += momentum[name].double()
            moved = old[name] - 1e-3 * momentum[name] / (variance[name].sqrt() + 1e-8)
            assert torch.equal(params[name], moved)
    for name in shapes:
        residual = state["error_feedback"]["residual"][name].double()
        everyone: list[Any] = [None] * n
        dist.all_gather_object(everyone, (put_in[name], residual, params[name]))
        owed = sum(each[0] for each in everyone) - n * got_out[name]
        assert float(owed.abs().max()) > 0.01
        assert float((owed - sum(each[1] for each in everyone)).abs().max()) <= 1e-4
        assert torch.equal(everyone[0][2], everyone[1][2]), "replicas"


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("n", [2])
def test_side_by_side(n: int, name: str, request: pytest.FixtureRequest):
    report = outcomes(__name__, n, request).report(name)
    if report:
        pytest.fail(report, pytrace=False)
