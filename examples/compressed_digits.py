"""Train on scikit-learn's digits with compressed gradients, with and without error feedback, and compare.

    python examples/compressed_digits.py                   # 4 simulated ranks in this process
    python examples/compressed_digits.py --gloo            # the same on 4 processes
    torchrun --nproc-per-node 4 examples/compressed_digits.py --gloo

All trainings begin with the same weights and see the same batches; only the pipeline between gradient and step differs.
Prints a table, the same for both ways to run, and draws the picture of docs/compression.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launch
from sklearn.datasets import load_digits
from torch import Tensor

import ptcollect as pc

RANKS = 4
BATCH = 96  # images per step, over all ranks
TEST = 357  # of the 1797 images; 1440 are left, 15 steps an epoch
HIDDEN = 64
LR = 0.3  # plain SGD: a momentum would count twice what error feedback has kept back
EVERY = 5  # steps between two points of a curve

LOSSY: dict[str, pc.Transform] = {
    "int8": pc.chain(pc.bucketize(), pc.compress("int8")),
    "int4": pc.chain(pc.bucketize(), pc.compress("int4")),
    "sign": pc.chain(pc.bucketize(), pc.compress("sign")),
    "topk(1 %)": pc.chain(pc.bucketize(), pc.compress(pc.codecs.topk(0.01))),
    "low_rank(2)": pc.chain(pc.low_rank(2), pc.bucketize()),
}
PIPELINES: dict[str, pc.Pipeline] = {"dense": pc.chain(pc.bucketize(), pc.all_to_all_avg())}
for _name, _lossy in LOSSY.items():
    PIPELINES[f"{_name} + EF"] = pc.chain(pc.error_feedback(), _lossy, pc.all_to_all_avg())
    PIPELINES[_name] = pc.chain(_lossy, pc.all_to_all_avg())

Tree = dict[str, Tensor]
LocalGradient = Callable[[int], Tree]
"""Rank -> the gradient of its share of the batch."""


@dataclass
class Training:
    """What came of one training; the same on every rank."""

    pipeline: pc.Pipeline
    curve: list[float] = field(default_factory=list)
    """Loss over all training images, before the first step and after every `EVERY` steps."""
    bytes_per_step: float = 0.0
    """Sent by the rank that sends most, mean over the steps."""
    accuracy: float = 0.0
    """Share of the test images that are recognised at the end."""
    params: Tree = field(default_factory=dict)


# The task -----------------------------------------------------------------------------------------------------------


@dataclass
class Digits:
    """Images with values from -1 to 1 and their labels; the same split everywhere."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @staticmethod
    def load() -> Digits:
        """Read the images that come with scikit-learn and set `TEST` of them aside."""
        bunch = load_digits()
        images, labels = torch.tensor(bunch.data, dtype=torch.float32) / 8 - 1, torch.tensor(bunch.target)  # from 0..16
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        held_out, rest = order[:TEST], order[TEST:]
        return Digits((images[rest], labels[rest]), (images[held_out], labels[held_out]))

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of all ranks together, reshuffled each epoch."""
        images, labels = self.train
        random = torch.Generator().manual_seed(1)
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < BATCH:
                order = torch.randperm(len(labels), generator=random)
            chosen, order = order[:BATCH], order[BATCH:]
            yield images[chosen], labels[chosen]


def initial_params() -> Tree:
    """Two linear layers, with the same weights at every call."""
    random = torch.Generator().manual_seed(0)

    def uniform(rows: int, columns: int) -> Tensor:
        return (torch.rand(rows, columns, generator=random) * 2 - 1) / columns**0.5

    return {
        "hidden.weight": uniform(HIDDEN, 64),
        "hidden.bias": torch.zeros(HIDDEN),
        "out.weight": uniform(10, HIDDEN),
        "out.bias": torch.zeros(10),
    }


def scores(params: Tree, images: Tensor) -> Tensor:
    """The network: 64 pixels -> 10 scores."""
    hidden = torch.tanh(F.linear(images, params["hidden.weight"], params["hidden.bias"]))
    return F.linear(hidden, params["out.weight"], params["out.bias"])


def gradient(params: Tree, images: Tensor, labels: Tensor) -> Tree:
    """Of the cross-entropy."""
    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    loss = F.cross_entropy(scores(leaves, images), labels)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


# Two ways to run a pipeline -----------------------------------------------------------------------------------------


class Simulated:
    """All ranks in this process."""

    def __init__(self, pipeline: pc.Pipeline, params: Tree) -> None:
        self.pipeline = pipeline
        self.states = [pipeline.init(params) for _ in range(RANKS)]
        self.sent = [0] * RANKS

    def average(self, local: LocalGradient) -> Tree:
        """What the pipeline makes of the ranks' gradients."""
        run = pc.simulate(self.pipeline, [local(rank) for rank in range(RANKS)], self.states)
        self.states = run.states
        self.sent = [total + now for total, now in zip(self.sent, run.bytes, strict=True)]
        return run.trees[0]

    def most_sent(self) -> float:
        """Bytes that the rank sent which sent most."""
        return max(self.sent)


class Real:
    """This rank alone; the others are in other processes."""

    def __init__(self, pipeline: pc.Pipeline, params: Tree) -> None:
        self.pipeline = pipeline
        self.state = pipeline.init(params)
        self.sent = 0

    def average(self, local: LocalGradient) -> Tree:
        """What the pipeline makes of the ranks' gradients."""
        with pc.traffic() as traffic:
            mean, self.state = self.pipeline.update(local(dist.get_rank()), self.state)
        self.sent += traffic.bytes
        return mean

    def most_sent(self) -> float:
        """Bytes that the rank sent which sent most."""
        most = torch.tensor(float(self.sent), dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.item()


def train(pipeline: pc.Pipeline, digits: Digits, steps: int, way: type[Simulated] | type[Real]) -> Training:
    """SGD on the gradients that `pipeline` averages."""
    params = initial_params()
    ranks = way(pipeline, params)
    training = Training(pipeline, [loss_of(params, digits.train)])
    for step, (images, labels) in enumerate(digits.batches(steps), start=1):
        shares = list(zip(images.chunk(RANKS), labels.chunk(RANKS), strict=True))
        mean = ranks.average(lambda rank, shares=shares, params=params: gradient(params, *shares[rank]))
        params = {name: param - LR * mean[name] for name, param in params.items()}
        if step % EVERY == 0 or step == steps:
            training.curve.append(loss_of(params, digits.train))
    training.bytes_per_step = ranks.most_sent() / steps
    training.accuracy = (scores(params, digits.test[0]).argmax(dim=1) == digits.test[1]).double().mean().item()
    training.params = params
    return training


def loss_of(params: Tree, data: tuple[Tensor, Tensor]) -> float:
    """Mean cross-entropy over all of `data`."""
    return F.cross_entropy(scores(params, data[0]), data[1]).item()


# Report -------------------------------------------------------------------------------------------------------------


def table(trainings: dict[str, Training]) -> str:
    """One line per training."""
    dense = trainings["dense"]
    lines = [
        f"{'gradients averaged by':<24}{'test accuracy':>14}{'training loss':>15}{'sent a step':>14}{'of dense':>10}"
    ]
    for name, each in trainings.items():
        sent, ratio = f"{each.bytes_per_step:,.0f} B", each.bytes_per_step / dense.bytes_per_step
        lines.append(f"{name:<24}{each.accuracy:>14.1%}{each.curve[-1]:>15.3f}{sent:>14}{ratio:>10.1%}")
    return "\n".join(lines)


GREY, BLUE, ORANGE = "#bdbdbd", "#1f6fb2", "#d9601a"


def draw(trainings: dict[str, Training], steps: int, output: Path) -> None:
    """A panel per compression, all with the same axes, and one with the accuracies."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

    losses = [value for training in trainings.values() for value in training.curve]
    x = [min(i * EVERY, steps) for i in range(len(trainings["dense"].curve))]
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(9, 5.6), dpi=160, layout="constrained")
        *panels, last = figure.subplots(2, 3).flat
        for axes, name in zip(panels, LOSSY, strict=True):
            share = trainings[name].bytes_per_step / trainings["dense"].bytes_per_step
            axes.plot(x, trainings["dense"].curve, color=GREY, linewidth=6, solid_capstyle="round")
            axes.plot(x, trainings[name].curve, color=ORANGE, linewidth=2.8)
            axes.plot(x, trainings[f"{name} + EF"].curve, color=BLUE, linewidth=1.4)
            axes.set_title(name, loc="left", weight="bold")
            axes.set_title(f"{share:.1%} of the bytes", loc="right", fontsize=8, color="#555555")
            axes.set(yscale="log", xlim=(0, steps), ylim=(0.8 * min(losses), 1.2 * max(losses)))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.minorticks_off()
            axes.grid(axis="y", color="#eeeeee")
        panels[0].set_ylabel("loss over all training images")
        panels[3].set_ylabel("loss over all training images")
        for axes in panels[2:]:
            axes.set_xlabel("step")

        rows = range(len(LOSSY))
        reference = 100 * trainings["dense"].accuracy
        last.axvspan(reference - 1, reference + 1, color="#eeeeee")
        last.axvline(reference, color=GREY, linewidth=3)
        for suffix, colour in (("", ORANGE), (" + EF", BLUE)):
            last.plot(
                [100 * trainings[name + suffix].accuracy for name in LOSSY],
                rows,
                "o",
                color=colour,
                markersize=9 if colour == ORANGE else 5,
            )
        last.set_yticks(rows, LOSSY)
        last.tick_params(axis="y", length=0)
        last.set(xlabel="test accuracy, %", ylim=(len(LOSSY) - 0.5, -0.5))
        last.set_title("at the end", loc="left", weight="bold")
        last.set_title("band: dense ± 1", loc="right", fontsize=8, color="#555555")

        lines = [Line2D([], [], color=c, linewidth=w) for c, w in ((GREY, 6), (BLUE, 1.4), (ORANGE, 2.8))]
        names = ["dense", "compressed, with error feedback", "compressed, without"]
        figure.legend(lines, names, loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(output)


# Run ----------------------------------------------------------------------------------------------------------------


def compare(steps: int, output: Path | None, only: list[str], way: type[Simulated] | type[Real]) -> dict[str, Training]:
    """All trainings, or `only` some; the first rank reports."""
    digits = Digits.load()
    trainings = {name: train(PIPELINES[name], digits, steps, way) for name in only}
    if way is Simulated or dist.get_rank() == 0:
        where = f"{RANKS} simulated ranks" if way is Simulated else f"{RANKS} processes over gloo"
        print(f"Digits, {steps} steps of {BATCH} images on {where}\n\n{table(trainings)}")
        if output is not None:
            draw(trainings, steps, output)
            print(f"\nPicture: {output}")
    return trainings


def on_each_rank(steps: int, output: Path | None, only: list[str]) -> None:
    """What a process of `--gloo` runs."""
    if dist.get_world_size() != RANKS:
        raise SystemExit(f"compressed_digits needs {RANKS} ranks, got {dist.get_world_size()}")
    compare(steps, output, only, Real)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gloo", action="store_true", help=f"{RANKS} processes instead of {RANKS} simulated ranks")
    parser.add_argument("--steps", type=int, default=300, help="of each training, %(default)s by default; 15 an epoch")
    parser.add_argument("--output", type=Path, help="draw the picture here")
    parser.add_argument(
        "--only", nargs="+", choices=PIPELINES, metavar="NAME", help='beside "dense", which always runs'
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps: at least 1")
    if args.output is not None and (args.only or not args.output.parent.is_dir()):
        parser.error("--output: needs all trainings" if args.only else f"--output: no folder {args.output.parent}")
    names = [name for name in PIPELINES if not args.only or name in {"dense", *args.only}]
    if args.gloo:
        launch(on_each_rank, args.steps, args.output, names, ranks=RANKS)
    else:
        torch.set_num_threads(1)  # as each process has
        compare(args.steps, args.output, names, Simulated)


if __name__ == "__main__":
    main()
