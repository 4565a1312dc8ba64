"""Local SGD and DiLoCo on scikit-learn's digits over 8 simulated ranks, which meet once in 20 steps.

    python examples/diloco_digits.py

Every rank steps on its own share of each batch; the pipeline is called after every step and says itself when to send.
Prints what each way of averaging reaches, and what it sends.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from compressed_digits import LR, Digits, gradient, initial_params, scores

import ptcollect as pc

RANKS, EVERY = 8, 20
RING = (pc.bucketize(), pc.ring_reduce())
PIPELINES = {
    "dense": pc.chain(pc.local_sgd(1), *RING),
    "local SGD": pc.chain(pc.local_sgd(EVERY), *RING),
    "DiLoCo": pc.chain(pc.diloco(EVERY), *RING),
    "DiLoCo, int8": pc.chain(
        pc.diloco(EVERY), pc.error_feedback(), pc.bucketize(), pc.compress("int8"), pc.ring_reduce()
    ),
    "streaming DiLoCo": pc.chain(pc.streaming_diloco(EVERY, fragments=2, delay=1), *RING),
}


@dataclass
class Training:
    """What came of one training."""

    accuracy: float
    """Share of the test images that the mean of all ranks' parameters recognises."""
    sent: int
    """Bytes that a rank sent in all."""
    peak: int
    """Most bytes in a step."""


def train(name: str, digits: Digits, steps: int) -> Training:
    """A step on each rank's share of the batch, then the pipeline on all ranks' parameters."""
    pipeline = PIPELINES[name]
    params = [initial_params() for _ in range(RANKS)]
    states = [pipeline.init(params[0]) for _ in range(RANKS)]
    sent: list[int] = []
    for images, labels in digits.batches(steps):
        shares = zip(params, images.chunk(RANKS), labels.chunk(RANKS), strict=True)
        grads = [gradient(*share) for share in shares]
        stepped = [{p: tree[p] - LR * grad[p] for p in tree} for tree, grad in zip(params, grads, strict=True)]
        run = pc.simulate(pipeline, stepped, states)
        params, states = run.trees, run.states
        sent.append(max(run.bytes))
    mean = {path: torch.stack([tree[path] for tree in params]).mean(0) for path in params[0]}
    images, labels = digits.test
    accuracy = (scores(mean, images).argmax(dim=1) == labels).double().mean().item()
    return Training(accuracy, sum(sent), max(sent))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each training, %(default)s by default; 15 an epoch")
    args = parser.parse_args()
    if args.steps < EVERY:
        parser.error(f"--steps: at least {EVERY}, a round")
    torch.set_num_threads(1)
    digits = Digits.load()
    print(f"Digits, {args.steps} steps on {RANKS} simulated ranks, rounds of {EVERY} steps\n")
    print(f"{'parameters averaged by':<24}{'accuracy':>9}{'sent':>14}{'most in a step':>18}")
    for name in PIPELINES:
        each = train(name, digits, args.steps)
        print(f"{name:<24}{each.accuracy:>9.1%}{each.sent:>12,} B{each.peak:>16,} B")


if __name__ == "__main__":
    main()
