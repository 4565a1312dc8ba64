"""Functional training: parameters and gradients are trees, a step is a function of them, and no module is changed.

Run it with `python examples/torch_func.py`, or on more ranks:
`torchrun --nproc-per-node 4 examples/torch_func.py`.
"""

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launch
from torch import Tensor
from torch.func import functional_call, grad_and_value

import ptcollect as pc

Tree = dict[str, dict[str, Tensor]]
ENCODER, HEAD = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)  # what to compute; their own parameters are never used


def loss(params: Tree, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of a two-layer network, as a pure function of its parameters."""
    hidden = functional_call(ENCODER, params["encoder"], (inputs,)).tanh()
    return F.mse_loss(functional_call(HEAD, params["head"], (hidden,)), targets)


def train(params: Tree, inputs: Tensor, targets: Tensor, pipeline: pc.Pipeline, steps: int = 40) -> tuple[Tree, float]:
    """Gradient descent; `pipeline` maps the tree of gradients to another one."""
    for _ in range(steps):
        grads, value = grad_and_value(loss)(params, inputs, targets)
        grads = pipeline(grads)
        params = optree.tree_map(lambda p, g: p - 0.1 * g, params, grads)
    return params, value.item()


def main() -> None:
    """Train on all ranks, and once more alone on the whole data, from the same parameters."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(0)  # the same on all ranks
    inputs = torch.randn(32 * world_size, 8, generator=random)
    targets = inputs.prod(dim=1, keepdim=True).tanh()
    params = optree.tree_map(
        lambda shape: 0.3 * torch.randn(shape, generator=random),
        {"encoder": {"weight": (16, 8), "bias": (16,)}, "head": {"weight": (1, 16), "bias": (1,)}},
        is_leaf=lambda node: isinstance(node, tuple),
    )

    pipeline = pc.chain(pc.bucketize("25MiB"), pc.all_to_all_avg())
    together, value = train(params, inputs[rank::world_size], targets[rank::world_size], pipeline)
    alone, _ = train(params, inputs, targets, pc.chain())  # the empty chain is the identity

    difference = max(optree.tree_leaves(optree.tree_map(lambda p, q: (p - q).abs().max().item(), together, alone)))
    if difference > 1e-5:
        raise SystemExit(f"rank {rank}: the parameters differ by {difference:.1e}")
    if rank == 0:
        print(f"{pipeline} on {world_size} ranks: loss on rank 0 {value:.6f}")
        print(f"largest difference from one process on the whole data: {difference:.1e}")


if __name__ == "__main__":
    launch(main)
