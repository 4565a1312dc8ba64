"""`as_fsdp_hook`: a pipeline between the replicas of a model that FSDP2 shards.

FSDP calls the hook of a module right after that module's reduce-scatter, within backward, with this rank's flat part of
the module's gradients, and cuts that into the parameters' gradients afterwards. The hook runs the pipeline on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ptcollect.arrivals import at_end_of_backward
from ptcollect.errors import PeerLostError, PipelineError, TreeMismatchError
from ptcollect.options import Options
from ptcollect.partition import Partition
from ptcollect.pipeline import Pipeline, Wrapped
from ptcollect.reducers.reducer import Reducer
from ptcollect.state import State
from ptcollect.transforms.low_rank import LowRank
from ptcollect.transforms.skip_nonfinite import SkipNonfinite
from ptcollect.value import refuse_tree


def as_fsdp_hook(
    pipeline: Pipeline,
    group: dist.ProcessGroup | DeviceMesh,
    *,
    check: Literal["every_step", "first", "off"] = "every_step",
) -> FSDPHook:
    r"""`pipeline` as an all-reduce hook of FSDP2: ``module.set_all_reduce_hook(pc.as_fsdp_hook(pipeline, group))``.

    .. math:: \text{shard of grad} \leftarrow \text{pipeline}(\text{shard of grad})

    For a model under ``fully_shard(module, mesh=mesh["shard"])``: FSDP takes the mean over the ranks that share the
    model, the hook that over the replicas, `group`. It works in place on the flat output of the reduce-scatter, which
    is this rank's part of all gradients of one module, filled up with zeros where a parameter cannot be divided evenly.

    ``set_all_reduce_hook`` applies to the one module it is called on, so make a hook for each:

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(pc.as_fsdp_hook(pipeline, mesh["replicate"]))

    The state is this rank's alone, for its part of this module, and made at the first call, when the size is known.
    Backward passes under ``set_requires_gradient_sync(False)`` do not call it, those under
    ``set_requires_all_reduce(False)`` do.

    Errors of the pipeline come out of ``backward()`` with their type, on the replicas of that part. They come when the
    pass has ended, so that ranks of other parts are not left waiting; its gradients are void, and the next step can be
    taken once all ranks know. Only the `PeerLostError` of a peer that left no word comes at once, in the middle of
    FSDP's work. Start all ranks again then: in torch 2.13 FSDP's ``reset_iter_state()`` leaves gradients of that pass
    behind, which the next one adds to its own.

    Args:
        pipeline: must end with the same bits on all ranks and treat every number, block or bucket alone.
        group: the replicas, without the dim that FSDP shards on: ``mesh["replicate"]``, or a process group. Of a mesh
            with several dims the pipeline names those it reduces over.
        check: see `RunOptions`.

    Returns:
        A callable for `set_all_reduce_hook`, with ``.state``, ``.state_dict()`` and ``.load_state_dict()``.

    Raises:
        PipelineError: the pipeline reaches no consensus, works on parameters, or needs the parameters' names, shapes or
            the whole tree.
        TypeError: `group` is None or no group.

    Source: Zhao et al. 2023, PyTorch FSDP: experiences on scaling fully sharded data parallel, section 3.2.2 (hybrid
    sharding).

    >>> import torch, torch.distributed as dist, ptcollect as pc
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> hook = pc.as_fsdp_hook(pc.chain(pc.bucketize(), pc.ring_reduce()), dist.group.WORLD)
    >>> hook
    as_fsdp_hook(chain(bucketize(), ring_reduce()))
    >>> hook(torch.ones(3)), hook.state
    (None, {})
    >>> pc.as_fsdp_hook(pc.chain(pc.low_rank(2), pc.ring_reduce()), dist.group.WORLD)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ptcollect.errors.PipelineError: as_fsdp_hook(chain(low_rank(2), ring_reduce())): low_rank(2) needs...
    >>> dist.destroy_process_group()
    """
    refuse_tree("as_fsdp_hook", "pipeline", pipeline)
    if not isinstance(pipeline, Pipeline):
        raise PipelineError(
            f"as_fsdp_hook(pipeline, group): expected a pipeline, got {type(pipeline).__name__}: {pipeline!r}"
        )
    if not pipeline.consensus:
        raise PipelineError(
            f"as_fsdp_hook({pipeline!r}): replicas would end with different gradients, and they must stay the same; "
            "use a pipeline that reaches consensus, such as ring_reduce()"
        )
    if pipeline.works_on == "parameters":
        raise PipelineError(
            f"as_fsdp_hook({pipeline!r}): it works on parameters, and a hook gets gradients; use sync_params"
        )
    for stage in pipeline.walk():
        _refuse(stage, pipeline)
    if group is None:
        raise TypeError(
            f'as_fsdp_hook({pipeline!r}, group): name the replicas, as in mesh["replicate"]; all ranks together hold '
            "different parts of the model"
        )
    return FSDPHook(pipeline, group, check)


def _refuse(stage: Pipeline, pipeline: Pipeline) -> None:
    """Raise if `stage` would do something else on a flat part of a module's gradients than on a tree of parameters."""
    transform = stage.transform if isinstance(stage, Wrapped) else None
    what: Any
    if isinstance(stage, Partition):
        what, fix = stage, "choose a pipeline for each module: give every module the hook that it needs"
    elif isinstance(transform, LowRank):
        what, fix = transform, 'use a codec, as in compress("int4")'
    elif isinstance(transform, SkipNonfinite):
        what, fix = transform, "look at the gradients after backward, on all ranks, and put the hooks' states back"
    elif not (stage.children() or isinstance(stage, Reducer) or stage.leafwise):
        what, fix = stage, "do that after backward, as in torch.nn.utils.clip_grad_norm_"
    else:
        return
    raise PipelineError(
        f"as_fsdp_hook({pipeline!r}): {what!r} needs the parameters' names and shapes or all gradients together, and "
        f"gets a flat part of one module's gradients; {fix}"
    )


class FSDPHook:
    """See `as_fsdp_hook`."""

    def __init__(
        self,
        pipeline: Pipeline,
        group: dist.ProcessGroup | DeviceMesh,
        check: Literal["every_step", "first", "off"],
    ) -> None:
        self.pipeline = pipeline
        self.group, self.check = group, check
        Options.read({"group": group, "check": check})
        self.state: State = {}
        """The pipeline's state, of the leaf ``"shard"``; empty before the first call."""
        self._like: tuple[int, torch.dtype] | None = None
        self._pass = -1

    def __repr__(self) -> str:
        return f"as_fsdp_hook({self.pipeline!r})"

    def state_dict(self) -> State:
        """The pipeline's state, for a checkpoint: this rank's alone."""
        return self.state

    def load_state_dict(self, state: State) -> None:
        """Go on from `state`, also before the first call.

        Raises:
            PipelineError: it is not a state of this pipeline.
        """
        self.state = self.pipeline.checked_state(state) if state else {}

    def __call__(self, shard: Tensor) -> None:
        """What FSDP calls after a module's reduce-scatter."""
        try:
            with torch.no_grad():
                self._sync(shard)
        except Exception as error:
            gone = isinstance(error, PeerLostError) and error.gone
            if gone or torch._C._current_graph_task_id() == -1:
                raise
            # Raised here, it would stop this rank's part in the collectives that its backward pass still has before it,
            # with others that know nothing. FSDP's own callback at the end of backward was queued before this one.
            at_end_of_backward(_raising(error))

    def _sync(self, shard: Tensor) -> None:
        like, now = (shard.numel(), shard.dtype), torch._C._current_graph_task_id()
        strange = self._strange(like, now)
        self._pass = now
        tree = {"shard": shard}
        state = self.state or self.pipeline.init(tree)
        try:
            result, state = self.pipeline.update(tree, state, group=self.group, check=self.check, donate=not strange)
        except Exception as error:
            if strange and not isinstance(error, (TreeMismatchError, PeerLostError)):
                raise PipelineError(strange) from error
            raise
        if strange:  # only now, as replicas to which nothing is strange are told by the call
            raise PipelineError(strange)
        if result["shard"] is not shard:
            shard.copy_(result["shard"])
        self.state, self._like = state, like

    def _strange(self, like: tuple[int, torch.dtype], now: int) -> str:
        """Why the state cannot be that of what comes, if it cannot."""
        if not self.pipeline.stateful:
            return ""
        if self._like is not None and self._like != like:
            return (
                f"{self!r} was called with {like[0]} numbers of {like[1]} and before with {self._like[0]} of "
                f"{self._like[1]}, and its state is of those; make one hook for each module, and where parameters are "
                "not used in every step call module.set_reduce_scatter_unused_params(True)"
            )
        if now != -1 and now == self._pass:
            return (
                f"{self!r} was called twice in one backward pass, and its state is of one part of one module; make one "
                "hook for each module, and run a module once in each pass"
            )
        return ""


def _raising(error: Exception) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it
