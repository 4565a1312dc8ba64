"""`compress`: what travels instead of the numbers themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ptcollect.codecs import by_name
from ptcollect.codecs.codec import Codec
from ptcollect.comm import Comm
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, Transform, Wrapped, apply_settled
from ptcollect.reducers.reducer import Reducer
from ptcollect.state import State
from ptcollect.tree import Leaves
from ptcollect.value import refuse_tree


def compress(codec: str | Codec) -> Transform:
    r"""Send packets of `codec` inside the next reducer; sums are still formed in float32 (float64 for float64 leaves).

    .. math:: y = D\Big(C\big(\tfrac{1}{n} \textstyle\sum_r D(C(x_r))\big)\Big)

    for `all_to_all_avg`; each reducer says where it encodes. All ranks decode the result from the same bytes. Integer
    leaves travel exactly, as without `compress`.

    Args:
        codec: a codec from `ptcollect.codecs`, or the name of a plain one: ``"bf16"``, ``"fp16"``.

    Returns:
        A Transform.

    Raises:
        ValueError: no codec has that name.
        TypeError: neither a name nor a codec.
        PipelineError: when it wraps `all_reduce` and the packets are not numbers, or another `compress`.

    >>> import torch, ptcollect as pc
    >>> run = pc.simulate(
    ...     pc.chain(pc.compress("bf16"), pc.ring_reduce()), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    ... )
    >>> run.trees[0], run.bytes
    (tensor([2., 3.]), [4, 4])
    """
    refuse_tree("compress", "codec", codec)
    if isinstance(codec, str):
        codec = by_name(codec)
    if not isinstance(codec, Codec):
        raise TypeError(
            f'compress(codec): expected a name such as "bf16" or a codec, got {type(codec).__name__}: {codec!r}'
        )
    return Compress(codec)


@dataclass(frozen=True, repr=False)
class Compress(Transform):
    """Gives the pipeline inside a comm with another codec."""

    name = "compress"
    streams = True
    manages_ownership = True
    works_in_buckets = True
    lossy = True

    codec: Codec

    def _show(self, field: str, value: Any) -> str:
        try:
            plain = by_name(value.name) == value
        except ValueError:
            plain = False
        return f'"{value.name}"' if plain else repr(value)

    def check(self, inner: Pipeline) -> None:
        self._check(inner, used=False)

    def _check(self, stage: Pipeline, *, used: bool) -> None:
        """Look at the stages that get this codec; `used`: one that sends has already been met on the way in."""
        if isinstance(stage, Wrapped) and isinstance(stage.transform, Compress):
            if not used:
                raise PipelineError(
                    f"{self!r} around {stage.transform!r} with nothing communicating between: only the inner one "
                    f"would travel; keep one: chain({stage.transform!r}, {stage.inner!r})"
                )
            return  # from here on that one's codec travels
        if isinstance(stage, Reducer) and stage.factory.native and self.codec.sum_dtype is None:
            raise PipelineError(
                f"{self!r} into {stage!r}: a native all-reduce adds up what travels, and these packets are not "
                f"numbers; write chain({self!r}, ring_reduce()) or chain({self!r}, all_to_all_avg())"
            )
        used = used or (isinstance(stage, Wrapped) and stage.transform.sends)
        for child in stage.children():
            self._check(child, used=used)

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        out, inner_state = await apply_settled(inner, tree, state["inner"], comm.replace(codec=self.codec))
        return out, {"inner": inner_state}
