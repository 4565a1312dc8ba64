"""Direct all-reduce: every chunk to its owner, reduced there in rank order, the result to all; two rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from ptcollect.averaging import finish_mean, partial_scale, split_evenly
from ptcollect.comm import Comm, Packet
from ptcollect.reducers.reducer import reducer


@reducer(same_peers=True)
async def all_to_all_avg(x: Tensor, comm: Comm) -> Tensor:
    r"""Mean over the ranks, reduced in rank order: the bits do not depend on how tensors are packed into buckets.

    .. math:: y = \frac{1}{n} \Big( \big( (x_0 + x_1) + x_2 \big) + \dots + x_{n-1} \Big)

    Round 1: chunk c of every rank goes to rank c, its owner, which averages the n chunks in rank order. Round 2: the
    owner sends the result to all. As many bytes as a ring in two rounds instead of 2(n-1), but n-1 messages in each.
    With `compress` every chunk is encoded once, the owner's too, and the result once.

    Args:
        axis: name of the mesh dim to reduce over; ``None`` where the group has one dimension.

    Returns:
        A Pipeline; all ranks end with the same bits.

    Source: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH, section
    3.3.

    >>> import torch, ptcollect as pc
    >>> run = pc.simulate(pc.all_to_all_avg(), [torch.tensor([1.0, 10.0]), torch.tensor([3.0, 30.0])])
    >>> run.trees[0], run.bytes, run.rounds
    (tensor([ 2., 20.]), [8, 8], [2, 2])
    """
    n, rank = comm.size, comm.rank
    chunks = split_evenly(x.numel(), n)
    sizes = [stop - start for start, stop in chunks]
    others = [peer for peer in range(n) if peer != rank]

    parts = [comm.encode(x[start:stop], at=start) for start, stop in chunks]
    received = await comm.exchange(send={peer: parts[peer] for peer in others}, recv=dict.fromkeys(others, sizes[rank]))
    mean = mean_in_rank_order({**received, rank: parts[rank]}, comm)

    result = comm.encode(mean, at=chunks[rank][0], scale=1 / n)
    places = {peer: x[start:stop] for peer, (start, stop) in enumerate(chunks)}
    wanted = {peer: places[peer] if comm.plain else sizes[peer] for peer in others}
    received = await comm.exchange(send=dict.fromkeys(others, result), recv=wanted)
    for peer, packet in {**received, rank: result}.items():
        if peer == rank or not comm.plain:
            comm.accumulate(packet, places[peer], keep=0.0)
    return x


def mean_in_rank_order(packets: dict[int, Packet], comm: Comm) -> Tensor:
    """The mean of what all ranks sent, added up from rank 0 to n-1 in the accumulation dtype."""
    n = len(packets)
    return finish_mean(sum_in_rank_order(packets, comm, scale=partial_scale(comm.dtype, n)), n)


def sum_in_rank_order(packets: dict[int, Packet], comm: Comm, *, scale: float = 1.0) -> Tensor:
    """`scale`, a power of two, times the sum of what all ranks sent, added up from rank 0 to n-1 in fresh storage."""
    total = torch.empty(packets[0].numel, dtype=comm.dtype, device=comm.device)
    comm.accumulate(packets[0], total, keep=0.0)
    for rank in range(1, len(packets)):
        comm.accumulate(packets[rank], total, keep=scale if rank == 1 else 1.0, alpha=scale)
    return total
