"""A pipeline under Lightning, in place of DDP's own all-reduce: by a callback, which works on CPU too.

`DDPStrategy(ddp_comm_hook=...)` looks like the place for it, but Lightning passes that hook to DDP on CUDA devices only
and says nothing elsewhere: on CPU it is never called, as the last line shows. The callback registers one anywhere.

Needs `pip install lightning`, which starts the ranks itself: `python examples/lightning_ddp.py`, or on more ranks
`torchrun --nproc-per-node 4 examples/lightning_ddp.py`.
"""

import os

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ptcollect as pc

RANKS = int(os.environ.get("WORLD_SIZE", "2"))  # Lightning sets it in the processes that it starts, as torchrun does
BATCH, STEPS, RATE, LIMIT = 8, 12, 0.1, 1.0


class Synchronise(lightning.Callback):
    """Average gradients by a pipeline."""

    def __init__(self, pipeline: pc.Pipeline) -> None:
        self.pipeline = pipeline

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """By now the model is in DDP, and no backward pass has run."""
        trainer.model.register_comm_hook(None, pc.as_ddp_hook(self.pipeline, trainer.model))


class Line(lightning.LightningModule):
    """Fits a line."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        inputs, targets = batch
        return F.mse_loss(self.linear(inputs), targets)

    def train_dataloader(self) -> DataLoader:
        """This rank's samples in order; the sampler that Lightning would put in shuffles them."""
        data = samples()
        sampler = DistributedSampler(data, num_replicas=RANKS, rank=self.global_rank, shuffle=False)
        return DataLoader(data, batch_size=BATCH, sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=RATE)


def samples() -> TensorDataset:
    """All samples, the same on every rank."""
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * STEPS * RANKS, 3, generator=random)
    return TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0]]) + 0.5)


def fit(model: Line, strategy: DDPStrategy, *callbacks: lightning.Callback) -> pc.Traffic:
    """Train on all ranks; returns what pipelines sent from this one."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        callbacks=list(callbacks),
        max_steps=STEPS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pc.traffic() as sent:
        trainer.fit(model)
    return sent


def alone() -> Line:
    """The same training in a plain loop of one process, on all samples, in float64."""
    model = Line().double()
    optimizer = model.configure_optimizers()
    for inputs, targets in DataLoader(samples(), batch_size=BATCH * RANKS):
        optimizer.zero_grad()
        F.mse_loss(model.linear(inputs.double()), targets.double()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
    return model


def main() -> None:
    """Train by either way of giving Lightning a pipeline, and once more alone."""
    pipeline = pc.chain(pc.bucketize("25MiB"), pc.ring_reduce(), pc.clip_by_global_norm(LIMIT))
    model, other = Line(), Line()
    sent = fit(model, DDPStrategy(process_group_backend="gloo"), Synchronise(pipeline))
    ignored = fit(other, DDPStrategy(process_group_backend="gloo", ddp_comm_hook=pc.as_ddp_hook(pipeline, other)))

    rank = model.global_rank
    difference = max((p - q).abs().max().item() for p, q in zip(model.parameters(), alone().parameters(), strict=True))
    if difference > 1e-5:
        raise SystemExit(f"rank {rank}: the parameters differ by {difference:.1e}")
    once = pc.simulate(pipeline, [dict(model.named_parameters())] * RANKS).bytes[rank]
    if sent.bytes != STEPS * once:
        raise SystemExit(f"rank {rank} sent {sent.bytes} bytes, and {STEPS} synchronisations are {STEPS * once}")
    if rank == 0:
        print(f"{pipeline} under Lightning on {RANKS} ranks")
        print(f"largest difference from one process on all samples: {difference:.1e}")
        print(f"bytes sent by the pipeline: with the callback {sent.bytes}, with ddp_comm_hook {ignored.bytes}")


if __name__ == "__main__":
    main()
