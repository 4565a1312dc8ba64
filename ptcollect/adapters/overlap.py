"""`overlap`: gradients synchronised while backward goes on, without DDP."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ptcollect.adapters.loop import Parameters, named, sync_params
from ptcollect.arrivals import Arrivals
from ptcollect.compiling import eager
from ptcollect.engine import stream
from ptcollect.errors import PipelineError
from ptcollect.options import Options
from ptcollect.pipeline import Pipeline
from ptcollect.reducers.broadcast import broadcast
from ptcollect.replicas import SameEverywhere
from ptcollect.state import State
from ptcollect.tree import flatten
from ptcollect.value import refuse_tree


def overlap(
    pipeline: Pipeline,
    module_or_params: Parameters,
    state: State | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    check: Literal["every_step", "first", "off"] = "every_step",
    replicas: Literal["check", "broadcast", "trust"] = "check",
) -> Overlap:
    r"""Synchronise gradients while backward still computes others; what DDP does, with any pipeline and without DDP.

    .. math:: \text{grad}_p \leftarrow \text{pipeline}(\text{grad})_p

    When a bucket's gradients are there, the communication thread sends it. The results have the same bits as those of
    `sync_grads` after backward: a parameter that got a gradient on some ranks only counts as zeros on the others, and
    one that got none on any rank is left as it is. The call sets out with the parameters that were used in the step
    before; if others were used, the ranks find out at the end and synchronise once more, so where that changes at every
    step `sync_grads` is faster.

    Args:
        pipeline: what to do with the gradients. One that looks at the whole tree first, such as `clip_by_global_norm`
            in front, starts when backward has ended.
        module_or_params: as for `sync_grads`.
        state: the pipeline's state to go on from; None: a fresh one.
        group: whom to synchronise with; None: all ranks.
        check: see `RunOptions`.
        replicas: ``"check"``: parameters and buffers that differ between ranks at the start are an error;
            ``"broadcast"``: they become rank 0's; ``"trust"``: nothing is sent.

    Returns:
        A handle: `Overlap.wait` after each backward, or ``with handle: loss.backward()``.

    Raises:
        PipelineError: the pipeline reaches no consensus or works on parameters.
        TreeMismatchError: the replicas differ; the message names the first parameter that does.

    >>> import torch, ptcollect as pc, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> handle = pc.overlap(pc.chain(pc.bucketize(), pc.ring_reduce()), model)
    >>> with handle.no_sync():  # gradients add up here
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> handle.wait()
    >>> model.weight.grad
    tensor([[2., 2.]])
    >>> handle.remove()
    >>> dist.destroy_process_group()
    """
    refuse_tree("overlap", "pipeline", pipeline)
    if not isinstance(pipeline, Pipeline):
        raise PipelineError(f"overlap(pipeline, module): expected a pipeline, got {type(pipeline).__name__}")
    if pipeline.works_on == "parameters" or not pipeline.consensus:
        what = "it works on parameters" if pipeline.works_on == "parameters" else "ranks would end with different bits"
        raise PipelineError(
            f"overlap({pipeline!r}, ...): {what}, and replicas need the same gradients on all ranks; use a pipeline "
            "that reaches consensus, such as ring_reduce()"
        )
    Options.read({"group": group, "check": check})
    if replicas not in ("check", "broadcast", "trust"):
        raise ValueError(f'replicas: expected "check", "broadcast" or "trust", got {replicas!r}')
    if replicas != "trust":
        first = SameEverywhere() if replicas == "check" else broadcast()
        sync_params(first, _at_the_start(module_or_params), group=group)
    params = {name: p for name, p in named(module_or_params).items() if p.requires_grad}
    return Overlap(pipeline, params, state, {"group": group, "check": check, "missing": "zeros"})


def _at_the_start(module_or_params: Parameters) -> dict[str, Tensor]:
    """What replicas must have in common."""
    if isinstance(module_or_params, torch.nn.Module):
        return {**named(module_or_params), **dict(module_or_params.named_buffers())}
    return named(module_or_params)


class Overlap:
    """Synchronises the gradients of some parameters during each backward pass; made by `overlap`.

    >>> import torch, ptcollect as pc, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with pc.overlap(pc.ring_reduce(), model) as handle:
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model.weight.grad, handle.state
    (tensor([[1., 1.]]), {})
    >>> handle.remove()
    >>> dist.destroy_process_group()
    """

    def __init__(
        self, pipeline: Pipeline, params: dict[str, Tensor], state: State | None, options: dict[str, Any]
    ) -> None:
        leaves, _ = flatten(params)
        self.pipeline = pipeline
        self.state: State = pipeline.init(leaves) if state is None else pipeline.checked_state(state)
        """The pipeline's state after the last `wait`; for a checkpoint, and to go on from: ``overlap(..., state)``."""
        self._params = {name: params[name] for name in leaves}
        self._like = {name: leaf.detach() for name, leaf in leaves.items()}
        self._expected = frozenset(leaves)
        self._options = options
        self._paused = False
        self._pass: Arrivals | None = None
        self._job: Future[Any] | None = None
        self._lock = threading.Lock()  # autograd has a thread per device
        self._hooks = [
            p.register_post_accumulate_grad_hook(_hook(name, weakref.ref(self)))  # type: ignore[no-untyped-call]
            for name, p in self._params.items()
        ]

    @eager
    def wait(self) -> None:
        """Finish the step: then ``p.grad`` is a tensor with what the pipeline made of it; once after each backward.

        Raises:
            PtcollectError: as for `Pipeline.update`; gradients and state are what they were.
        """
        self._refuse_removed()
        arrivals = self._begun()
        job, self._pass, self._job = self._job, None, None
        assert job is not None  # noqa: S101  (begun)
        # Gradients that earlier backward passes left count too, as they do for sync_grads.
        left = {n: p.grad for n, p in self._params.items() if p.grad is not None and n not in arrivals.delivered}
        arrivals.deliver(left)
        arrivals.finish()
        grads, self.state = job.result()
        self._expected = arrivals.used
        with torch.no_grad():
            for name, grad in grads.items():
                param = self._params[name]
                if grad is not None:
                    param.grad = grad

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward only adds to ``p.grad``; the next backward outside synchronises the sum, once."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._abandon("handle.remove() was called before handle.wait()")

    def __enter__(self) -> Overlap:
        self._refuse_removed()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.wait()
        else:
            self._abandon(f"{type(error).__name__}: {error}")

    @eager
    def _arrived(self, name: str, grad: Tensor | None) -> None:
        if self._paused or grad is None:
            return
        if self._pass is not None and self._pass.broke_off:
            self._abandon("the backward pass before this one broke off")
        arrivals = self._begun()
        if name in arrivals.delivered:
            raise PipelineError(
                f"overlap: the gradient of {name!r} was added to while it is being synchronised; call handle.wait() "
                "after each backward, or run all but the last in handle.no_sync()"
            )
        arrivals.watch()
        arrivals.deliver({name: grad})

    def _begun(self) -> Arrivals:
        """The pass under way, or a new one."""
        if self._pass is None:
            self._pass = Arrivals(self._like, self._expected, certain=False)
            self._job = stream(self.pipeline, self._pass, self.state, self._options)
        return self._pass

    def _abandon(self, why: str) -> None:
        if self._pass is not None and self._job is not None:
            self._pass.abort(PipelineError(f"overlap: {why}"))
            wait([self._job], timeout=1)  # so that the peers hear of it before this thread does anything else
            self._pass = self._job = None

    def _refuse_removed(self) -> None:
        if not self._hooks:
            raise PipelineError("overlap: the handle was removed; make a new one with overlap(pipeline, module, state)")


def _hook(name: str, overlapping: weakref.ref[Overlap]) -> Callable[[Tensor], None]:
    # A parameter that held its handle, which holds the parameter, would never be freed.
    def gradient_is_there(param: Tensor) -> None:
        handle = overlapping()
        if handle is not None:
            with handle._lock:
                handle._arrived(name, param.grad)

    return gradient_is_there
