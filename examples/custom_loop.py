"""A training loop of one's own: one line between the gradients and the optimizer.

Run it with `python examples/custom_loop.py`, or on more ranks:
`torchrun --nproc-per-node 4 examples/custom_loop.py`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launch

import ptcollect as pc


def main() -> None:
    """Fit a line on all ranks, each with its own share of the data."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank makes the same data and the same model
    inputs = torch.randn(64 * world_size, 3)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0]]) + 0.5
    model = torch.nn.Linear(3, 1)
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    pipeline = pc.chain(pc.bucketize("25MiB"), pc.ring_reduce(), pc.clip_by_global_norm(5.0))
    mine = slice(rank, None, world_size)
    for step in range(100):
        loss = F.mse_loss(model(inputs[mine]), targets[mine])
        grads = dict(zip(params, torch.autograd.grad(loss, params.values()), strict=True))
        grads = pipeline(grads)  # the mean over all ranks, clipped
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:2d}   loss on rank 0: {loss.item():.2e}")

    # The data lies on a line, so every rank has to end on it.
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1.0, -2.0, 3.0]]), rtol=0, atol=1e-4)
    torch.testing.assert_close(model.bias.detach(), torch.tensor([0.5]), rtol=0, atol=1e-4)
    if rank == 0:
        print(f"{pipeline} on {world_size} ranks found", [round(w, 3) for w in model.weight[0].tolist()], "and 0.5")


if __name__ == "__main__":
    launch(main)
