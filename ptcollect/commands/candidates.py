"""Pipelines that a plan compares: by short name or as code, what each loses, and what to be warned of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ptcollect.commands.arguments import read_pipeline
from ptcollect.link import Link, TwoLevel
from ptcollect.parameters.diloco import DiLoCo
from ptcollect.parameters.local_sgd import LocalSgd
from ptcollect.pipeline import Pipeline, Wrapped
from ptcollect.plan import Plan, plan
from ptcollect.reducers.reducer import Reducer
from ptcollect.speed import CodecSpeed
from ptcollect.transforms.compress import Compress
from ptcollect.transforms.error_feedback import ErrorFeedback
from ptcollect.transforms.low_rank import LowRank


@dataclass(frozen=True)
class Candidate:
    """A pipeline to plan."""

    name: str
    pipeline: Pipeline

    @property
    def every(self) -> int:
        """How many steps share one sync."""
        transforms = (stage.transform for stage in self.pipeline.walk() if isinstance(stage, Wrapped))
        return next((each.every for each in transforms if isinstance(each, (DiLoCo, LocalSgd))), 1)

    @property
    def step(self) -> int:
        """A step at which it sends; not the first one, when replicas are compared too."""
        return 2 * self.every - 1

    @property
    def on_nodes(self) -> bool:
        """Whether it needs a mesh of nodes and ranks inside."""
        return any(isinstance(stage, Reducer) and stage.axis is not None for stage in self.pipeline.walk())

    @property
    def loses(self) -> str:
        """What does not arrive, in words."""
        lossy = []
        feedback = False
        for stage in self.pipeline.walk():
            if isinstance(stage, Wrapped):
                feedback |= isinstance(stage.transform, ErrorFeedback)
                if isinstance(stage.transform, Compress):
                    lossy.append(repr(stage.transform.codec))
                elif isinstance(stage.transform, LowRank):
                    lossy.append(f"all but rank {stage.transform.rank}")
        text = "nothing"
        if lossy:
            text = " and ".join(lossy) + (": late, not lost" if feedback else ": lost")
        return text if self.every == 1 else f"{text}; ranks drift apart for {self.every} steps"


def candidate(text: str) -> Candidate:
    """The pipeline that a short name or a Python expression means.

    Raises:
        ValueError: it is neither.
    """
    return Candidate(text, read_pipeline(text))


@dataclass(frozen=True)
class Row:
    """What one candidate would cost in a step."""

    candidate: Candidate
    seconds: float
    bytes: float
    """Of the rank that sends most."""
    messages: float
    cost: Plan
    warnings: tuple[str, ...] = ()


def compare(
    candidates: Sequence[Candidate],
    params: Any,
    *,
    world: int,
    link: Link,
    codec_speed: CodecSpeed | str | Path | None = None,
    ranks_per_node: int | None = None,
    warn: bool = True,
) -> list[Row]:
    """All of them on the same links, fastest first.

    Raises:
        ValueError: one needs a mesh, and nothing says how many ranks a node has.
    """
    axes: Mapping[str, int] | None = None
    if ranks_per_node is not None:
        if world % ranks_per_node:
            raise ValueError(f"{world} ranks do not fill nodes of {ranks_per_node}")
        axes = {"node": world // ranks_per_node, "local": ranks_per_node}
    dense = read_pipeline("dense")
    ring = plan(dense, params, world=world, link=link, codec_speed=codec_speed)
    rows = []
    for each in candidates:
        if each.on_nodes and axes is None:
            raise ValueError(f"{each.name}: needs nodes; say how many ranks each has (--ranks-per-node 8)")
        on = axes if each.on_nodes and axes is not None else world
        cost = (
            ring
            if each.pipeline == dense
            else plan(each.pipeline, params, world=on, link=link, codec_speed=codec_speed, step=each.step)
        )
        warnings = _warnings(each, cost, ring, link, on, params, codec_speed) if warn else ()
        rows.append(
            Row(
                each,
                cost.seconds / each.every,
                max(cost.bytes) / each.every,
                max(cost.messages) / each.every,
                cost,
                warnings,
            )
        )
    return sorted(rows, key=lambda row: row.seconds)


def _warnings(
    each: Candidate,
    cost: Plan,
    ring: Plan,
    link: Link,
    world: Any,
    params: Any,
    codec_speed: CodecSpeed | str | Path | None,
) -> tuple[str, ...]:
    found = []
    if max(cost.bytes) > 1.001 * max(ring.bytes):
        text = f"sends {max(cost.bytes) / max(ring.bytes):.3g} times the bytes of a dense ring"
        if any(
            isinstance(stage, Reducer) and stage.factory.__name__ == "all_gather_avg" for stage in each.pipeline.walk()
        ):
            # (n - 1) b bits a number against 2 (n - 1) / n x 32.
            bits = 8 * max(cost.bytes) / (cost.ranks - 1) / _numbers(ring)
            text += f"; by all-gather {bits:.2g} bits a number pay below {math.ceil(64 / bits)} ranks only"
        found.append(text)
    instant = _instant(link)
    bandwidth_only = plan(
        each.pipeline, params, world=world, link=instant, codec_speed=codec_speed, step=each.step
    ).seconds
    if bandwidth_only < cost.seconds / 2:
        share = 1 - bandwidth_only / cost.seconds
        found.append(f"latency decides, {share:.0%} of the time: fewer rounds help, fewer bytes do not")
    return tuple(found)


def _numbers(ring: Plan) -> float:
    """How many numbers are synchronised, from what a dense float32 ring sends of them."""
    return sum(ring.bytes) / (2 * (ring.ranks - 1)) / 4


def _instant(link: Link) -> Link:
    """The link without latency and overhead."""
    if isinstance(link, TwoLevel):
        return replace(link, inside=_instant(link.inside), between=_instant(link.between))
    return replace(link, latency=0.0, message_overhead=0.0)
