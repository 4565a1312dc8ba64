"""Decentralised SGD on scikit-learn's digits over 8 simulated ranks: a step on its own data, then gossip on parameters.

    python examples/gossip_digits.py
    python examples/gossip_digits.py --output docs/images/gossip_digits.png

No rank ever sees the mean: it meets its neighbours of the step, and that is all. Prints what each topology reaches and
sends, and draws how far ranks are from agreement, beside what the spectral gap promises.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch
from compressed_digits import LR, Digits, Tree, gradient, initial_params, scores

import ptcollect as pc

RANKS = 8
TOPOLOGIES: dict[str, pc.topologies.Topology] = {
    "path": pc.topologies.graph([(rank, rank + 1) for rank in range(RANKS - 1)]),
    "ring": pc.topologies.ring(),
    "torus": pc.topologies.torus(),
    "one_peer_exponential": pc.topologies.one_peer_exponential(),
}
PIPELINES: dict[str, pc.Pipeline] = {"dense": pc.chain(pc.bucketize(), pc.all_to_all_avg())}
PIPELINES |= {name: pc.chain(pc.bucketize(), pc.gossip_avg(topology)) for name, topology in TOPOLOGIES.items()}
ALONE = 24  # steps of gossip without training


@dataclass
class Training:
    """What came of one training."""

    accuracies: list[float] = field(default_factory=list)
    """By rank, the share of the test images that are recognised at the end."""
    distances: list[float] = field(default_factory=list)
    """After every step, how far ranks' parameters are from their mean."""
    bytes_per_step: float = 0.0

    @property
    def accuracy(self) -> float:
        """Mean over ranks."""
        return sum(self.accuracies) / RANKS


def distance(trees: list[Tree]) -> float:
    """Root mean square over ranks of the distance to the mean, over all parameters."""
    stacked = torch.stack([torch.cat([leaf.flatten() for leaf in tree.values()]) for tree in trees]).double()
    return float((stacked - stacked.mean(0)).square().sum().div(len(trees)).sqrt())


def train(name: str, digits: Digits, steps: int) -> Training:
    """Each rank steps on its share of the batch, then averages parameters with its neighbours."""
    pipeline, training = PIPELINES[name], Training()
    params = [initial_params() for _ in range(RANKS)]
    states = [pipeline.init(params[0]) for _ in range(RANKS)]
    sent = 0
    for images, labels in digits.batches(steps):
        shares = zip(params, images.chunk(RANKS), labels.chunk(RANKS), strict=True)
        grads = [gradient(*share) for share in shares]
        stepped = [{p: tree[p] - LR * grad[p] for p in tree} for tree, grad in zip(params, grads, strict=True)]
        run = pc.simulate(pipeline, stepped, states, check="off")
        params, states = run.trees, run.states
        sent += max(run.bytes)
        training.distances.append(distance(params))
    images, labels = digits.test
    training.accuracies = [(scores(each, images).argmax(dim=1) == labels).double().mean().item() for each in params]
    training.bytes_per_step = sent / steps
    return training


def gossip_alone(name: str) -> list[float]:
    """Distances while ranks that begin far apart do nothing but gossip; 1 at the start."""
    pipeline = PIPELINES[name]
    random = torch.Generator().manual_seed(0)
    trees: list[Tree] = [{"x": torch.randn(500, generator=random, dtype=torch.float64)} for _ in range(RANKS)]
    states, found = None, [distance(trees)]
    for _ in range(ALONE):
        run = pc.simulate(pipeline, trees, states, check="off")
        trees, states = run.trees, run.states
        found.append(distance(trees))
    return [each / found[0] for each in found]


def table(trainings: dict[str, Training]) -> str:
    """One line per training."""
    lines = [
        f"{'parameters averaged by':<24}{'accuracy':>9}{'worst rank':>12}{'gap':>8}{'sent a step':>13}{'apart':>9}"
    ]
    for name, each in trainings.items():
        gap = f"{pc.spectral_gap(TOPOLOGIES[name], RANKS):.3f}" if name in TOPOLOGIES else ""
        lines.append(
            f"{name:<24}{each.accuracy:>9.1%}{min(each.accuracies):>12.1%}{gap:>8}"
            f"{each.bytes_per_step:>11,.0f} B{each.distances[-1]:>9.4f}"
        )
    return "\n".join(lines)


COLOURS = dict(zip(TOPOLOGIES, ("#d9601a", "#8a6d3b", "#1f6fb2", "#2e8b57"), strict=True))


def draw(trainings: dict[str, Training], output: Path) -> None:
    """Left, gossip alone and what the gap promises; right, the same ranks while they train."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 4), dpi=160, layout="constrained")
        alone, training = figure.subplots(1, 2)
        for name, colour in COLOURS.items():
            period, gap = TOPOLOGIES[name].period(RANKS) or 1, pc.spectral_gap(TOPOLOGIES[name], RANKS)
            label = f"{name}: gap {gap:.2f}" + f" in {period} steps" * (period > 1)
            distances = [max(each, 1e-16) for each in gossip_alone(name)]
            alone.plot(distances, color=colour, linewidth=1.8, label=label)
            if gap < 1:
                promised = [(1 - gap) ** (step / period) for step in range(ALONE + 1)]
                alone.plot(promised, color=colour, linewidth=1, linestyle=(0, (2, 2)))
            # A mean over 9 steps, for the eye.
            curve = trainings[name].distances
            smooth = [sum(curve[max(0, i - 4) : i + 5]) / len(curve[max(0, i - 4) : i + 5]) for i in range(len(curve))]
            shown = f"{name}: accuracy {trainings[name].accuracy:.1%}"
            training.plot(range(1, len(curve) + 1), smooth, color=colour, linewidth=1.8, label=shown)
        alone.set(yscale="log", ylim=(5e-17, 3), xlim=(0, ALONE), xlabel="step", ylabel="distance from the mean")
        alone.set_title("Gossip alone; dotted: (1 - gap)^t", loc="left", weight="bold")
        training.set(xlabel="step", ylim=(0, None), xlim=(0, None))
        training.set_title(f"Training; dense reaches {trainings['dense'].accuracy:.1%}", loc="left", weight="bold")
        for axes, where in ((alone, "center right"), (training, "upper right")):
            axes.legend(frameon=False, fontsize=8, loc=where)
            axes.grid(axis="y", color="#eeeeee")
            axes.minorticks_off()
        figure.savefig(output)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each training, %(default)s by default; 15 an epoch")
    parser.add_argument("--output", type=Path, help="draw the picture here")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps: at least 1")
    if args.output is not None and not args.output.parent.is_dir():
        parser.error(f"--output: no folder {args.output.parent}")
    torch.set_num_threads(1)
    digits = Digits.load()
    trainings = {name: train(name, digits, args.steps) for name in PIPELINES}
    print(f"Digits, {args.steps} steps of decentralised SGD on {RANKS} simulated ranks\n\n{table(trainings)}")
    if args.output is not None:
        draw(trainings, args.output)
        print(f"\nPicture: {args.output}")


if __name__ == "__main__":
    main()
