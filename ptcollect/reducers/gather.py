"""Gather mean: the root alone gets the mean."""

from __future__ import annotations

from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.reducers.all_to_all import mean_in_rank_order
from ptcollect.reducers.reducer import existing_root, reducer


@reducer(same_peers=True, consensus=False, averages=False, check=existing_root)
async def gather_avg(x: Tensor, comm: Comm, *, root: int = 0) -> Tensor:
    r"""Mean over the ranks at `root`; every other rank gets its own tensor back.

    .. math:: y_\text{root} = \frac{1}{n} \sum_{r=0}^{n-1} x_r, \qquad y_r = x_r \;\; (r \ne \text{root})

    Args:
        root: group rank that receives, 0 by default.
        axis: name of the mesh dim to reduce over; ``None`` where the group has one dimension.

    Returns:
        A Pipeline without consensus: DDP hooks refuse it.

    Raises:
        ValueError: `root` is not a rank of the group.

    >>> import torch, ptcollect as pc
    >>> pc.simulate(pc.gather_avg(root=1), [torch.tensor([1.0]), torch.tensor([3.0])]).trees
    [tensor([1.]), tensor([2.])]
    """
    if comm.rank != root:
        await comm.exchange(send={root: comm.encode(x)}, recv={})
        return x
    packet = comm.encode(x)
    others = [peer for peer in range(comm.size) if peer != root]
    received = await comm.exchange(send={}, recv=dict.fromkeys(others, x.numel()))
    return mean_in_rank_order({**received, root: packet}, comm)
