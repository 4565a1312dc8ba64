"""`as_ddp_hook`: a pipeline as the communication hook of DistributedDataParallel.

DDP's buckets only deliver gradients. Given the module, the hook starts the pipeline once per backward pass, on the tree
of all parameters by name, when the first bucket comes; the communication thread works while backward goes on, waits for
each leaf when it needs it, and in the end writes the results into DDP's buckets and completes their futures. Without
the module each bucket is a tree of its own, which only suits pipelines that treat every leaf alone.
"""

# No `from __future__ import annotations` here: DDP reads the hook's annotations and refuses text.

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future as Job
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from ptcollect.adapters.loop import named
from ptcollect.arrivals import Arrivals, at_end_of_backward
from ptcollect.chain import Chain
from ptcollect.checkpoint import merged, quiet
from ptcollect.engine import stream
from ptcollect.errors import PipelineError
from ptcollect.options import Options
from ptcollect.pipeline import Pipeline, Wrapped
from ptcollect.reducers.reducer import Reducer
from ptcollect.state import State
from ptcollect.transforms.bucketize import Bucketize
from ptcollect.tree import flatten
from ptcollect.value import refuse_tree


def as_ddp_hook(
    pipeline: Pipeline,
    module: torch.nn.Module | None = None,
    *,
    group: "dist.ProcessGroup | DeviceMesh | None" = None,
    check: Literal["every_step", "first", "off"] = "every_step",
) -> "DDPHook":
    r"""`pipeline` as a communication hook: ``ddp.register_comm_hook(None, pc.as_ddp_hook(pipeline, module))``.

    .. math:: \text{grad} \leftarrow \text{pipeline}(\text{grad})

    The hook gets each rank's raw gradients and leaves exactly what the pipeline returns: with `module`, the same bits
    as `sync_grads` without DDP, across the rebuild of its buckets. One exception: for a parameter that no rank used DDP
    delivers zeros where `sync_grads` has none, so `ring_reduce` in buckets may round the others differently.

    Give it the DDP module itself where DDP does not manage every parameter of `module`, or where
    ``skip_all_reduce_unused_params`` is set: only that knows. A rank that has left ``join()`` sends zeros, and its
    residuals stay at home.

    Args:
        pipeline: must end with the same bits on all ranks.
        module: the DDP module, or the module inside it: gives parameters their names. Needed by pipelines that keep
            state or look at the whole tree; without it the pipeline runs on each of DDP's buckets alone.
        group: whom to synchronise with; by default DDP's group if `module` is the DDP module, and else all ranks.
        check: see `RunOptions`. At every step all ranks wait for the last to begin its backward pass; ``"first"`` saves
            that, and a mismatch later on may then abort the process.

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
        certain = not module.skip_all_reduce_unused_params
        return DDPHook(pipeline, _managed(module.module, module.parameters_to_ignore), group, check, certain=certain)
    if module is None:
        return DDPHook(pipeline, None, group, check)
    return DDPHook(pipeline, _managed(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ())), group, check)


def _managed(module: torch.nn.Module, ignored: "Collection[str]") -> dict[str, Tensor]:
    """The parameters whose gradients DDP delivers."""
    return {name: p for name, p in named(module).items() if p.requires_grad and name not in ignored}


def _treats_leaves_alone(pipeline: Pipeline) -> bool:
    for stage in pipeline.walk():
        if isinstance(stage, Wrapped):
            if not (stage.transform.works_in_buckets or isinstance(stage.transform, Bucketize)):
                return False
        elif not (isinstance(stage, Reducer) or stage.children() or stage.leafwise):
            return False
    return True


class DDPHook:
    """See `as_ddp_hook`."""

    def __init__(
        self,
        pipeline: Pipeline,
        params: "Mapping[str, Tensor] | None",
        group: "dist.ProcessGroup | DeviceMesh | None",
        check: str,
        *,
        certain: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.options = {"group": group, "check": check, "missing": "zeros"}
        Options.read(self.options)
        self.__name__ = "as_ddp_hook"  # DDP logs the hook by name
        self.__qualname__ = repr(self)
        self.state: State = {}
        """The pipeline's state, by parameter name; read it after a step, replace it by `load_state_dict`."""
        self._certain = certain or params is None
        # Without a map the parameters in a bucket need not be told apart.
        self._any_flat = all(isinstance(stage, (Reducer, Chain, Wrapped)) for stage in pipeline.walk())
        self._names: dict[Tensor, str] | None = None
        self._like: dict[str, Tensor] = {}
        if params is not None:
            leaves, _ = flatten(dict(params))
            self._names = {params[name]: name for name in leaves}
            self._like = {name: leaf.detach() for name, leaf in leaves.items()}
            self.state = pipeline.init(self._like)
        self._expected = frozenset(self._like)
        self._pass: _Pass | None = None

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
        failure: Exception | None = None
        gradients: dict[str, Tensor] = {}
        try:
            gradients = self._gradients(bucket)
        except Exception as error:
            failure = error
        now = self._pass_of(bucket, gradients)
        future = now.take(bucket.buffer(), gradients, failure)
        if self._names is None or now.arrivals.complete:
            self._pass = None  # whatever comes next belongs to another pass
        if torch._C._current_graph_task_id() == -1:  # in join(): there is no backward that could raise
            if self._pass is None:
                now.raise_failure(wait=True)
        else:
            # A callback queued now runs before DDP's own, which waits for the futures; one queued by it runs after.
            at_end_of_backward(lambda: self._backward_ends(now))
        return future

    def _backward_ends(self, now: "_Pass") -> None:
        """Before DDP waits for the futures, or at the end of a part of backward that was run again."""
        if torch._C._current_autograd_node() is None:
            now.arrivals.finish()
        at_end_of_backward(lambda: self._ddp_is_done(now))

    def _ddp_is_done(self, now: "_Pass") -> None:
        if torch._C._current_autograd_node() is not None and not now.arrivals.complete:
            return  # backward goes on outside
        if now.ended and self._pass is now:
            self._pass = None
        now.raise_failure()

    def _pass_of(self, bucket: GradBucket, gradients: dict[str, Tensor]) -> "_Pass":
        """The pass under way, or a new one."""
        now = self._pass
        if now is not None and (now.arrivals.broke_off or now.arrivals.delivered & gradients.keys()):
            now.arrivals.abort(PipelineError("the backward pass before this one broke off"))
            now = None
        if now is None:
            like = self._like if self._names is not None else gradients
            expected = self._expected if self._names is not None else gradients.keys()
            now = self._pass = _Pass(self, Arrivals(like, expected, certain=self._certain))
        return now

    def _gradients(self, bucket: GradBucket) -> dict[str, Tensor]:
        """The gradients that `bucket` brings, by name."""
        if bucket.buffer().layout is not torch.strided:
            leaf = (self._names or {}).get(bucket.parameters()[0], "a parameter")
            raise TypeError(
                f"{self!r}: the gradient of {leaf} is sparse, and a pipeline averages dense ones; "
                "use Embedding(sparse=False)"
            )
        if self._names is None and self._any_flat and not bucket.parameters()[0].is_complex():
            return {f"bucket{bucket.index()}": bucket.buffer().detach()}
        gradients = {}
        for i, (param, gradient) in enumerate(zip(bucket.parameters(), _views(bucket), strict=True)):
            name = f"{bucket.index()}.{i}" if self._names is None else self._names.get(param)
            if name is None:
                raise PipelineError(
                    f"{self!r}: DDP delivered a parameter of shape {tuple(param.shape)} that the module it was made "
                    "for does not have; pass the module inside this DDP"
                )
            if self._names is not None and gradient.dtype != param.dtype:
                raise PipelineError(
                    f"{self!r}: DDP delivers {gradient.dtype} for parameter {name!r} of {param.dtype} (mixed_precision)"
                    f'; leave that to the pipeline: compress("bf16") or compress("fp16")'
                )
            gradients[name] = gradient
        return gradients


class _Pass:
    """One backward pass: its buckets, and the call that works on them."""

    def __init__(self, hook: DDPHook, arrivals: Arrivals) -> None:
        self.hook = hook
        self.arrivals = arrivals
        self.ended = False
        self._failure: Exception | None = None
        self._waiting: list[tuple[Tensor, Future[Tensor]]] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._started = False
        self._joined = torch._C._current_graph_task_id() == -1

    def take(
        self, buffer: Tensor, gradients: dict[str, Tensor], failure: "Exception | None"
    ) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket's gradients over; the future is complete when the results are in `buffer`."""
        future: Future[Tensor] = Future()
        with self._lock:
            if self.ended:
                future.set_result(buffer)
            else:
                self._waiting.append((buffer, future))
        if failure is not None:
            self.arrivals.abort(failure)
        self.arrivals.watch()
        self.arrivals.deliver(gradients)
        if not self._started:
            self._started = True
            state = quiet(self.hook.state) if self._joined else self.hook.state
            options = {**self.hook.options, "donate": self.arrivals.certain}
            stream(self.hook.pipeline, self.arrivals, state, options).add_done_callback(self._end)
        return future

    def _end(self, job: "Job[Any]") -> None:
        """Write the results and complete the futures, also after an error; on the communication thread."""
        try:
            result, state = job.result()
            self._write(result)
            self.hook.state = merged(self.hook.state, state) if self._joined else state
            if self.hook._names is not None:
                self.hook._expected = self.arrivals.used
        except Exception as error:
            self._failure = self.arrivals.failure or error
        with self._lock:
            self.ended = True
        for buffer, future in self._waiting:
            future.set_result(buffer)
        self._waiting.clear()
        self._done.set()

    @torch.no_grad()
    def _write(self, result: dict[str, Tensor]) -> None:
        for name, gradient in self.arrivals.exactly(self.arrivals.delivered).items():
            value = result.get(name)
            self._check(name, gradient, value)
            if value is not gradient and value is not None:
                gradient.copy_(value)

    def _check(self, name: str, gradient: Tensor, result: "Tensor | None") -> None:
        """A wrong result in a future fails far away, so it is an error here."""
        if result is None or (result.shape, result.dtype) != (gradient.shape, gradient.dtype):
            got = "nothing" if result is None else f"{tuple(result.shape)} {result.dtype}"
            raise PipelineError(
                f"{self.hook!r}: leaf {name!r} went in as {tuple(gradient.shape)} {gradient.dtype} and came out as "
                f"{got}; every stage must return what it was given"
            )

    def raise_failure(self, *, wait: bool = False) -> None:
        """Raise what went wrong, once; earlier than after DDP's own end it would break DDP's next step."""
        if wait:
            self._done.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


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
