"""Broadcast along a binomial tree: the set of ranks that have the tensor doubles each round."""

from __future__ import annotations

from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.reducers.reducer import existing_root, reducer


@reducer(same_peers=True, averages=False, check=existing_root)
async def broadcast(x: Tensor, comm: Comm, *, root: int = 0) -> Tensor:
    r"""The tensor of `root` on every rank, in ceil(log2 n) rounds.

    .. math:: y_r = D(C(x_\text{root}))

    The root encodes once, packets travel on unchanged, and the root decodes its own, so all ranks end with the same
    bits.

    Args:
        root: group rank whose tensor all ranks get, 0 by default.
        axis: name of the mesh dim to work along; ``None`` where the group has one dimension.

    Returns:
        A Pipeline; all ranks end with the same bits.

    Raises:
        ValueError: `root` is not a rank of the group.

    >>> import torch, ptcollect as pc
    >>> run = pc.simulate(pc.broadcast(root=2), [torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([2.0])])
    >>> run.trees, run.messages
    ([tensor([2.]), tensor([2.]), tensor([2.])], [1, 0, 1])
    """
    n = comm.size
    place = (comm.rank - root) % n  # distance from the root around the ranks
    packet = comm.encode(x) if place == 0 else None
    reach = 1  # places below this have the packet
    while reach < n:
        to, source = place + reach, place - reach
        send = {(to + root) % n: packet} if packet is not None and to < n else {}
        receive = {(source + root) % n: x.numel()} if 0 <= source < reach else {}
        received = await comm.exchange(send=send, recv=receive)
        packet = next(iter(received.values()), packet)
        reach *= 2
    assert packet is not None  # noqa: S101  (every place is reached)
    comm.accumulate(packet, x, keep=0.0)
    return x
