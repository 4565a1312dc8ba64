"""The process group's own all-reduce."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ptcollect.averaging import finish_mean, partial_scale
from ptcollect.comm import Comm
from ptcollect.reducers.reducer import mean_or_sum, reducer


@reducer(native=True, check=mean_or_sum)
async def all_reduce(x: Tensor, comm: Comm, *, op: Literal["mean", "sum"] = "mean") -> Tensor:
    r"""Mean (or sum) over the ranks by the backend's native all-reduce, in the backend's order of summation.

    .. math:: y = \frac{1}{n} \sum_{r=0}^{n-1} x_r

    Leaves narrower than float32 travel and are summed as float32. Inside ``compress("bf16")`` or ``compress("fp16")``
    they travel *and are summed* in that dtype, as the backend knows no other way: n roundings where `ring_reduce` and
    `all_to_all_avg` sum in float32; and what was lost is not reported, so `error_feedback` refuses it. Equal to the
    other reducers to rounding, not bit for bit. Bytes are counted as a ring's, 2(n-1)/n of the tensor.

    Args:
        op: ``"mean"`` or ``"sum"``.
        axis: name of the mesh dim to reduce over; ``None`` where the group has one dimension.

    Returns:
        A Pipeline; all ranks end with the same bits.

    Raises:
        ValueError: `op` is neither.
        PipelineError: the codec's packets are not numbers, so no backend can sum them.

    >>> import torch, ptcollect as pc
    >>> pc.simulate(pc.all_reduce(), [torch.tensor([1.0]), torch.tensor([3.0])]).trees[0]
    tensor([2.])
    """
    scale = partial_scale(x.dtype, comm.size) if op == "mean" else 1.0
    if scale != 1:
        x.mul_(scale)  # first, so that the sum cannot overflow
    total = await comm.all_reduce(x if comm.compressed is None else x.to(comm.compressed))
    x.copy_(total)
    return finish_mean(x, comm.size) if op == "mean" else x
