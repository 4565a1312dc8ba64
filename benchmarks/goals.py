"""What is good enough: every goal that an issue of the project set, and whether a run meets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from figures import Results, ratio

MIB = 2**20


@dataclass(frozen=True)
class Goal:
    """A bound on one figure, or on the best of several."""

    scenario: str
    link: str
    keys: tuple[str, ...]
    """Of the rows; the best counts."""
    bound: float
    against: str = ""
    """Key of the row that the ratio is to; empty for other measures."""
    measure: Literal["ratio", "reached", "median"] = "ratio"
    size: int = 0
    world: int = 4

    @property
    def text(self) -> str:
        """The goal in words."""
        who = " or ".join(self.keys)
        where = " ".join(filter(None, (self.scenario, self.link, self._size)))
        if self.measure == "reached":
            return f"{where}: {who} reaches >= {self.bound:.2f} of the limit"
        if self.measure == "median":
            return f"{where}: {who} <= {self.bound:g}"
        return f"{where}: {who} <= {self.bound:.2f} x {self.against}"

    @property
    def _size(self) -> str:
        return "" if not self.size else f"{self.size // MIB} MiB" if self.size >= MIB else f"{self.size // 1024} KiB"


@dataclass(frozen=True)
class Verdict:
    """What a run says about a goal."""

    goal: Goal
    got: float
    met: bool


def _shaped(scenario: str, key: str, bound: float, against: str, links: Sequence[str] = ("200mbit",)) -> list[Goal]:
    return [Goal(scenario, link, (key,), bound, against) for link in links]


BOTH = ("200mbit", "1gbit")

GOALS: list[Goal] = [
    # The issue on speed: faster than DDP.
    *[Goal("dense", link, ("ring",), 0.96, measure="reached") for link in BOTH],
    *_shaped("training", "hook_bf16", 0.50, "ddp"),
    *_shaped("training", "hook_int8", 0.28, "ddp"),
    *_shaped("training", "hook_low_rank", 0.12, "ddp"),
    Goal("training", "loopback", ("hook_native",), 1.00, "ddp"),
    Goal("sizes", "loopback", ("ring", "direct"), 0.85, "all_reduce", size=32 * MIB),
    *[Goal("sizes", "loopback", ("direct",), 0.80, "all_reduce", size=kib * 1024) for kib in (16, 64, 256)],
    Goal("small", "loopback", ("ring", "direct"), 1.20, "all_reduce"),
    Goal("codecs", "", ("int8 encode",), 2.5, measure="median", world=1),
    Goal("codecs", "", ("int8 decode",), 1.2, measure="median", world=1),
    Goal("codecs", "", ("sign encode",), 2.0, measure="median", world=1),
    Goal("codecs", "", ("sign decode",), 2.0, measure="median", world=1),
    Goal("codecs", "", ("topk(1 %) encode",), 5.0, measure="median", world=1),
    # Earlier issues.
    *_shaped("dense", "ring", 1.00, "all_reduce", BOTH),
    *_shaped("dense", "ring_bf16", 0.53, "all_reduce", BOTH),
    Goal("dense", "loopback", ("ring",), 1.15, "all_reduce"),
    *_shaped("compression", "int8", 0.30, "all_reduce"),
    *_shaped("compression", "int4", 0.18, "all_reduce"),
    *_shaped("compression", "low_rank", 0.14, "all_reduce"),
    *_shaped("compression", "topk", 0.20, "all_reduce"),
    *_shaped("training", "hook_ring", 1.00, "ddp", BOTH),
    *_shaped("training", "hook_bf16", 0.95, "ddp_fp16", BOTH),
    *_shaped("training", "overlap_ring", 1.00, "ddp", BOTH),
    Goal("import", "", ("ptcollect",), 0.06, "torch", world=1),
    *[Goal("memory", "loopback", (f"{cap} donated",), 1.10, f"{cap} in flight") for cap in ("1MiB", "4MiB", "8MiB")],
    *[Goal("codecs", "", (f"bf16 {what}",), 1.2, measure="median", world=1) for what in ("encode", "decode")],
    # Dense hierarchical sync within 15 % of the factor that its bytes predict.
    Goal("hierarchical", "100mbit", ("dense",), 1.15, "predicted"),
]


def judge(results: Results) -> list[Verdict]:
    """What `results` say about each goal that they have figures for."""
    verdicts = []
    for goal in GOALS:
        values = [value for key in goal.keys if (value := _figure(results, goal, key)) is not None]
        if values:
            got = max(values) if goal.measure == "reached" else min(values)
            verdicts.append(Verdict(goal, got, got >= goal.bound if goal.measure == "reached" else got <= goal.bound))
    return verdicts


def _figure(results: Results, goal: Goal, key: str) -> float | None:
    row = results.find(goal.scenario, goal.link, goal.world, goal.size, key)
    if row is None:
        return None
    if goal.measure == "median":
        return row.median
    if goal.measure == "reached":
        return row.reached
    other = results.find(goal.scenario, goal.link, goal.world, row.size, goal.against)
    return None if other is None else ratio(row.samples, other.samples).median
