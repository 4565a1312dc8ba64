"""State across checkpoints and world sizes: which entries are one rank's own, and what becomes of them.

Residuals, the estimates that error feedback keeps around gossip, and push-sum's numerators and weight differ between
ranks; all other entries are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from ptcollect.state import State
from ptcollect.tree import sorted_paths
from ptcollect.value import whole_number

OWN = ("residual", "estimate", "pull", "numerator", "own_anchor", "own_outer", "own_arrived")
"""Keys of entries by path that differ between ranks."""


def rank_local(state: State, *, rank: int | None = None) -> State:
    """`state` with this rank's own entries under names of its own, for `torch.distributed.checkpoint`.

    That library takes a tensor of one name for the same on all ranks and silently keeps rank 0's copy. Here the
    residual of ``fc.weight`` becomes ``rank3/fc.weight``, so that every rank's is kept. For loading, pass the same on a
    fresh state to ``load`` and give the result to `from_rank_local`.

    Args:
        state: a pipeline's state; left unchanged.
        rank: this rank's number; None: that of torch.distributed.

    Returns:
        A state for saving and loading, not for running.

    >>> import torch, ptcollect as pc
    >>> state = {"step": 2, "error_feedback": {"residual": {"w": torch.zeros(1)}}}
    >>> pc.rank_local(state, rank=3)
    {'step': 2, 'error_feedback': {'residual': {'rank3/w': tensor([0.])}}}
    """
    prefix = f"rank{_rank(rank)}/"
    return _own_entries(state, OWN, lambda own: {prefix + path: value for path, value in own.items()})


def from_rank_local(state: State, *, rank: int | None = None) -> State:
    """Undo `rank_local`: the state to go on with.

    Args:
        state: what `rank_local` gave, perhaps filled by a loaded checkpoint; left unchanged.
        rank: this rank's number; None: that of torch.distributed.

    Returns:
        A pipeline's state.

    Raises:
        ValueError: an entry is another rank's; for another world size load all states and `reshard` them.

    >>> import torch, ptcollect as pc
    >>> pc.from_rank_local({"error_feedback": {"residual": {"rank3/w": torch.zeros(1)}}}, rank=3)
    {'error_feedback': {'residual': {'w': tensor([0.])}}}
    """
    prefix = f"rank{_rank(rank)}/"

    def stripped(own: dict[str, Any]) -> dict[str, Any]:
        strange = [path for path in own if not path.startswith(prefix)]
        if strange:
            raise ValueError(
                f"from_rank_local: expected entries of {prefix}*, got {strange[0]!r}; see rank_local and reshard"
            )
        return {path.removeprefix(prefix): value for path, value in own.items()}

    return _own_entries(state, OWN, stripped)


def reshard(states: Sequence[State], ranks: int) -> list[State]:
    r"""The states of all ranks, made into states for another number of ranks; the sum of residuals stays what it was.

    .. math:: e'_q = \sum_{r \equiv q \, (\text{mod } n')} e_r

    Args:
        states: every rank's state, in rank order; left unchanged.
        ranks: the new number of ranks, from 1.

    Returns:
        `ranks` states. Residuals are added up where there are fewer ranks and zero on ranks that are new. Where the
        number changes, gossip's estimates and push-sum begin again with the next tree, for they belong to a topology of
        so many ranks. Everything else is the first rank's, as on all of them.

    Raises:
        ValueError: no states, states of different pipelines, or `ranks` is not positive.

    >>> import torch, ptcollect as pc
    >>> states = [{"step": 2, "error_feedback": {"residual": {"w": torch.tensor([float(r)])}}} for r in range(4)]
    >>> [state["error_feedback"]["residual"]["w"].item() for state in pc.reshard(states, 2)]
    [2.0, 4.0]
    """
    whole_number("reshard(ranks)", ranks)
    if not states:
        raise ValueError("reshard: expected the states of all ranks, got none")
    return [
        _merged([states[r] for r in range(q, len(states), ranks)], states[0], "state", same=ranks == len(states))
        for q in range(ranks)
    ]


def state_summary(state: State) -> str:
    """A table of what a state holds: the step, and the norm of every residual.

    Args:
        state: a pipeline's state.

    Returns:
        Text to print: one line per parameter with a residual, largest norm first, and the other entries.

    >>> import torch, ptcollect as pc
    >>> print(pc.state_summary({"step": 2, "error_feedback": {"residual": {"a": torch.ones(4), "b": torch.zeros(1)}}}))
    step                              2
    error_feedback.residual           norm 2 in 2 tensors, 20 bytes
      a                               norm 2          largest 1
      b                               norm 0          largest 0
    """
    lines: list[str] = []
    _describe(state, "", lines)
    return "\n".join(lines)


def quiet(state: State) -> State:
    """`state` with residuals of zero, for a rank that still takes part and has nothing to add."""
    return _own_entries(
        state, ("residual",), lambda own: {path: torch.zeros_like(value) for path, value in own.items()}
    )


def merged(before: State, after: State) -> State:
    """`after`, reached from ``quiet(before)``, with the residuals of `before` added back."""
    out: State = {}
    for key, value in after.items():
        if key == "residual":
            out[key] = {path: before[key][path] + leaf for path, leaf in value.items()}
        else:
            out[key] = merged(before[key], value) if isinstance(value, dict) else value
    return out


def _own_entries(state: State, names: Collection[str], change: Callable[[dict[str, Any]], dict[str, Any]]) -> State:
    """`state` with its entries by path under `names` changed, and push-sum's weight among them, a single number."""
    out: State = {}
    for key, value in state.items():
        if _is_weight(key, state) and "numerator" in names:  # under a name of its own while it is kept for a checkpoint
            out[key] = change(value)[key] if isinstance(value, dict) else change({key: value})
        elif key in names and isinstance(value, dict):
            out[key] = change(value)
        else:
            out[key] = _own_entries(value, names, change) if isinstance(value, dict) else value
    return out


def _is_weight(key: str, state: State) -> bool:
    return key == "weight" and "numerator" in state


def _merged(mine: Sequence[State], first: State, where: str, *, same: bool) -> State:
    """The states `mine` (none for a rank that is new) as one, shaped like `first`; `same`: the world size is."""
    out: State = {}
    for key, value in first.items():
        if any(state.keys() != first.keys() for state in mine):
            raise ValueError(f"reshard: the states differ in {where}: {[list(state) for state in mine]}, {list(first)}")
        if any(isinstance(value, int) and state[key] != value for state in mine):
            raise ValueError(f"reshard: the states differ in {where}.{key}: they are not of the same step")
        if key == "residual":
            if any(state[key].keys() != value.keys() for state in mine):
                raise ValueError(f"reshard: the states differ in {where}: they have residuals for different parameters")
            out[key] = {path: _sum([state[key][path] for state in mine], leaf) for path, leaf in value.items()}
        elif _is_weight(key, first):
            out[key] = mine[0][key].clone() if same else torch.ones_like(value)
        elif key.startswith("own_"):  # a rank that is new begins where the first one is
            out[key] = _cloned(mine[0][key] if mine else value)
        elif key in OWN and isinstance(value, dict):
            out[key] = {
                path: mine[0][key][path].clone() if same else torch.zeros_like(leaf) for path, leaf in value.items()
            }
        elif isinstance(value, dict):
            out[key] = _merged([state[key] for state in mine], value, f"{where}.{key}", same=same)
        else:
            out[key] = value.clone() if isinstance(value, Tensor) else value
    return out


def _cloned(entry: State) -> State:
    return optree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, entry)  # type: ignore[arg-type, return-value]


def _sum(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    for part in parts:
        total += part
    return total


def _describe(state: State, prefix: str, lines: list[str]) -> None:
    for key, value in state.items():
        name = f"{prefix}{key}"
        if not isinstance(value, dict):
            lines.append(f"{name:<34}{value if not isinstance(value, Tensor) else tuple(value.shape)}")
        elif value and all(isinstance(leaf, Tensor) for leaf in value.values()):
            _describe_tensors(name, value, lines, norms=key == "residual")
        else:
            _describe(value, f"{name}.", lines)


def _describe_tensors(name: str, leaves: dict[str, Tensor], lines: list[str], *, norms: bool) -> None:
    size = {path: float(torch.linalg.vector_norm(leaf)) for path, leaf in leaves.items()}
    total = sum(norm**2 for norm in size.values()) ** 0.5
    held = sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())
    what = f"norm {total:.3g} in " if norms else ""
    lines.append(f"{name:<34}{what}{len(leaves)} tensors, {held} bytes")
    if norms:
        for path in sorted(sorted_paths(leaves), key=lambda path: -size[path]):
            largest = float(leaves[path].abs().max()) if leaves[path].numel() else 0.0
            lines.append(f"  {path:<32}norm {size[path]:<10.3g} largest {largest:.3g}")


def _rank(rank: int | None) -> int:
    if rank is not None:
        return rank
    return dist.get_rank() if dist.is_initialized() else 0
