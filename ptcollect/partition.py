"""`partition`: different treatment for different parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from ptcollect.comm import Comm
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, apply_settled
from ptcollect.state import State, joined, part
from ptcollect.tree import Leaves
from ptcollect.value import refuse_tree


def partition(rules: Mapping[str, Pipeline]) -> Pipeline:
    r"""Give each parameter to the first rule whose pattern matches its path.

    .. math:: y_p = \text{pipeline}_{r(p)}(x)_p, \qquad r(p) = \min \{ r : \text{pattern}_r \text{ matches } p \}

    Args:
        rules: shell pattern over dotted paths (``*`` matches anything, dots included) -> pipeline; tried in order, so
            that ``"*"`` at the end is the default.

    Returns:
        A Pipeline that runs the rules' pipelines side by side, in the same order on all ranks.

    Raises:
        PipelineError: no rules, a rule that is no pipeline; while running or in `init`, a leaf that no rule matches.

    >>> import torch, ptcollect as pc
    >>> sync = pc.partition({"*.bias": pc.all_to_all_avg(), "*": pc.chain(pc.compress("bf16"), pc.ring_reduce())})
    >>> run = pc.simulate(sync, [{"fc.weight": torch.ones(4), "fc.bias": torch.ones(4)}] * 2)
    >>> run.bytes  # 16 for the bias, 8 for the weight
    [24, 24]
    """
    refuse_tree("partition", "rules", rules)
    checked = dict[Any, Any](rules)
    if not checked:
        raise PipelineError('partition(rules): expected {pattern: pipeline, ..., "*": pipeline}, got no rules')
    for pattern, pipeline in checked.items():
        if not isinstance(pattern, str) or not isinstance(pipeline, Pipeline):
            raise PipelineError(
                f"partition: the rule {pattern!r}: {pipeline!r} must map a pattern to a pipeline; a transform needs a "
                "reducer after it: chain(transform, ring_reduce())"
            )
    return Partition(tuple(rules.items()))


@dataclass(frozen=True, repr=False)
class Partition(Pipeline):
    """See `partition`."""

    rules: tuple[tuple[str, Pipeline], ...]

    def __repr__(self) -> str:
        rules = ", ".join(f"{json.dumps(pattern)}: {pipeline!r}" for pattern, pipeline in self.rules)
        return f"partition({{{rules}}})"

    def children(self) -> tuple[Pipeline, ...]:
        return tuple(pipeline for _, pipeline in self.rules)

    @property
    def consensus(self) -> bool:
        return all(child.consensus for child in self.children())

    @property
    def fresh(self) -> bool:
        return all(child.fresh for child in self.children())

    @property
    def streams(self) -> bool:
        return True

    def begin(self, params: Leaves) -> State:
        parts = self._parts(params)
        return joined(self.state_names, [child.begin(part) for child, part in zip(self.children(), parts, strict=True)])

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        stops = list(accumulate(len(child.state_names) for child in self.children()))
        states = [part(state, self.state_names, start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
        trees = self._parts(tree)
        # Every rule runs, also one that no leaf matches: all ranks make the same requests in the same order.
        work = [apply_settled(child, t, s, comm) for child, t, s in zip(self.children(), trees, states, strict=True)]
        results = await comm.fork(work)
        out = {path: leaf for leaves, _ in results for path, leaf in leaves.items()}
        return {path: out[path] for path in tree}, joined(self.state_names, [new for _, new in results])

    def _parts(self, tree: Leaves) -> list[Leaves]:
        parts: list[Leaves] = [{} for _ in self.rules]
        unmatched = []
        for path, leaf in tree.items():
            rule = next((i for i, (pattern, _) in enumerate(self.rules) if fnmatchcase(path, pattern)), None)
            if rule is None:
                unmatched.append(path)
            else:
                parts[rule][path] = leaf
        if unmatched:
            patterns = ", ".join(repr(pattern) for pattern, _ in self.rules)
            raise PipelineError(
                f"partition: no rule matches {', '.join(map(repr, unmatched))}; the patterns are {patterns}; add one "
                "or '*' at the end as the default"
            )
        return parts
