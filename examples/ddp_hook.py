"""The same pipeline as a communication hook of DistributedDataParallel, next to plain DDP.

Run it with `python examples/ddp_hook.py`, or on more ranks:
`torchrun --nproc-per-node 4 examples/ddp_hook.py`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launch
from torch.nn.parallel import DistributedDataParallel

import ptcollect as pc


def main() -> None:
    """Train two copies of a model on the same data, one by DDP's own all-reduce and one by the hook."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pipeline = pc.chain(pc.bucketize("25MiB"), pc.ring_reduce())

    plain, hooked = (DistributedDataParallel(perceptron()) for _ in range(2))
    hooked.register_comm_hook(None, pc.as_ddp_hook(pipeline, hooked))

    torch.manual_seed(1)
    inputs = torch.randn(32 * world_size, 16)[rank::world_size]
    targets = inputs.square().mean(dim=1, keepdim=True)
    for model in (plain, hooked):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(50):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()  # the hook runs in here, while gradients appear
            optimizer.step()
        if rank == 0:
            print(f"{'plain DDP' if model is plain else pipeline}: loss on rank 0 after 50 steps {loss.item():.6f}")

    difference = max((p - q).abs().max().item() for p, q in zip(plain.parameters(), hooked.parameters(), strict=True))
    if difference > 1e-5:  # both form the same means and may round them differently
        raise SystemExit(f"rank {rank}: the parameters differ by {difference:.1e}")
    if rank == 0:
        print(f"largest difference between any two parameters: {difference:.1e}")


def perceptron() -> torch.nn.Module:
    """A small network with the same weights at every call."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


if __name__ == "__main__":
    launch(main)
