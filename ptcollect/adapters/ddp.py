"""`as_ddp_hook`: a pipeline as the communication hook of DistributedDataParallel.

DDP's buckets only deliver gradients. Given the module, the hook collects them until all have arrived, runs the pipeline
once on the whole tree by parameter name, writes the results into DDP's buckets and completes their futures. Without it
each bucket is a tree of its own, which only suits pipelines that treat every leaf alone.
"""

# No `from __future__ import annotations` here: DDP reads the hook's annotations and refuses text.

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from ptcollect.adapters.loop import named
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, Wrapped
from ptcollect.reducers.reducer import Reducer
from ptcollect.state import State
from ptcollect.transforms.bucketize import Bucketize
from ptcollect.value import refuse_tree


def as_ddp_hook(
    pipeline: Pipeline,
    module: torch.nn.Module | None = None,
    *,
    group: "dist.ProcessGroup | DeviceMesh | None" = None,
) -> "DDPHook":
    r"""`pipeline` as a communication hook: ``ddp.register_comm_hook(None, pc.as_ddp_hook(pipeline, module))``.

    .. math:: \text{grad} \leftarrow \text{pipeline}(\text{grad})

    The hook gets each rank's raw gradients and leaves exactly what the pipeline returns: with `module`, the same bits
    as `sync_grads` without DDP, across the rebuild of its buckets. One exception: for a parameter that no rank used DDP
    delivers zeros where `sync_grads` has none, so `ring_reduce` in buckets may round the others differently.

    Warning:
        Two uses are wrong in this version and are not detected. Reentrant activation checkpointing
        (``use_reentrant=True``) makes the hook run on parts of the tree and **gives wrong gradients without an error**
        where the pipeline keeps state or looks at the whole tree; use ``use_reentrant=False``. ``static_graph=True``
        with trainable parameters in `module` that DDP does not manage **hangs in the first backward, beyond the
        group's timeout**. After the errors for a sparse gradient or for another module's parameters, make a new DDP.

    Args:
        pipeline: must end with the same bits on all ranks.
        module: the module inside DDP, or the DDP module itself: gives parameters their names. Needed by pipelines that
            keep state or look at the whole tree; without it the pipeline runs on each of DDP's buckets alone.
        group: whom to synchronise with; by default DDP's group if `module` is the DDP module, and else all ranks.

    Returns:
        A callable for `register_comm_hook`, with ``.state``, ``.state_dict()`` and ``.load_state_dict()``.

    Raises:
        PipelineError: the pipeline reaches no consensus, works on parameters, or needs `module`. While running, errors
            of the pipeline come out of ``backward()`` with their type, and the next step can be taken.

    >>> import torch, ptcollect as pc
    >>> model = torch.nn.Linear(2, 1)
    >>> hook = pc.as_ddp_hook(pc.chain(pc.bucketize(), pc.ring_reduce()), model)
    >>> hook
    as_ddp_hook(chain(bucketize(), ring_reduce()))
    >>> pc.as_ddp_hook(pc.gather_avg())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ptcollect.errors.PipelineError: as_ddp_hook(gather_avg()): ranks would end with different gradients...
    """
    refuse_tree("as_ddp_hook", "pipeline", pipeline)
    if not isinstance(pipeline, Pipeline):
        raise PipelineError(
            f"as_ddp_hook(pipeline, module): expected a pipeline, got {type(pipeline).__name__}: {pipeline!r}"
        )
    if not pipeline.consensus:
        raise PipelineError(
            f"as_ddp_hook({pipeline!r}): ranks would end with different gradients, and DDP needs the same on all; "
            "use a pipeline that reaches consensus, such as ring_reduce()"
        )
    if pipeline.works_on == "parameters":
        raise PipelineError(
            f"as_ddp_hook({pipeline!r}): it works on parameters, and a hook gets gradients; use sync_params"
        )
    if module is None and (pipeline.stateful or not _treats_leaves_alone(pipeline)):
        raise PipelineError(
            f"as_ddp_hook({pipeline!r}): it keeps state or looks at the whole tree, so it needs the names of all "
            f"parameters; write as_ddp_hook(pipeline, module)"
        )
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        group = module.process_group if group is None else group
        module = module.module
    return DDPHook(pipeline, module, group)


def _treats_leaves_alone(pipeline: Pipeline) -> bool:
    for stage in pipeline.walk():
        if isinstance(stage, Wrapped):
            if not (stage.transform.works_in_buckets or isinstance(stage.transform, Bucketize)):
                return False
        elif not (isinstance(stage, Reducer) or stage.children() or stage.leafwise):
            return False
    return True


@dataclass
class _Delivery:
    """One of DDP's buckets, waiting for its result."""

    buffer: Tensor
    gradients: dict[str, Tensor]
    future: "Future[Tensor]"


class DDPHook:
    """See `as_ddp_hook`."""

    def __init__(
        self, pipeline: Pipeline, module: torch.nn.Module | None, group: "dist.ProcessGroup | DeviceMesh | None"
    ) -> None:
        self.pipeline = pipeline
        self.group = group
        self.__name__ = "as_ddp_hook"  # DDP logs the hook by name
        self.__qualname__ = repr(self)
        self._names: dict[Tensor, str] | None = None
        self.state: State = {}
        """The pipeline's state, by parameter name; read it after a step, replace it by `load_state_dict`."""
        if module is not None:
            ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            params = {name: p for name, p in named(module).items() if p.requires_grad and name not in ignored}
            self._names = {p: name for name, p in params.items()}
            self.state = pipeline.init(params)
        self._deliveries: list[_Delivery] = []
        self._graph_task = -1

    def __repr__(self) -> str:
        return f"as_ddp_hook({self.pipeline!r})"

    def state_dict(self) -> State:
        """The pipeline's state, for a checkpoint."""
        return self.state

    def load_state_dict(self, state: State) -> None:
        """Go on from `state`.

        Raises:
            PipelineError: it is not a state of this pipeline.
        """
        self.state = self.pipeline.checked_state(state)

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls for each bucket, in the order of its buckets."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            self._deliveries.clear()  # a backward pass that broke off left them
            self._graph_task = graph_task
        if bucket.buffer().layout is not torch.strided:
            leaf = (self._names or {}).get(bucket.parameters()[0], "a parameter")
            raise TypeError(
                f"{self!r}: the gradient of {leaf} is sparse, and a pipeline averages dense ones; "
                "use Embedding(sparse=False)"
            )
        delivery = _Delivery(bucket.buffer(), self._gradients(bucket), Future())
        self._deliveries.append(delivery)
        if self._names is None or self._all_arrived():
            self._run()
        elif len(self._deliveries) == 1 and graph_task != -1:
            # Parameters that no rank used may never arrive (skip_all_reduce_unused_params); backward's end is the last
            # call.
            _at_end_of_backward(self._run)
        return delivery.future

    def _check(self, name: str, gradient: Tensor, result: Tensor | None) -> None:
        """A wrong result in a future fails far away, so it is an error here."""
        if result is None or (result.shape, result.dtype) != (gradient.shape, gradient.dtype):
            got = "nothing" if result is None else f"{tuple(result.shape)} {result.dtype}"
            raise PipelineError(
                f"{self!r}: leaf {name!r} went in as {tuple(gradient.shape)} {gradient.dtype} and came out as {got}; "
                "every stage must return what it was given"
            )

    def _gradients(self, bucket: GradBucket) -> dict[str, Tensor]:
        gradients = {}
        for i, (param, gradient) in enumerate(zip(bucket.parameters(), _views(bucket), strict=True)):
            name = f"{bucket.index()}.{i}" if self._names is None else self._names.get(param)
            if name is None:
                raise PipelineError(
                    f"{self!r}: DDP delivered a parameter of shape {tuple(param.shape)} that the module it was made "
                    "for does not have; pass the module inside this DDP"
                )
            gradients[name] = gradient
        return gradients

    def _all_arrived(self) -> bool:
        return sum(len(delivery.gradients) for delivery in self._deliveries) == len(self._names or ())

    def _run(self) -> None:
        """Run the pipeline on what has arrived, and complete the futures, also after an error."""
        deliveries, self._deliveries = self._deliveries, []
        if not deliveries:
            return
        arrived = {name: gradient for delivery in deliveries for name, gradient in delivery.gradients.items()}
        tree = dict.fromkeys(self._names.values()) | arrived if self._names is not None else arrived
        try:
            result, self.state = self.pipeline.update(tree, self.state, group=self.group, missing="zeros")
            for name, gradient in arrived.items():
                self._check(name, gradient, result.get(name))
                gradient.copy_(result[name])
        except Exception as error:
            _raise_after_backward(error)
        finally:
            for delivery in deliveries:
                delivery.future.set_result(delivery.buffer)


def _views(bucket: GradBucket) -> list[Tensor]:
    """Each parameter's gradient, as a view of the bucket's buffer.

    Not by ``bucket.gradients()``: torch 2.13 cuts it as if every parameter were real and row-major, and is wrong for
    complex ones (the buffer holds real numbers, twice as many) and for channels_last.
    """
    params = bucket.parameters()
    numbers = bucket.buffer().detach()
    if params[0].is_complex():
        numbers = torch.view_as_complex(numbers.view(-1, 2))
    rows = torch.split(numbers, [param.numel() for param in params])
    return [
        row.as_strided(p.shape, _bucket_strides(p), row.storage_offset()) for row, p in zip(rows, params, strict=True)
    ]


def _bucket_strides(param: Tensor) -> tuple[int, ...]:
    """Strides of a gradient in DDP's bucket: the parameter's own if it is dense, row-major otherwise."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    return param.stride() if extent == param.numel() else torch.empty(param.shape, device="meta").stride()


def _at_end_of_backward(function: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _raise_after_backward(error: Exception) -> None:
    """Raise `error` out of ``backward()`` after DDP has finished its own step; earlier it breaks the next one."""
    if torch._C._current_graph_task_id() == -1:
        raise error

    def fail() -> None:
        raise error

    # A callback queued now runs before DDP's own; one queued by a callback runs after it.
    _at_end_of_backward(lambda: _at_end_of_backward(fail))
