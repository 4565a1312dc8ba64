"""Gradient accumulation with tokens as weights: uneven micro-batches, one synchronisation a step, the mean over tokens.

Run it with `python examples/token_weights.py`, or on more ranks:
`torchrun --nproc-per-node 4 examples/token_weights.py`.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launch
from torch import Tensor

import ptcollect as pc

WORDS, STEPS = 12, 20


def micro_batches(step: int, rank: int) -> list[Tensor]:
    """What `rank` reads in a step: as many texts as fell to it, each as long as it is. Shape of each: (tokens,)."""
    random = torch.Generator().manual_seed(1000 * step + rank)  # anyone can read what any rank reads
    lengths = torch.randint(2, 30, (1 + (step + 2 * rank) % 3,), generator=random)
    # Longer texts are about other words, so that it matters how much a text counts.
    return [torch.randint(0, WORDS if n > 15 else WORDS // 3, (int(n),), generator=random) for n in lengths]


def loss(model: torch.nn.Module, text: Tensor) -> Tensor:
    """Cross entropy of each next word, summed over the tokens that are predicted."""
    return F.cross_entropy(model(text[:-1]), text[1:], reduction="sum")


def predicted(texts: list[Tensor]) -> int:
    """How many tokens: what the loss is a sum over."""
    return sum(len(text) - 1 for text in texts)


def train(model: torch.nn.Module, pipeline: pc.Pipeline, weighted: bool) -> tuple[float, pc.Traffic]:
    """Train on this rank's texts together with the other ranks; returns the last loss and what travelled."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = None
    with pc.traffic() as travelled:
        for step in range(STEPS):
            texts = micro_batches(step, dist.get_rank())
            tokens = predicted(texts)
            optimizer.zero_grad()
            for text in texts:  # backward adds to .grad; nothing travels
                (loss(model, text) / tokens).backward()
            # Now .grad is this rank's mean over so many tokens: one synchronisation makes it the mean over all.
            state = pc.sync_grads(pipeline, model, state, weight=tokens if weighted else None)
            optimizer.step()
    return sum(loss(model, text).item() for text in texts) / tokens, travelled


def alone(model: torch.nn.Module, world_size: int) -> None:
    """The same training by one process that reads every rank's texts in one go, in float64."""
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        texts = [text for rank in range(world_size) for text in micro_batches(step, rank)]
        optimizer.zero_grad()
        (sum(loss(model, text) for text in texts) / predicted(texts)).backward()
        optimizer.step()


def apart(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference between two parameters."""
    return max((p - q).abs().max().item() for p, q in zip(model.parameters(), other.parameters(), strict=True))


def main() -> None:
    """Train with and without weights, and once more alone on all texts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pipeline = pc.chain(pc.bucketize("25MiB"), pc.ring_reduce())

    # A mean over 1 token is 1 and a mean over 3 tokens is 5: over all 4 tokens it is (1 * 1 + 3 * 5) / 4 = 4.
    small = pc.simulate(pipeline, [torch.tensor([1.0]), torch.tensor([5.0])], weights=[1, 3])
    if [tree.item() for tree in small.trees] != [4.0, 4.0]:
        raise SystemExit(f"expected 4 on both ranks, got {small.trees}")

    torch.manual_seed(0)  # the same model on every rank
    model = torch.nn.Sequential(torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, WORDS))
    plain, whole = copy.deepcopy(model), copy.deepcopy(model)
    once = pc.simulate(pipeline, [dict(model.named_parameters())] * world_size).bytes[rank]
    value, travelled = train(model, pipeline, weighted=True)
    train(plain, pipeline, weighted=False)
    alone(whole, world_size)

    if apart(model, whole) > 1e-5:
        raise SystemExit(f"rank {rank}: the parameters differ by {apart(model, whole):.1e}")
    if travelled.bytes != STEPS * once:
        raise SystemExit(f"rank {rank} sent {travelled.bytes} bytes, and {STEPS} synchronisations are {STEPS * once}")
    if rank == 0:
        counts = [[predicted([text]) for text in micro_batches(STEPS - 1, r)] for r in range(world_size)]
        print("weights 1 and 3, gradients 1 and 5: both ranks get", small.trees[0].item())
        print(f"{pipeline} on {world_size} ranks: loss on rank 0 {value:.4f} after {STEPS} steps")
        print(f"tokens in the last step, by rank and micro-batch: {counts}")
        print(f"sent in each step: {once} bytes, however many micro-batches")
        print(f"largest difference from one process on all tokens: {apart(model, whole):.1e}")
        print(f"without weights, a mean of the ranks' means:       {apart(plain, whole):.1e}")


if __name__ == "__main__":
    launch(main)
