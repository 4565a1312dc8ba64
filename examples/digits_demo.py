"""Train a small network on scikit-learn's digits with several ranks, four ways, and compare what came of it.

    python examples/digits_demo.py                             # starts 4 ranks on this machine
    torchrun --nproc-per-node 2 examples/digits_demo.py

The first way is plain DistributedDataParallel, the reference. The others begin with the same weights, see the same
batches, and leave the averaging of gradients to a ptcollect pipeline. Prints a table and draws the loss curves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_report import Outcome, Setting, draw_curves, print_table, progress
from launch import launch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import ptcollect as pc

BATCH = 96  # images per step, over all ranks
TEST = 357  # of the 1797 images; 1440 are left, 15 steps an epoch

ring = pc.chain(pc.bucketize(), pc.ring_reduce())
bf16 = pc.chain(pc.bucketize(), pc.compress("bf16"), pc.ring_reduce())

Backward = Callable[[Tensor, Tensor], Tensor]
"""Images and labels of this rank's share -> its loss; leaves the averaged gradients in ``.grad``."""


# Four ways to average gradients -------------------------------------------------------------------------------------


def plain_ddp(model: nn.Module) -> Backward:
    """DDP with its own all-reduce."""
    return ddp_backward(DistributedDataParallel(model))


def ddp_hook(model: nn.Module, pipeline: pc.Pipeline) -> Backward:
    """DDP with a pipeline as its communication hook."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, pc.as_ddp_hook(pipeline, ddp))
    return ddp_backward(ddp)


def ddp_backward(ddp: DistributedDataParallel) -> Backward:
    """DDP averages while `backward` runs."""

    def backward(images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(ddp(images), labels)
        loss.backward()
        return loss

    return backward


def custom_loop(model: nn.Module, pipeline: pc.Pipeline) -> Backward:
    """A loop of one's own, in which a pipeline maps gradients to gradients."""
    params = dict(model.named_parameters())

    def backward(images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(images), labels)
        grads = dict(zip(params, torch.autograd.grad(loss, params.values()), strict=True))
        grads = pipeline(grads)
        for name, param in params.items():
            param.grad = grads[name]
        return loss

    return backward


WAYS: dict[str, Callable[[nn.Module], Backward]] = {
    "plain DDP": plain_ddp,
    "custom loop, ring": lambda model: custom_loop(model, ring),
    "DDP hook, ring": lambda model: ddp_hook(model, ring),
    "custom loop, bf16 ring": lambda model: custom_loop(model, bf16),
}


# What they are tried on ---------------------------------------------------------------------------------------------


@dataclass
class Digits:
    """8x8 images with values from -1 to 1, and their labels; the same split everywhere."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @staticmethod
    def load() -> Digits:
        """Read the images that come with scikit-learn and set `TEST` of them aside."""
        bunch = load_digits()
        images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # from 0..16
        labels = torch.tensor(bunch.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        held_out, rest = order[:TEST], order[TEST:]
        return Digits((images[rest], labels[rest]), (images[held_out], labels[held_out]))

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of each batch, reshuffled each epoch; every rank draws the same order."""
        images, labels = self.train
        share = BATCH // dist.get_world_size()
        whole = share * dist.get_world_size()
        random = torch.Generator().manual_seed(1)
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < whole:
                order = torch.randperm(len(labels), generator=random)
            mine = order[:whole].chunk(dist.get_world_size())[dist.get_rank()]
            order = order[whole:]
            yield images[mine], labels[mine]


def network() -> nn.Module:
    """Two convolutions and two linear layers, with the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


# The comparison -----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One training, seen from this rank."""

    model: nn.Module
    losses: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    sent: pc.Traffic = field(default_factory=pc.Traffic)


def train(way: Callable[[nn.Module], Backward], digits: Digits, steps: int, after_step: Callable[[], None]) -> Run:
    """Train a new network one of the ways; keeps the loss and all parameters of every step."""
    run = Run(network())
    backward = way(run.model)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.9)
    with pc.traffic() as run.sent:
        for images, labels in digits.batches(steps):
            optimizer.zero_grad()
            loss = backward(images, labels)
            optimizer.step()
            run.losses.append(loss.detach())
            run.parameters.append(parameters_to_vector(run.model.parameters()).detach())
            after_step()
    return run


def outcome(title: str, run: Run, reference: Run, digits: Digits) -> Outcome:
    """What the report says of one training; the same on every rank."""
    steps = len(run.losses)
    apart = [(mine - its).abs().max() for mine, its in zip(run.parameters, reference.parameters, strict=True)]
    worst = torch.stack([*apart, torch.tensor(run.sent.bytes / steps), torch.tensor(run.sent.agreement_bytes / steps)])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    losses = pc.ring_reduce()(torch.stack(run.losses))
    with torch.no_grad():
        correct = (run.model(digits.test[0]).argmax(dim=1) == digits.test[1]).sum().item()
        final_loss = F.cross_entropy(run.model(digits.train[0]), digits.train[1]).item()
    *differences, sent, agreement = worst.tolist()
    return Outcome(
        title=title,
        correct=int(correct),
        final_loss=final_loss,
        losses=losses.tolist(),
        differences=None if run is reference else differences,
        bytes_per_step=None if run is reference else sent,
        agreement_bytes_per_step=agreement,
    )


def demo(steps: int, output: Path) -> None:
    """Train all ways on this process group; rank 0 reports."""
    digits = Digits.load()
    with progress(len(WAYS) * steps, shown=dist.get_rank() == 0) as show:
        runs = {title: train(way, digits, steps, lambda title=title: show(title)) for title, way in WAYS.items()}

    reference = runs["plain DDP"]
    outcomes = [outcome(title, run, reference, digits) for title, run in runs.items()]
    setting = Setting(
        ranks=dist.get_world_size(),
        steps=steps,
        share=BATCH // dist.get_world_size(),
        train_images=len(digits.train[1]),
        test_images=len(digits.test[1]),
        parameters=reference.parameters[-1].numel(),
        largest_parameter=reference.parameters[-1].abs().max().item(),
        pipelines={"ring": ring, "bf16 ring": bf16},
    )
    if dist.get_rank() == 0:
        print_table(outcomes, setting)
        draw_curves(outcomes, setting, output)
        print(f"Loss curves: {output}")


def main() -> None:
    """Read the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="how many to start, 4 by default; torchrun's number wins")
    parser.add_argument("--steps", type=int, default=150, help="of each training, 150 by default; 15 are an epoch")
    parser.add_argument("--output", type=Path, default=Path("digits_demo.png"), help="the picture, default %(default)s")
    args = parser.parse_args()
    if not 1 <= args.ranks <= BATCH:
        parser.error(f"--ranks: from 1 to {BATCH}, the number of images in a batch")
    if args.steps < 1:
        parser.error("--steps: at least 1")
    if not args.output.parent.is_dir():
        parser.error(f"--output: there is no folder {args.output.parent}")
    launch(demo, args.steps, args.output, ranks=args.ranks)


if __name__ == "__main__":
    main()
