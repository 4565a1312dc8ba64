"""Ring all-reduce: 2(n-1) rounds, each with one send to the right and one receive from the left."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ptcollect.averaging import finish_mean, partial_scale, split_evenly
from ptcollect.comm import Comm
from ptcollect.reducers.reducer import mean_or_sum, reducer


@reducer(same_peers=True, check=mean_or_sum)
async def ring_reduce(x: Tensor, comm: Comm, *, op: Literal["mean", "sum"] = "mean") -> Tensor:
    r"""Mean (or sum) over the ranks by a ring: every rank sends 2(n-1)/n of the tensor, whatever n.

    .. math:: y = \frac{1}{n} \sum_{r=0}^{n-1} x_r

    The tensor is cut into n chunks. In n-1 rounds of reduce-scatter partial sums travel to the right and grow; chunk c
    is summed in the order of ranks c, c+1, ..., c-1 and ends at rank c-1, which encodes the result once; in n-1 rounds
    of all-gather the encoded chunks travel on unchanged, so all ranks decode the same bits. The order of summation
    depends on where an element lies in its flat tensor, and so the last bits depend on bucketing; where they must not,
    use `all_to_all_avg`. With `compress`, partial sums are encoded again at each hop.

    Args:
        op: ``"mean"`` or ``"sum"``. Means of integers are rounded to the nearest, halves to the even one.
        axis: name of the mesh dim to reduce over; ``None`` where the group has one dimension.

    Returns:
        A Pipeline; all ranks end with the same bits.

    Raises:
        ValueError: `op` is neither.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations, section 3.

    >>> import torch, ptcollect as pc
    >>> run = pc.simulate(pc.ring_reduce(), [torch.tensor([1.0, 10.0]), torch.tensor([3.0, 30.0])])
    >>> run.trees[0], run.bytes, run.rounds
    (tensor([ 2., 20.]), [8, 8], [2, 2])
    """
    n, rank = comm.size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = split_evenly(x.numel(), n)

    def scale(ranks: int) -> float:
        return partial_scale(x.dtype, ranks) if op == "mean" else 1.0

    scratch = x.new_empty(chunks[0][1] if comm.plain else 0)  # for all rounds: what a round allocates outlives it
    for ranks in range(1, n):  # reduce-scatter: what is sent is the sum over this many ranks
        start, stop = chunks[(rank - ranks + 1) % n]
        mine = x[slice(*chunks[(rank - ranks) % n])]
        packet = comm.encode(x[start:stop], at=start, scale=scale(ranks))
        room = scratch[: mine.numel()] if comm.plain else mine.numel()
        received = await comm.exchange(send={right: packet}, recv={left: room})
        comm.accumulate(received[left], mine, keep=scale(ranks + 1), alpha=scale(ranks + 1) / scale(ranks))

    del scratch, room, received

    start, stop = chunks[right]  # the chunk whose sum over all ranks has ended here
    result = x[start:stop]
    if op == "mean":
        finish_mean(result, n)
    packet = comm.encode(result, at=start, scale=1 / n if op == "mean" else 1.0)
    if not comm.plain:
        comm.accumulate(packet, result, keep=0.0)

    for step in range(1, n):  # all-gather: packets go round as they are
        start, stop = chunks[(rank + 1 - step) % n]
        place = x[start:stop]
        received = await comm.exchange(send={right: packet}, recv={left: place if comm.plain else place.numel()})
        packet = received[left]
        if not comm.plain:
            comm.accumulate(packet, place, keep=0.0)
    return x
