"""docs/training.md: its loops, run on two ranks with different data, train as one process on all of it."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_ddp import collector, outcomes
from torch import Tensor, nn

import ptcollect as pc

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "training.md"
SIZES = ("(5, 2, 9)", "(4,)")  # of the page's micro-batches, and on rank 1

Batch = tuple[Tensor, Tensor]

CHECKS, check = collector()
pytestmark = pytest.mark.timeout(360)  # of the launch, as in test_ddp.py


@functools.cache
def blocks(kind: str = "python") -> dict[str, list[str]]:
    """By heading; the page's group of one is left out."""
    parts = re.split(r"^##? (.*)\n", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        codes = re.findall(rf"^```{kind}\n(.*?)^```$", body, flags=re.MULTILINE | re.DOTALL)
        found[title] = [re.sub(r"^dist\.\w+_process_group\(.*\n", "", code, flags=re.MULTILINE) for code in codes]
    return found


def run(title: str, namespace: dict[str, Any]) -> None:
    code = "\n".join(blocks()[title])
    assert code, title
    exec(compile(code.replace(SIZES[0], SIZES[dist.get_rank()]), str(PAGE), "exec"), namespace)


def started(rank: int) -> tuple[dict[str, Any], nn.Module, torch.optim.Optimizer]:
    """The page's names, this rank's data ahead, and an equal model in float64 to train alone."""
    namespace: dict[str, Any] = {}
    run("Training", namespace)
    torch.manual_seed(1 + rank)
    alone = copy.deepcopy(namespace["model"]).double()
    return namespace, alone, torch.optim.SGD(alone.parameters(), lr=0.1)


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer.zero_grad()
    F.cross_entropy(model(inputs.double()), targets).backward()
    optimizer.step()


def equal(model: nn.Module, alone: nn.Module) -> None:
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=0, atol=1e-6)


@check(2)
def micro_batches_and_weights(rank: int, n: int) -> None:
    page, alone, optimizer = started(rank)
    with pc.traffic() as travelled:
        run("Micro-batches", page)
    mine = everyone(page["micro_batches"])
    assert [len(batches) for batches in mine] == [3, 1]
    step_alone(alone, optimizer, [batch for batches in mine for batch in batches])
    equal(page["model"], alone)
    assert travelled.bytes == 4 * (8 * 4 + 4), "once: half of the numbers, twice"


@check(2)
def ranks_that_run_out_of_data(rank: int, n: int) -> None:
    page, alone, optimizer = started(rank)
    run("Micro-batches", page)
    alone.load_state_dict(page["model"].state_dict())
    run("Ranks that run out of data", page)
    mine = everyone(page["micro_batches"])
    for step in range(3):
        step_alone(alone, optimizer, [batches[step] for batches in mine if step < len(batches)])
    equal(page["model"], alone)


@check(2)
def while_gradients_travel_and_parameters(rank: int, n: int) -> None:
    page, _, _ = started(rank)
    run("Micro-batches", page)
    for p in page["model"].parameters():
        p.grad = torch.full_like(p, 1.0 + 2 * rank)
    run("While gradients travel", page)
    assert all(bool((grad == 2).all()) for grad in page["grads"].values())
    with torch.no_grad():
        page["model"].weight += rank
    run("Parameters", page)
    replicas = everyone(page["model"].weight.detach())
    assert torch.equal(replicas[0], replicas[1])


def test_what_a_rank_kept_back_is_sent_after_it_ran_out():
    pipeline = pc.chain(pc.error_feedback(), pc.compress(pc.codecs.topk(0.5)), pc.all_gather_avg())
    first = pc.simulate(pipeline, [torch.tensor([3.0, 1.0]), torch.tensor([0.0, 0.0])], weights=[1, 1])
    second = pc.simulate(
        pipeline, [torch.tensor([7.0, 7.0]), torch.tensor([0.0, 0.0])], first.states, weights=[0, 1], missing="zeros"
    )
    assert [tree.tolist() for tree in first.trees] == [[1.5, 0.0]] * 2
    assert [tree.tolist() for tree in second.trees] == [[0.0, 0.5]] * 2


def test_the_callback_is_that_of_the_example():
    callback, trainer = blocks("py")["Lightning"]
    assert callback in (ROOT / "examples" / "lightning_ddp.py").read_text()
    assert "callbacks=[Synchronise(sync)]" in trainer


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("n", [2])
def test_loop(n: int, name: str, request: pytest.FixtureRequest):
    report = outcomes(__name__, n, request).report(name)
    if report:
        pytest.fail(report, pytrace=False)
