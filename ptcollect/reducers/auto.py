"""Picks the algorithm by size: few messages for small tensors, few bytes in flight for large ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ptcollect.averaging import finish_mean, partial_scale
from ptcollect.codecs.cast import Cast
from ptcollect.comm import Comm
from ptcollect.reducers.all_to_all import all_to_all_avg
from ptcollect.reducers.reducer import reducer
from ptcollect.reducers.ring import ring_reduce
from ptcollect.sizes import size_in_bytes


def _existing_sizes(options: Mapping[str, Any], size: int | None) -> None:
    for name in ("doubling", "direct"):
        size_in_bytes(options[name], f"auto_reduce({name}=...)", zero=True)


@reducer(check=_existing_sizes)
async def auto_reduce(x: Tensor, comm: Comm, *, doubling: int | str = "64KiB", direct: int | str = "1MiB") -> Tensor:
    r"""Mean over the ranks by whichever algorithm suits the size of the tensor or bucket and the number of ranks.

    .. math:: y = \frac{1}{n} \sum_{r=0}^{n-1} x_r

    With a latency of a per message and B bytes per tensor, on n ranks:

    * up to `doubling` bytes recursive doubling: :math:`\lceil \log_2 n \rceil` rounds of one message of B bytes (two
      more rounds where n is no power of two);
    * up to `direct` bytes `all_to_all_avg`: 2 rounds of n-1 messages, 2B(n-1)/n bytes;
    * above, `ring_reduce`: 2(n-1) rounds of one message, 2B(n-1)/n bytes, never more than one sender per receiver.

    Bytes are those on the wire, after `compress`. Recursive doubling adds up in pairs; packets of codecs that may
    differ from rank to rank, anything but casts, cannot go that way and are sent directly. The choice depends on
    nothing but size, codec and n, so it is the same on all ranks and in the simulator. The defaults are where the lines
    cross on the machine of docs/performance.md; slow links move them down, fast ones with many ranks up.

    Args:
        doubling: bytes up to which recursive doubling is used, as an int or as in ``"64KiB"``; 0: never.
        direct: bytes up to which `all_to_all_avg` is used; 0: never.
        axis: name of the mesh dim to reduce over; ``None`` where the group has one dimension.

    Returns:
        A Pipeline; all ranks end with the same bits. The last bits depend on bucketing.

    Raises:
        ValueError: a size that is none.

    Source: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH, section
    4.

    >>> import torch, ptcollect as pc
    >>> run = pc.simulate(pc.auto_reduce(), [torch.full((2,), 10.0**rank) for rank in range(4)])
    >>> run.trees[0], run.rounds, run.messages
    (tensor([277.7500, 277.7500]), [2, 2, 2, 2], [2, 2, 2, 2])
    """
    size = comm.wire_bytes(x.numel())
    if size <= size_in_bytes(doubling, "doubling", zero=True) and isinstance(comm.codec, Cast):
        return await _recursive_doubling(x, comm)
    chosen = all_to_all_avg if size <= size_in_bytes(direct, "direct", zero=True) else ring_reduce
    return await chosen.function(x, comm)


async def _recursive_doubling(x: Tensor, comm: Comm) -> Tensor:
    """In round k every rank adds what the rank whose number differs in bit k has summed so far.

    Where n is no power of two, the ranks from the largest one m on first hand their tensor to the rank m below, and in
    the end get the result from there.
    """
    n, rank = comm.size, comm.rank
    m = 1 << (n.bit_length() - 1)
    extra = n - m
    if rank >= m:
        await comm.exchange(send={rank - m: comm.encode(x)}, recv={})
        received = await comm.exchange(send={}, recv={rank - m: x.numel()})
        comm.accumulate(received[rank - m], x, keep=0.0)
        return x
    if rank < extra:
        received = await comm.exchange(send={}, recv={rank + m: x.numel()})
        half = partial_scale(x.dtype, 2)
        comm.accumulate(received[rank + m], x, keep=half, alpha=half)

    width = 1  # how many ranks have summed the same
    while width < m:
        mine, theirs = (_ranks_below(first * width, width, extra) for first in (rank // width, rank // width ^ 1))
        scale, other, both = (partial_scale(x.dtype, ranks) for ranks in (mine, theirs, mine + theirs))
        partner = rank ^ width
        packet = comm.encode(x, scale=scale * width)  # each of `width` ranks books its part of what encoding drops
        received = await comm.exchange(send={partner: packet}, recv={partner: x.numel()})
        if not comm.plain:
            comm.accumulate(packet, x, keep=0.0)  # what the partner adds
        comm.accumulate(received[partner], x, keep=both / scale, alpha=both / other)
        width *= 2

    finish_mean(x, n)
    if extra:
        packet = comm.encode(x, scale=m / n)
        if rank < extra:
            await comm.exchange(send={rank + m: packet}, recv={})
        if not comm.plain:
            comm.accumulate(packet, x, keep=0.0)  # what the ranks from m on get
    return x


def _ranks_below(first: int, width: int, extra: int) -> int:
    """How many ranks' tensors the ranks from `first` to ``first + width - 1`` have summed."""
    return width + min(max(extra - first, 0), width)
