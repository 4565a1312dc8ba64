"""What every rank of a scenario shares: trees, contenders, the check that they agree, and the clock.

Scenarios are in `sync.py`, `memory.py`, `training.py` and `hierarchical.py`; each needs the environment that
`netlab.py` gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import ptcollect as pc

Tree = dict[str, Any]  # nested dicts of tensors (or of shapes) by name

LOSSLESS, BF16 = 1e-5, 2e-2  # how far a result may be from the baseline's, relative to the leaf's largest value


@dataclass(frozen=True)
class Contender:
    """One way to average a tree; `prepare` is not timed, and without a tolerance the result is not checked."""

    key: str
    title: str
    run: Callable[[Any], Any]
    prepare: Callable[[Tree], Any] = lambda tree: tree
    tolerance: float | None = LOSSLESS


class Carried:
    """A pipeline with state, called like a function: each call goes on from the state that the last one left."""

    def __init__(self, pipeline: pc.Pipeline, like: Tree, **options: Any) -> None:
        self.pipeline = pipeline
        self.state = pipeline.init(like)
        self.options = options

    def __call__(self, tree: Tree) -> Tree:
        result, self.state = self.pipeline.update(tree, self.state, **self.options)
        return result  # type: ignore[no-any-return]

    def kept_back(self, tree: Tree) -> list[torch.Tensor]:
        """What error feedback keeps for the next step, as the mean over the ranks, for the leaves of `tree`."""
        residual = pc.ring_reduce()(self.state["error_feedback"]["residual"])
        return [residual[path] for path in paths(tree)]


@dataclass(frozen=True)
class Measured:
    """One number per round, the worst over the ranks: seconds or bytes."""

    key: str
    title: str
    samples: list[float]
    baseline: str = ""
    """Key of the contender that ratios are to."""
    sent_bytes: float | None = None
    """By one rank in one call, headers left out."""
    size: int = 0
    """Bytes of the tree."""


# Trees --------------------------------------------------------------------------------------------------------------


def transformer(blocks: int, width: int = 256, vocabulary: int = 5902) -> Tree:
    """The shapes of a language model's parameters; 6 blocks are 25 MB of float32 in 25 matrices and 50 vectors."""
    return {
        "embedding": {"weight": (vocabulary, width)},
        "blocks": {str(i): block(width) for i in range(blocks)},
        "norm": {"weight": (width,), "bias": (width,)},
    }


def block(width: int) -> Tree:
    """The shapes of one transformer block's parameters."""
    return {
        "norm1": {"weight": (width,), "bias": (width,)},
        "attention": {
            "qkv": {"weight": (3 * width, width), "bias": (3 * width,)},
            "out": {"weight": (width, width), "bias": (width,)},
        },
        "norm2": {"weight": (width,), "bias": (width,)},
        "mlp": {
            "up": {"weight": (4 * width, width), "bias": (4 * width,)},
            "down": {"weight": (width, 4 * width), "bias": (width,)},
        },
    }


def gradients(shapes: Tree) -> Tree:
    """Random gradients of these shapes, other ones on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tree: Tree = rebuild(shapes, (torch.randn(shape, generator=generator) for shape in leaves(shapes)))
    return tree


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested dicts, in order."""
    return [leaf for child in tree.values() for leaf in leaves(child)] if isinstance(tree, dict) else [tree]


def paths(tree: Tree) -> list[str]:
    """The dotted paths of the leaves, in the order of `leaves`."""
    below = {name: paths(child) if isinstance(child, dict) else [""] for name, child in tree.items()}
    return [f"{name}.{path}".rstrip(".") for name, rest in below.items() for path in rest]


def rebuild(tree: Any, values: Iterator[Any]) -> Any:
    """Nested dicts of the same shape with these leaves."""
    return {name: rebuild(child, values) for name, child in tree.items()} if isinstance(tree, dict) else next(values)


def nbytes(tree: Tree) -> int:
    """Bytes of all leaves."""
    return sum(leaf.nbytes for leaf in leaves(tree))


def copied(tree: Tree) -> Tree:
    """The tree in storage of its own, for contenders that overwrite it."""
    result: Tree = rebuild(tree, (leaf.clone() for leaf in leaves(tree)))
    return result


def flatten(tree: Tree) -> torch.Tensor:
    """All leaves in one new vector."""
    return torch.cat([leaf.reshape(-1) for leaf in leaves(tree)])


def unflatten(flat: torch.Tensor, tree: Tree) -> Tree:
    """Views of `flat` in the shapes of `tree`."""
    pieces = flat.split([leaf.numel() for leaf in leaves(tree)])
    result: Tree = rebuild(tree, (piece.view_as(leaf) for piece, leaf in zip(pieces, leaves(tree), strict=True)))
    return result


def flat_all_reduce(tree: Tree) -> Tree:
    """What one writes by hand: flatten, all_reduce, divide, unflatten (as views)."""
    flat = flatten(tree)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return unflatten(flat, tree)


# Check --------------------------------------------------------------------------------------------------------------


def check(contender: Contender, tree: Tree, expected: Tree | None = None) -> float:
    """The bytes that a call sends from here; raise if its result, with what it keeps back, is too far from the mean."""
    with pc.traffic() as traffic:
        result = contender.run(contender.prepare(tree))
    n = dist.get_world_size()
    sent = traffic.bytes or nbytes(tree) * 2 * (n - 1) / n  # not ours: a dense ring
    if contender.tolerance is None:
        return sent
    wanted, got = leaves(flat_all_reduce(tree) if expected is None else expected), leaves(result)
    if isinstance(contender.run, Carried):
        # The first call of this state: nothing is lost, so the mean is what came out and what all ranks keep of it.
        got = [have + kept for have, kept in zip(got, contender.run.kept_back(tree), strict=True)]
    for index, (want, have) in enumerate(zip(wanted, got, strict=True)):
        error = float((have - want).abs().max() / want.abs().max())
        if not error <= contender.tolerance:
            raise RuntimeError(
                f"{contender.title}: leaf {index} is off by {error:.1e}, allowed are {contender.tolerance:.0e}"
            )
    return sent


# Time ---------------------------------------------------------------------------------------------------------------


def compare(
    contenders: Sequence[Contender],
    tree: Tree,
    *,
    seconds: float,
    calls: int = 1,
    least: int = 3,
    checked: bool = True,
) -> list[Measured]:
    """Check all contenders against the flat all_reduce, which warms them up too, then time them in turn."""
    n = dist.get_world_size()
    sent = [nbytes(tree) * 2 * (n - 1) / n] * len(contenders)
    if checked:
        expected = flat_all_reduce(tree)
        sent = [check(contender, tree, expected) for contender in contenders]
    timed = time_in_turn(contenders, tree, seconds=seconds, calls=calls, least=least)
    return [
        Measured(contender.key, contender.title, samples, contenders[0].key, sent_bytes, nbytes(tree))
        for contender, samples, sent_bytes in zip(contenders, timed, sent, strict=True)
    ]


def time_in_turn(
    contenders: Sequence[Contender], tree: Tree, *, seconds: float, calls: int = 1, rounds: int = 30, least: int = 3
) -> list[list[float]]:
    """Seconds of one call, per contender and round; every round starts with another contender.

    Args:
        contenders: what to time; warm already.
        tree: what each is given.
        seconds: no round begins after this time.
        calls: in a row in one sample.
        rounds: at most.
        least: rounds, however long they take.
    """
    taken: list[list[float]] = [[] for _ in contenders]
    begin = time.perf_counter()
    for turn in range(rounds):
        if turn >= least and slowest(time.perf_counter() - begin) > seconds:
            break
        for offset in range(len(contenders)):
            index = (turn + offset) % len(contenders)
            taken[index].append(time_calls(contenders[index], tree, calls))
    samples = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(samples, op=dist.ReduceOp.MAX)
    listed: list[list[float]] = samples.tolist()
    return listed


def time_calls(contender: Contender, tree: Tree, calls: int) -> float:
    """Seconds of one of `calls` calls in a row on this rank, from a barrier on."""
    prepared = contender.prepare(tree)
    dist.barrier()
    result = None
    start = time.perf_counter()
    for _ in range(calls):
        result = contender.run(prepared)
    seconds = time.perf_counter() - start
    del result  # freeing it is not part of the call
    return seconds / calls


def slowest(seconds: float) -> float:
    """The same number on all ranks: the largest."""
    numbers = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return float(numbers)
