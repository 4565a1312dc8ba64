"""Gradients travel while backward still computes others, without DDP; with accumulation, and the same bits.

Run it with `python examples/overlap.py`, or on more ranks:
`torchrun --nproc-per-node 4 examples/overlap.py`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launch

import ptcollect as pc


def main() -> None:
    """Train two copies of a model, one with `overlap` and one with `sync_grads` after backward."""
    rank = dist.get_rank()
    sync = pc.chain(pc.error_feedback(), pc.bucketize("4KiB"), pc.compress("int8"), pc.ring_reduce())
    ahead, after = perceptron(), perceptron()
    handle = pc.overlap(sync, ahead)  # checks that all ranks start from the same parameters
    state = None

    torch.manual_seed(1 + rank)
    sent_early = 0
    for step in range(30):
        half, other = torch.randn(2, 16, 64)
        for model in (ahead, after):
            model.zero_grad()
        with handle.no_sync():  # the first micro-batch only adds to .grad
            loss_of(ahead, half).backward()
        with pc.traffic() as sent:
            loss_of(ahead, other).backward()
            sent_early += sent.messages
            handle.wait()  # now .grad is what the pipeline made of it
        for part in (half, other):
            loss_of(after, part).backward()
        state = pc.sync_grads(sync, after, state)
        for model in (ahead, after):
            torch.optim.SGD(model.parameters(), lr=0.05).step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1:2}   loss on rank 0: {loss_of(ahead, other).item():.4f}")

    if any(not torch.equal(p, q) for p, q in zip(ahead.parameters(), after.parameters(), strict=True)):
        raise SystemExit(f"rank {rank}: the parameters differ")
    if rank == 0:
        print(f"{sync}: the same bits as sync_grads; {sent_early} messages were sent before backward ended")


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Half the loss of a micro-batch: two of them make a batch."""
    return F.mse_loss(model(inputs), inputs.square().mean(dim=1, keepdim=True)) / 2


def perceptron() -> torch.nn.Module:
    """A small network with the same weights at every call."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))


if __name__ == "__main__":
    launch(main)
