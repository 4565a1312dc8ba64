"""Per-sample gradients, each clipped, averaged over all ranks, and given to TorchOpt: a step of pure functions.

Needs `pip install torchopt`. Run it with `python examples/torch_func_torchopt.py`, or on more ranks:
`torchrun --nproc-per-node 4 examples/torch_func_torchopt.py`.
"""

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchopt
from launch import launch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

import ptcollect as pc

LIMIT, RATE, STEPS = 0.5, 0.1, 30  # the longest gradient that one sample may have; learning rate; steps
MODEL = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()

Tree = dict[str, Tensor]


def loss(params: Tree, sample: Tensor, target: Tensor) -> Tensor:
    """Squared error of one sample, as a pure function of the parameters."""
    return F.mse_loss(functional_call(MODEL, params, (sample,)), target)


def clipped(params: Tree, sample: Tensor, target: Tensor) -> tuple[Tree, Tensor]:
    """Gradient of one sample's loss, no longer than LIMIT, and the loss."""
    grads, value = grad_and_value(loss)(params, sample, target)
    norm = torch.stack([g.square().sum() for g in optree.tree_leaves(grads)]).sum().sqrt()
    factor = (LIMIT / norm).clamp(max=1)
    return optree.tree_map(lambda g: g * factor, grads), value


def train(params: Tree, inputs: Tensor, targets: Tensor, pipeline: pc.Pipeline) -> tuple[Tree, list[float]]:
    """Train on this rank's samples together with the other ranks; returns the parameters and losses."""
    optimizer = torchopt.sgd(RATE, momentum=0.9)
    momenta = optimizer.init(params)
    losses = []
    for _ in range(STEPS):
        grads, values = vmap(clipped, in_dims=(None, 0, 0))(params, inputs, targets)  # one of each for every sample
        pending = pipeline.start(optree.tree_map(lambda g: g.mean(dim=0), grads))
        losses.append(values.mean().item())  # whatever can be done while gradients travel
        grads, _ = pending.wait()
        updates, momenta = optimizer.update(grads, momenta, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return params, losses


def alone(params: Tree, inputs: Tensor, targets: Tensor) -> Tree:
    """The same training by one process on all samples, with a loop over them and torch.optim."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    model.load_state_dict(params)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for _ in range(STEPS):
        mean = [torch.zeros_like(p) for p in model.parameters()]
        for sample, target in zip(inputs, targets, strict=True):
            model.zero_grad()
            F.mse_loss(model(sample), target).backward()
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for total, p in zip(mean, model.parameters(), strict=True):
                total += p.grad * min(1.0, LIMIT / norm.item()) / len(inputs)
        for total, p in zip(mean, model.parameters(), strict=True):
            p.grad = total
        optimizer.step()
    return dict(model.named_parameters())


def main() -> None:
    """Train on all ranks, and once more alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(0)  # the same on all ranks
    inputs = torch.randn(24 * world_size, 8, generator=random, dtype=torch.float64)
    targets = 2 * inputs.square().mean(dim=1, keepdim=True)
    params = {name: 0.3 * torch.randn(p.shape, generator=random, dtype=p.dtype) for name, p in MODEL.named_parameters()}

    pipeline = pc.chain(pc.bucketize("25MiB"), pc.all_to_all_avg())
    together, losses = train(params, inputs[rank::world_size], targets[rank::world_size], pipeline)
    expected = alone(params, inputs, targets)

    difference = max((together[name] - p).abs().max().item() for name, p in expected.items())
    if difference > 1e-9:
        raise SystemExit(f"rank {rank}: the parameters differ by {difference:.1e}")
    if rank == 0:
        print(
            f"{pipeline} on {world_size} ranks, TorchOpt's SGD with momentum, each sample's gradient clipped to {LIMIT}"
        )
        print(f"loss on rank 0 from {losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps")
        print(f"largest difference from one process, a loop over samples and torch.optim: {difference:.1e}")


if __name__ == "__main__":
    launch(main)
