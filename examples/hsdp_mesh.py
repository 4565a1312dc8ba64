"""Hybrid sharding: FSDP2 shards a model over two ranks, and a compressed pipeline averages between its two replicas.

Run it with `python examples/hsdp_mesh.py`, which starts 4 ranks, or on more of them, an even number:
`torchrun --nproc-per-node 4 examples/hsdp_mesh.py`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import ptcollect as pc

STEPS = 50


def main() -> None:
    """Train twice in FSDP, dense and compressed between the replicas, and once in one process on all the data."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1)
    inputs = torch.randn(32 * world_size, 16)
    targets = inputs.square().mean(dim=1, keepdim=True)

    alone = perceptron()
    train(alone, inputs, targets)
    wanted = F.mse_loss(alone(inputs), targets).item()
    if rank == 0:
        print(f"one process on all the data: loss after {STEPS} steps {wanted:.6f}")

    dense = pc.chain(pc.bucketize(), pc.ring_reduce())
    compressed = pc.chain(pc.error_feedback(), pc.bucketize(), pc.compress("int8"), pc.ring_reduce())
    for pipeline in (dense, compressed):
        model = perceptron()
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        for module in model.modules():
            if isinstance(module, FSDPModule):  # the hook is for one module, and so is its state
                module.set_all_reduce_hook(pc.as_fsdp_hook(pipeline, mesh["replicate"]))

        with pc.traffic() as between_replicas:
            train(model, inputs[rank::world_size], targets[rank::world_size])
        parameters = [p.full_tensor() for p in model.parameters()]
        difference = max((p - q).abs().max().item() for p, q in zip(parameters, alone.parameters(), strict=True))
        if difference > (1e-5 if pipeline is dense else 5e-3):
            raise SystemExit(f"rank {rank}: {pipeline} ends {difference:.1e} away from one process")
        if rank == 0:
            print(f"{pipeline} on {world_size // 2} replicas of 2 shards:")
            print(f"    largest difference between any two parameters: {difference:.1e}")
            print(f"    sent to the other replicas in each step: {between_replicas.bytes // STEPS} bytes")


def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Plain steps of SGD; with FSDP all that is synchronised is synchronised within backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def perceptron() -> torch.nn.Sequential:
    """A small network with the same weights at every call."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


if __name__ == "__main__":
    launch(main, ranks=4)
