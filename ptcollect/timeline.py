"""What happened when: messages and work of every rank, as a Chrome trace or a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Message(NamedTuple):
    """One message; times in seconds."""

    source: int
    destination: int
    size: int
    """Bytes."""
    stage: str
    leaf: str
    round: int
    leaves: float
    """When its first byte leaves the sender."""
    left: float
    """When its last byte has left."""
    arrives: float
    """When its first byte arrives."""
    arrived: float
    """When all of it is there."""


class Span(NamedTuple):
    """What one rank did, or waited for, from `start` to `end`."""

    rank: int
    start: float
    end: float
    name: str
    waits: bool


@dataclass(frozen=True)
class Timeline:
    """When every message travelled and what every rank did meanwhile, in a simulation with a link, or a plan.

    >>> import torch, ptcollect as pc
    >>> trees = [torch.zeros(1000), torch.ones(1000)]
    >>> run = pc.simulate(pc.ring_reduce(), trees, link=pc.Link("1gbit", latency="1ms"), check="off")
    >>> [(m.source, m.destination, m.size, m.round, round(m.arrived, 6)) for m in run.timeline.messages[:2]]
    [(0, 1, 2000, 1, 0.001016), (1, 0, 2000, 1, 0.001016)]
    >>> run.timeline.save("trace.json")  # doctest: +SKIP
    """

    ranks: int
    messages: list[Message] = field(default_factory=list, repr=False)
    """In the order in which they left."""
    spans: list[Span] = field(default_factory=list, repr=False)
    """Work, where `codec_speed` gives it time, and waits."""

    @property
    def seconds(self) -> float:
        """When the last rank had ended."""
        return max([span.end for span in self.spans] + [message.arrived for message in self.messages], default=0.0)

    def save(self, path: str | Path) -> None:
        """Write it as Chrome trace JSON, which https://ui.perfetto.dev opens.

        A rank is a process with three rows: what it does, its port out, its port in. Arrows join the two ends of a
        message.
        """
        Path(path).write_text(json.dumps({"traceEvents": list(self._events()), "displayTimeUnit": "ms"}))

    def draw(self, path: str | Path, *, title: str = "") -> None:
        """Draw ranks against time, with messages as arrows, as PNG, SVG or whatever the name of the file says.

        Raises:
            ModuleNotFoundError: matplotlib is not installed; the message shows how to.
        """
        plt = pyplot()
        height = max(2.5, 0.6 * self.ranks + 1.2)
        figure, axes = plt.subplots(figsize=(10, height), layout="constrained")
        scale, unit = (1e6, "µs") if self.seconds < 1e-3 else (1e3, "ms") if self.seconds < 1 else (1.0, "s")
        for span in self.spans:
            if not span.waits:
                length = (span.end - span.start) * scale
                axes.barh(span.rank, length, left=span.start * scale, height=0.18, color="0.55")
        stages = list(dict.fromkeys(message.stage for message in self.messages))
        for message in self.messages:
            ends = (message.leaves * scale, message.source), (message.arrived * scale, message.destination)
            arrow = {"arrowstyle": "-|>", "color": f"C{stages.index(message.stage) % 10}", "lw": 0.9, "alpha": 0.8}
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=arrow)
        for index, stage in enumerate(stages):
            axes.plot([], [], color=f"C{index % 10}", label=stage)
        axes.set(
            xlim=(0, (self.seconds or 1.0) * scale * 1.01),
            ylim=(self.ranks - 0.5, -0.5),
            yticks=range(self.ranks),
            xlabel=f"time in {unit}",
            ylabel="rank",
            title=title,
        )
        axes.grid(axis="y", alpha=0.3)
        if stages:
            axes.legend(loc="upper right", fontsize="small")
        figure.savefig(path)
        plt.close(figure)

    def _events(self) -> Iterator[dict[str, Any]]:
        for rank in range(self.ranks):
            yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
            for row, name in enumerate(("rank", "out", "in")):
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
        for span in self.spans:
            yield _slice(span.name, "wait" if span.waits else "work", span.rank, 0, span.start, span.end)
        for number, message in enumerate(self.messages):
            name = f"{message.stage}, round {message.round}"
            about = {"leaf": message.leaf, "bytes": message.size, "to": message.destination, "from": message.source}
            yield _slice(name, "message", message.source, 1, message.leaves, message.left, about)
            yield _slice(name, "message", message.destination, 2, message.arrives, message.arrived, about)
            flow = {"name": "message", "cat": "message", "id": number}
            yield {"ph": "s", "pid": message.source, "tid": 1, "ts": message.leaves * 1e6, **flow}
            yield {"ph": "f", "bp": "e", "pid": message.destination, "tid": 2, "ts": message.arrives * 1e6, **flow}


def _slice(
    name: str, kind: str, rank: int, row: int, start: float, end: float, about: dict[str, Any] | None = None
) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": row, **times, "args": about or {}}


def pyplot() -> Any:
    """The pyplot of matplotlib, drawing to files only.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'ptcollect[plot]'") from None
    mpl.use("agg")
    import matplotlib.pyplot as plt

    return plt
