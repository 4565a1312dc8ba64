"""A reducer of one's own: recursive doubling, first on five ranks in this process and then on real ones.

Run it with `python examples/batch_isend_irecv.py`, or on more ranks:
`torchrun --nproc-per-node 4 examples/batch_isend_irecv.py`.
"""

import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor

import ptcollect as pc


@pc.reducer
async def recursive_doubling_avg(x: Tensor, comm: pc.Comm) -> Tensor:
    """The mean over the ranks in log2(n) rounds of pairs: few rounds, so it suits small tensors.

    The ranks below `core`, the largest power of two, do the work; each one above it hands its tensor to the rank `core`
    below, and gets the result from there. Pairs are one bit apart, and both of a pair add up the same two numbers, so
    all ranks end with the same bits.
    """
    n, rank = comm.size, comm.rank
    core = 1 << n.bit_length() - 1
    beyond = rank ^ core  # the partner on the other side of `core`, if there is one

    # Awaiting `comm.exchange` does what a `torch.distributed.batch_isend_irecv` and the waits for it do: all sends and
    # receives of a round are posted together, so no order of ranks can deadlock.
    if rank >= core:
        await comm.exchange(send={beyond: comm.encode(x)}, recv={})
        received = await comm.exchange(send={}, recv={beyond: x.numel()})
        return comm.decode(received[beyond])
    if beyond < n:
        received = await comm.exchange(send={}, recv={beyond: x.numel()})
        x = x + comm.decode(received[beyond])
    width = 1
    while width < core:  # here `width` ranks hold the same sum; `scale` has each book its share of what a codec drops
        packet, partner = comm.encode(x, scale=width), rank ^ width
        received = await comm.exchange(send={partner: packet}, recv={partner: x.numel()})
        x = comm.decode(packet) + comm.decode(received[partner])
        width *= 2
    packet = comm.encode(x.div_(n), scale=core / n)  # in place, so that integers are refused and not truncated
    if beyond < n:
        await comm.exchange(send={beyond: packet}, recv={})
    return comm.decode(packet)


def main() -> None:
    """Run it on this rank's process group, inside two transforms that know nothing of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pipeline = pc.chain(pc.bucketize("25MiB"), pc.compress("bf16"), recursive_doubling_avg())
    trees = [gradients(r) for r in range(world_size)]  # only this rank's own goes into the call
    with pc.traffic() as sent:
        result = pipeline(trees[rank])

    simulated = pc.simulate(pipeline, trees)
    for name, leaf in result.items():
        if not torch.equal(leaf, simulated.trees[rank][name]):
            raise SystemExit(f"rank {rank}, {name}: other bits than in the simulation")
    if (sent.bytes, sent.messages) != (simulated.bytes[rank], simulated.messages[rank]):
        raise SystemExit(f"rank {rank}: sent {sent.bytes} bytes, the simulation {simulated.bytes[rank]}")
    if rank == 0:
        print(f"{pipeline} on {world_size} processes:")
        print(f"  the bits and the bytes of the simulation; rank 0 sent {sent.bytes} bytes")


def simulation(ranks: int) -> None:
    """Try it on ranks that are a loop in this process; no process group is needed."""
    trees = [gradients(rank) for rank in range(ranks)]
    run = pc.simulate(pc.chain(pc.bucketize("25MiB"), recursive_doubling_avg()), trees)
    for name in trees[0]:
        mean = torch.stack([tree[name] for tree in trees]).double().mean(dim=0)
        for tree in run.trees:
            torch.testing.assert_close(tree[name].double(), mean, rtol=0, atol=1e-6)
            if not torch.equal(tree[name], run.trees[0][name]):
                raise SystemExit(f"{name}: ranks ended with different bits")
    ring = pc.simulate(pc.chain(pc.bucketize("25MiB"), pc.ring_reduce()), trees)
    print(f"{ranks} simulated ranks end with the same bits. On each of them:")
    for what in ("rounds", "bytes"):
        print(f"  {what:6s}  recursive doubling {getattr(run, what)}, ring {getattr(ring, what)}")


def gradients(rank: int) -> dict[str, Tensor]:
    """Other numbers on every rank."""
    random = torch.Generator().manual_seed(rank)
    return {"weight": torch.randn(10, 10, generator=random), "bias": torch.randn(10, generator=random)}


if __name__ == "__main__":
    simulation(5)
    launch(main, ranks=3)
