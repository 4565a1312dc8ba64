"""All-gather mean: everybody sends everything to everybody and averages what came."""

from __future__ import annotations

from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.reducers.all_to_all import mean_in_rank_order
from ptcollect.reducers.reducer import reducer


@reducer(same_peers=True)
async def all_gather_avg(x: Tensor, comm: Comm) -> Tensor:
    r"""Mean over the ranks from whole copies of every rank's tensor: one round, and each input is encoded exactly once.

    .. math:: y = \frac{1}{n} \sum_{r=0}^{n-1} D(C(x_r))

    with the codec's encoding C and decoding D. Nothing is ever encoded again, which suits codecs that lose much; but
    each rank sends n-1 whole packets, so with b bits per element it sends less than a dense float32 ring only below
    64/b ranks. Reduced in rank order: the bits do not depend on bucketing.

    Args:
        axis: name of the mesh dim to reduce over; ``None`` where the group has one dimension.

    Returns:
        A Pipeline; all ranks end with the same bits.

    >>> import torch, ptcollect as pc
    >>> run = pc.simulate(pc.all_gather_avg(), [torch.tensor([1.0, 10.0]), torch.tensor([3.0, 30.0])])
    >>> run.trees[0], run.bytes, run.rounds
    (tensor([ 2., 20.]), [8, 8], [1, 1])
    """
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    packet = comm.encode(x)
    received = await comm.exchange(send=dict.fromkeys(others, packet), recv=dict.fromkeys(others, x.numel()))
    return mean_in_rank_order({**received, comm.rank: packet}, comm)
