"""Four ranks that train on digits for 50 steps with a lossless pipeline equal one process on the whole batch.

Equal within float32 rounding. The claim, with P the largest of all parameters and eps = 2**-23:

    no parameter differs by more than BOUND * P, where BOUND = STEPS * eps / 4 = 1.5e-6.

Both trainings compute p <- p - lr * g. In a step each of them rounds the new p, by half a unit of P at most, where a
unit is eps * P; that sets them apart by one unit or less. Their gradients are the same sum of 96 terms in two orders
and differ by 4 * eps of the largest gradient G (measured); with lr = 0.3, G = 0.1 and P = 0.5 that moves p by another
quarter of a unit. Descent with these steps is stable, and tanh has no kinks where a rounding could switch a neuron on,
so what came apart stays about as far apart. Roundings of both signs mostly cancel: after 50 steps 1 to 3 units were
measured, for 4 ranks as well as between float32 and float64 in one process. Four times that, for other processors and
orders, is a quarter of a unit for each step. A gradient that is wrong by one part in 10 000 ends 320 units away.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import ptcollect as pc

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from launch import launch

RANKS, STEPS, BATCH, LR = 4, 50, 96, 0.3
BOUND = STEPS * torch.finfo(torch.float32).eps / 4

LOSSLESS = [
    pc.ring_reduce(),
    pc.all_to_all_avg(),
    pc.all_gather_avg(),
    pc.all_reduce(),
    pc.chain(pc.bucketize(), pc.ring_reduce()),
    pc.chain(pc.bucketize("2KB"), pc.all_to_all_avg()),
]
WRONG = [
    pc.chain(pc.ring_reduce(), pc.scale(1.01)),
    pc.chain(pc.ring_reduce(), pc.scale(1.0001)),
    pc.chain(pc.all_reduce(op="sum"), pc.scale(1 / (RANKS - 1))),
    pc.broadcast(root=0),  # everybody follows rank 0's share of the batch
]

Digits: TypeAlias = "dict[str, Tensor]"
Backward: TypeAlias = "Callable[[Tensor, Tensor], None]"


# How one trains with a pipeline -------------------------------------------------------------------------------------


def call(model: nn.Module, pipeline: pc.Pipeline) -> Backward:
    """``grads = pipeline(grads)`` in a loop of one's own."""
    params = dict(model.named_parameters())

    def backward(images: Tensor, labels: Tensor) -> None:
        loss = F.cross_entropy(model(images), labels)
        grads = pipeline(dict(zip(params, torch.autograd.grad(loss, params.values()), strict=True)))
        for name, param in params.items():
            param.grad = grads[name]

    return backward


def sync_grads(model: nn.Module, pipeline: pc.Pipeline) -> Backward:
    """`sync_grads` between backward and step."""

    def backward(images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(model(images), labels).backward()
        pc.sync_grads(pipeline, model)

    return backward


def uneven(model: nn.Module, pipeline: pc.Pipeline) -> Backward:
    """As `sync_grads`, with shares of different sizes."""

    def backward(images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(model(images), labels).backward()
        pc.sync_grads(pipeline, model, weight=len(labels))

    return backward


def hook(model: nn.Module, pipeline: pc.Pipeline) -> Backward:
    """The pipeline as DDP's communication hook."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, pc.as_ddp_hook(pipeline, ddp))

    def backward(images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(ddp(images), labels).backward()

    return backward


EVEN, UNEVEN = [24, 24, 24, 24], [45, 30, 20, 1]

EQUAL = [(pipeline, way) for pipeline in LOSSLESS for way in (call, hook)]
EQUAL += [(pipeline, way) for pipeline in LOSSLESS[-1:] for way in (sync_grads, uneven)]
DIFFERENT = [(pipeline, call) for pipeline in WRONG] + [(WRONG[0], hook)]


def case(pipeline: pc.Pipeline, way: Callable[..., Backward]) -> str:
    return f"{way.__name__} {pipeline}"


# Training -----------------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def batches(digits: Digits) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of all ranks together."""
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        chosen = torch.randperm(len(digits["labels"]), generator=random)[:BATCH]
        yield digits["images"][chosen], digits["labels"][chosen]


def train(model: nn.Module, backward: Backward, digits: Digits, cut: Callable[[Tensor], Tensor]) -> Tensor:
    """All parameters after the last step, in one vector; `cut` takes this rank's share of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for images, labels in batches(digits):
        optimizer.zero_grad()
        backward(cut(images), cut(labels))
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def one_process(digits: Digits, dtype: torch.dtype = torch.float32) -> Tensor:
    """The reference: the whole batch at once, and no pipeline."""
    model = network().to(dtype)

    def backward(images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(model(images.to(dtype)), labels).backward()

    return train(model, backward, digits, lambda batch: batch)


def every_training(folder: Path) -> None:
    """On each rank: train with every pipeline, every way."""
    warnings.simplefilter("error")
    rank = dist.get_rank()
    digits = torch.load(folder / "digits.pt")
    ended = {}
    for pipeline, way in EQUAL + DIFFERENT:
        shares = UNEVEN if way is uneven else EVEN
        model = network()
        ended[case(pipeline, way)] = train(
            model, way(model, pipeline), digits, lambda batch, shares=shares: batch.split(shares)[rank]
        )
    torch.save(ended, folder / f"rank{rank}.pt")


# Tests --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the four ranks of the one launch have left what they ended with."""
    from sklearn.datasets import load_digits

    folder: Path = tmp_path_factory.mktemp("training")
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 8 - 1  # from 0..16
    torch.save({"images": images, "labels": torch.tensor(bunch.target)}, folder / "digits.pt")
    launch(every_training, folder, ranks=RANKS, timeout=100)
    return folder


@pytest.fixture(scope="module")
def trained(folder) -> list[dict[str, Tensor]]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def digits(folder) -> Digits:
    return torch.load(folder / "digits.pt")


@pytest.fixture(scope="module")
def alone(digits) -> Tensor:
    return one_process(digits)


def difference(parameters: Tensor, reference: Tensor) -> float:
    """Of any parameter, in parts of the largest one."""
    apart = (parameters.double() - reference.double()).abs().max() / reference.double().abs().max()
    return apart.item()


@pytest.mark.parametrize("name", [case(*each) for each in EQUAL])
def test_four_ranks_equal_one_process_on_the_whole_batch(trained, alone, name):
    for rank, ended in enumerate(trained):
        assert difference(ended[name], alone) <= BOUND, f"rank {rank}"
        assert torch.equal(ended[name], trained[0][name]), f"ranks 0 and {rank} ended with different bits"


@pytest.mark.parametrize("name", [case(*each) for each in DIFFERENT])
def test_what_is_not_the_mean_is_noticed(trained, alone, name):
    for ended in trained:
        assert difference(ended[name], alone) > 10 * BOUND


def test_the_bound_is_what_rounding_does_in_one_process(digits, alone):
    assert 0 < difference(alone, one_process(digits, torch.float64)) <= BOUND


def test_the_network_learns(digits, alone):
    model = network()
    torch.nn.utils.vector_to_parameters(alone, model.parameters())
    with torch.no_grad():
        right = (model(digits["images"]).argmax(dim=1) == digits["labels"]).double().mean().item()
    assert right > 0.9
