"""Pipelines in a loop of one's own: `sync_grads` after ``backward()``, `sync_params` whenever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Unpack

from ptcollect.compiling import eager
from ptcollect.dtypes import overwrite
from ptcollect.errors import PipelineError
from ptcollect.options import RunOptions
from ptcollect.pipeline import Pipeline
from ptcollect.state import State

Parameters: TypeAlias = "torch.nn.Module | Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]"
"""A module, a dict by name, parameters, or what ``named_parameters()`` gives."""


@eager
def sync_grads(
    pipeline: Pipeline, module_or_params: Parameters, state: State | None = None, **options: Unpack[RunOptions]
) -> State:
    r"""Synchronise ``p.grad`` of every parameter with the other ranks, in place; call it between backward and step.

    .. math:: \text{grad}_p \leftarrow \text{pipeline}(\text{grad})_p

    A parameter that has a gradient on some ranks only counts as zeros on the others, and gets the mean on all, as in
    DDP; one that has none on any rank keeps ``None``. After an error gradients are what they were (unless
    ``donate=True``).

    Args:
        pipeline: what to do with the gradients.
        module_or_params: a module, a dict by name, an iterable of parameters (named ``"0"``, ``"1"`` ... in state and
            messages), or of (name, parameter) pairs. Those that do not require a gradient are left out.
        state: what the previous call returned; None before the first step.
        **options: see `RunOptions`; `missing` is ``"zeros"`` unless given.

    Returns:
        The state for the next call; ``{}`` where the pipeline is stateless.

    Raises:
        PipelineError: `pipeline` works on parameters, not on gradients.
        PtcollectError: as for `Pipeline.update`.

    >>> import torch, ptcollect as pc
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> model(torch.ones(3, 1)).sum().backward()
    >>> state = pc.sync_grads(pc.clip_by_value(2.0), model)  # with a reducer in it: on every rank
    >>> model.weight.grad
    tensor([[2.]])
    """
    if pipeline.works_on == "parameters":
        raise PipelineError(f"{pipeline!r} works on parameters, not on gradients; use sync_params(pipeline, module)")
    params = {name: p for name, p in named(module_or_params).items() if p.requires_grad}
    if state is None and pipeline.stateful:
        state = pipeline.init(params)
    options.setdefault("missing", "zeros")
    grads, state = pipeline.update({name: p.grad for name, p in params.items()}, state, **options)
    with torch.no_grad():
        for name, grad in grads.items():
            param = params[name]
            if grad is None or grad is param.grad:
                continue
            param.grad = grad if param.grad is None else overwrite(param.grad, grad)
    return state


@eager
def sync_params(
    pipeline: Pipeline, module_or_params: Parameters, state: State | None = None, **options: Unpack[RunOptions]
) -> State:
    r"""Synchronise parameters themselves with the other ranks, in place: broadcast at the start, average at the end.

    .. math:: p \leftarrow \text{pipeline}(p)

    Args:
        pipeline: what to do with the parameters, such as ``broadcast(root=0)``.
        module_or_params: as for `sync_grads`, those that require no gradient included; ``module.state_dict()`` takes
            the buffers along.
        state: what the previous call returned; None before the first.
        **options: see `RunOptions`.

    Returns:
        The state for the next call; ``{}`` where the pipeline is stateless.

    Raises:
        PipelineError: `pipeline` works on gradients, not on parameters.
        PtcollectError: as for `Pipeline.update`.

    >>> import torch, ptcollect as pc
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = pc.sync_params(pc.clip_by_value(1e-3), model)  # with a reducer in it: on every rank
    >>> bool(model.weight.abs() <= 1e-3)
    True
    """
    if pipeline.works_on == "gradients":
        raise PipelineError(f"{pipeline!r} works on gradients, not on parameters; use sync_grads(pipeline, module)")
    params = {name: p.detach() for name, p in named(module_or_params).items()}
    if state is None and pipeline.stateful:
        state = pipeline.init(params)
    if pipeline.quiet((state or {}).get("step", 0)):
        options["donate"] = True  # nothing is sent, and most often nothing is changed: no copies to and fro
    values, state = pipeline.update(params, state, **options)
    for name, value in values.items():
        if value is not params[name]:
            params[name].copy_(value)
    return state


def named(module_or_params: Parameters) -> dict[str, Tensor]:
    """Parameters by name.

    Raises:
        TypeError: it is none of the things that `Parameters` lists.
    """
    if isinstance(module_or_params, torch.nn.Module):
        return dict(module_or_params.named_parameters())
    if isinstance(module_or_params, Mapping):
        return dict(module_or_params)
    if isinstance(module_or_params, Tensor) or not isinstance(module_or_params, Iterable):
        raise TypeError(
            "expected a module, a dict of parameters, module.parameters() or module.named_parameters(), got "
            f"{type(module_or_params).__name__}"
        )
    pairs: list[Any] = list(module_or_params)
    return dict(pair if isinstance(pair, tuple) else (str(i), pair) for i, pair in enumerate(pairs))
