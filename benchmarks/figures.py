"""What the harness measures: a `Row` of samples with the limit that physics sets, and what is made of it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True)
class Row:
    """One contender of one scenario. Rows of one scenario, link, world and size were measured in turn, in one run."""

    scenario: str
    link: str
    """As tc writes it, ``loopback``, or empty where nothing travels."""
    world: int
    """Ranks; 1 where nothing travels."""
    size: int
    """Bytes of the tree; 0 where there is none."""
    key: str
    title: str
    unit: str
    """``s``, ``B``, ``copies`` or ``steps``."""
    samples: list[float]
    baseline: str = ""
    """Key of the row that ratios are to."""
    limit: float | None = None
    """The least that is possible, in `unit`."""
    limit_is: str = ""
    note: str = ""

    @property
    def median(self) -> float:
        """Of the samples."""
        return median(self.samples)

    @property
    def group(self) -> tuple[str, str, int, int]:
        """What rows that may be compared have in common."""
        return (self.scenario, self.link, self.world, self.size)

    @property
    def reached(self) -> float | None:
        """The share of the limit that the median reaches: 1 is as good as can be."""
        if self.limit is None:
            return None
        return self.median / self.limit if self.unit == "steps" else self.limit / self.median


@dataclass(frozen=True)
class Ratio:
    """The quotients of two rows, sample by sample: what slows one round down slows both."""

    median: float
    low: float
    high: float
    """Quartiles; the range where there are fewer than four samples."""

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Compare two lists of samples round by round."""
    values = [a / b for a, b in zip(ours, theirs, strict=True)]
    if len(values) < 4:
        return Ratio(median(values), min(values), max(values))
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Ratio(median(values), low, high)


@dataclass(frozen=True)
class Results:
    """One run: the machine, and every row."""

    machine: Mapping[str, Any]
    rows: list[Row]
    skipped: list[str] = field(default_factory=list)
    """What was not measured, and why."""

    def find(self, scenario: str, link: str, world: int, size: int, key: str) -> Row | None:
        """The row of these, if there is one; size 0 stands for any."""
        for row in self.rows:
            if (row.scenario, row.link, row.world, row.key) == (scenario, link, world, key) and size in (0, row.size):
                return row
        return None

    def groups(self) -> dict[tuple[str, str, int, int], list[Row]]:
        """The rows by what they have in common, in the order in which they were measured."""
        found: dict[tuple[str, str, int, int], list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return found

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads; samples have six digits."""
        rows = [{**asdict(row), "samples": [float(f"{x:.6g}") for x in row.samples]} for row in self.rows]
        return {"machine": dict(self.machine), "rows": rows, "skipped": self.skipped}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Results:
        """The results that a run wrote."""
        return cls(data["machine"], [Row(**row) for row in data["rows"]], data["skipped"])


# Numbers as people read them ----------------------------------------------------------------------------------------


def in_unit(value: float, unit: str) -> str:
    """A value with three digits and a fitting unit."""
    if unit == "s":
        scale, name = next(((s, n) for s, n in ((1.0, "s"), (1e-3, "ms")) if value >= s), (1e-6, "us"))
        return f"{_three(value / scale)} {name}"
    if unit == "B":
        return byte_size(round(value))
    return _three(value) if unit == "copies" else f"{value:g} {unit}"


def byte_size(size: int) -> str:
    """Bytes in powers of 1024, or of 1000 where those are rounder."""
    for scale, name in ((2**20, "MiB"), (2**10, "KiB")):
        if scale <= size < 1024 * scale and size % scale == 0:
            return f"{size // scale} {name}"
    for scale, name in ((1e6, "MB"), (1e3, "KB")):
        if size >= scale:
            return f"{size / scale:.1f} {name}"
    return f"{size} B"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(header: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """An aligned Markdown table whose first `left` columns are text."""
    cells = [list(header), *map(list, lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in cells
    ]
    rule = [":" + "-" * (w - 1) if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [aligned[0], rule, *aligned[1:]])


# Where it was measured ----------------------------------------------------------------------------------------------


def machine(tcp: str) -> dict[str, Any]:
    """The machine, its software, the date and the revision of this code."""
    system = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    own = system.read_text().strip() if system.exists() else "unknown"
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "tcp_loopback": own,
        "tcp_shaped": own if tcp == "machine" else tcp,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "revision": _revision(),
    }


def _cpu() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else platform.processor()


def _revision() -> str:
    folder = Path(__file__).parent
    # The owner of the files need not be who runs this, which is root behind shaped links.
    git = ["git", "-c", f"safe.directory={folder.parent}", "-C", str(folder)]
    revision = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=False
    )
    return (revision.stdout.strip() or "unknown") + (" with changes" if changed.stdout.strip() else "")
