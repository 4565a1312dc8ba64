"""Outer optimisers: what becomes of the parameters of a round, given the mean of what all ranks moved by.

Any pair of functions in the manner of optax and torchopt will do: ``init(params) -> state`` and
``update(gradients, state, params) -> (updates, state)``, pure, where updates are added to the parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ptcollect.errors import PipelineError
from ptcollect.state import State
from ptcollect.tree import Leaves
from ptcollect.value import Value


def sgd(lr: float = 1.0) -> Sgd:
    r"""Plain gradient descent as an outer optimiser; with ``lr=1.0`` the parameters become their mean over the ranks.

    .. math:: \theta \leftarrow \theta - \eta \Delta

    Args:
        lr: the outer learning rate, a factor without unit.

    Returns:
        A value for ``diloco(every, outer=...)``.

    Raises:
        ValueError: `lr` is not a positive number.

    >>> import ptcollect as pc
    >>> pc.diloco(8, outer=pc.sgd(1.0))
    diloco(8, outer=sgd())
    """
    return Sgd(_positive("sgd(lr)", lr))


def nesterov(lr: float = 0.7, *, momentum: float = 0.9) -> Nesterov:
    r"""Nesterov's momentum as an outer optimiser, DiLoCo's choice.

    .. math:: m \leftarrow \mu m + \Delta, \quad \theta \leftarrow \theta - \eta (\Delta + \mu m)

    Args:
        lr: the outer learning rate.
        momentum: from 0 to below 1.

    Returns:
        A value for ``diloco(every, outer=...)``.

    Raises:
        ValueError: a number out of its range.

    Source: Douillard et al. 2023, DiLoCo: distributed low-communication training of language models, section 2.

    >>> import torch, ptcollect as pc
    >>> sync, params = pc.chain(pc.diloco(1), pc.ring_reduce()), torch.zeros(1)
    >>> state = sync.init(params)
    >>> run = pc.simulate(sync, [params - 1.0] * 2, [state] * 2)  # both moved by -1: a pseudo-gradient of 1
    >>> run.trees[0]
    tensor([-1.3300])
    """
    if isinstance(momentum, bool) or not 0 <= momentum < 1:
        raise ValueError(f"nesterov(momentum=...): expected a number from 0 to below 1, got {momentum!r}")
    return Nesterov(_positive("nesterov(lr)", lr), momentum)


@dataclass(frozen=True, repr=False)
class Sgd(Value):
    """See `sgd`."""

    name = "sgd"

    lr: float = 1.0

    def init(self, params: Leaves) -> State:
        """Nothing to keep."""
        return {}

    def update(self, gradients: Leaves, state: State, params: Leaves) -> tuple[Leaves, State]:
        """What to add to the parameters."""
        return {path: gradient * -self.lr for path, gradient in gradients.items()}, state


@dataclass(frozen=True, repr=False)
class Nesterov(Value):
    """See `nesterov`."""

    name = "nesterov"

    lr: float = 0.7
    momentum: float = 0.9

    def init(self, params: Leaves) -> State:
        """Momentum of zero."""
        return {"momentum": {path: torch.zeros_like(leaf) for path, leaf in params.items()}}

    def update(self, gradients: Leaves, state: State, params: Leaves) -> tuple[Leaves, State]:
        """What to add to the parameters, and the momentum after it."""
        before = state["momentum"]
        momentum = {path: before[path] * self.momentum + gradient for path, gradient in gradients.items()}
        updates = {path: -self.lr * (gradients[path] + self.momentum * m) for path, m in momentum.items()}
        return updates, {"momentum": momentum}


DEFAULT = Nesterov()
"""DiLoCo's choice."""


def check_outer(outer: Any) -> None:
    """Raise for anything that is no (init, update) pair.

    Raises:
        PipelineError: `outer` is none; the message shows what would be.
    """
    if not all(callable(function) for function in _pair(outer)):
        raise PipelineError(
            f"outer: expected an optimiser with init(params) and update(gradients, state, params), such as "
            f"nesterov(lr=0.7, momentum=0.9) or torchopt.sgd(lr=0.7), got {outer!r}"
        )


def begin_outer(outer: Any, params: Leaves) -> State:
    """The first state of `outer`, as plain data."""
    return _plain(_pair(outer)[0](dict(params)))


def step_outer(outer: Any, gradients: Leaves, state: State, params: Leaves) -> tuple[Leaves, State]:
    """The parameters after one step of `outer`, and its state; nothing that goes in is changed."""
    init, update = _pair(outer)
    gradients = {path: gradient.clone() for path, gradient in gradients.items()}  # somebody's optimiser may write there
    options = {"inplace": False} if "inplace" in inspect.signature(update).parameters else {}
    updates, after = update(gradients, _restored(state, init(dict(params))), params=dict(params), **options)
    return {path: params[path] + updates[path].to(params[path].dtype) for path in gradients}, _plain(after)


def _pair(outer: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if isinstance(outer, tuple) and len(outer) == 2 and not hasattr(outer, "update"):
        return outer
    return getattr(outer, "init", None), getattr(outer, "update", None)  # type: ignore[return-value]


def _plain(state: Any) -> State:
    """An optimiser's state as data: as it is if it is made of dicts, otherwise its leaves by number."""
    if _is_data(state):
        return dict(state)
    leaves = optree.tree_leaves(state, namespace="torchopt")
    odd = next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, int, float, bool))), None)
    if odd is not None:
        raise PipelineError(
            f"outer: the optimiser keeps a {type(odd).__name__} in its state, which cannot be saved as data; expected "
            "tensors and numbers"
        )
    return {str(number): leaf for number, leaf in enumerate(leaves)}


def _restored(state: State, like: Any) -> Any:
    """The state that `_plain` was given; `like` has its structure."""
    if _is_data(like):
        return state
    structure = optree.tree_structure(like, namespace="torchopt")
    return optree.tree_unflatten(structure, [state[str(number)] for number in range(structure.num_leaves)])


def _is_data(state: Any) -> bool:
    if isinstance(state, dict):
        return all(isinstance(key, str) and _is_data(value) for key, value in state.items())
    return isinstance(state, (Tensor, int, float, bool))


def _positive(what: str, number: Any) -> float:
    if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 < number < float("inf"):
        raise ValueError(f"{what}: expected a positive number, got {number!r}")
    return number
