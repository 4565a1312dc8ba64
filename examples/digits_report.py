"""What the digits demo shows: a progress bar, a table and the curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ptcollect as pc


@dataclass
class Setting:
    """What all trainings have in common."""

    ranks: int
    steps: int
    share: int
    train_images: int
    test_images: int
    parameters: int
    largest_parameter: float
    pipelines: dict[str, pc.Pipeline]

    @property
    def shares(self) -> str:
        """How a batch is split."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} x {self.share} images"

    @property
    def rounding(self) -> float:
        """Half a unit in the last place of the largest parameter: what storing it as float32 may change."""
        return self.largest_parameter * 2.0**-24

    @property
    def ring_bytes(self) -> float:
        """What a ring all-reduce of float32 gradients sends from each rank."""
        return 2 * (self.ranks - 1) / self.ranks * 4 * self.parameters


@dataclass
class Outcome:
    """One training: per-step values are means or maxima over all ranks. ``None``: this is the reference."""

    title: str
    correct: int
    final_loss: float
    losses: list[float]
    differences: list[float] | None
    bytes_per_step: float | None
    agreement_bytes_per_step: float


@contextmanager
def progress(total: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar over `total` steps; gives a function to call after each, with what is running."""
    if not shown:
        yield lambda way: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    title, steps = TextColumn("{task.description}"), TextColumn("steps")
    with Progress(title, BarColumn(), MofNCompleteColumn(), steps, TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=total)
        yield lambda way: bar.update(task, description=f"{way:22s}", advance=1)


def print_table(outcomes: list[Outcome], setting: Setting) -> None:
    """The numbers after the last step, and how each was come by."""
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    console = Console(highlight=False)
    title = f"Digits: {setting.parameters:,} parameters, {setting.steps} steps of {setting.shares}"
    table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("gradients averaged by", style="bold", no_wrap=True)
    headings = "test\naccuracy", "training\nloss", "sent per rank\nand step", "difference\nfrom DDP"
    for heading in headings:
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.title,
            f"{outcome.correct / setting.test_images:.1%}",
            f"{outcome.final_loss:.5f}",
            kilobytes(setting.ring_bytes, "*") if outcome.bytes_per_step is None else kilobytes(outcome.bytes_per_step),
            "-" if outcome.differences is None else number(outcome.differences[-1]),
        )
    console.print()
    console.print(table)

    notes = Table.grid(padding=(0, 2))
    for name, pipeline in setting.pipelines.items():
        notes.add_row(name, repr(pipeline))
    notes.add_row("accuracy", f"of {setting.test_images} images that were not trained on")
    notes.add_row("loss", f"cross-entropy over all {setting.train_images:,} training images after the last step")
    agreement = max(outcome.agreement_bytes_per_step for outcome in outcomes) / 1000
    notes.add_row("sent", f"by pc.traffic() on the rank that sends most; agreement adds {agreement:.1f} kB")
    notes.add_row("*", "calculated: a ring sends 2(n-1)/n of the float32 gradients")
    notes.add_row("difference", f"largest of any parameter at the end; float32 rounds by {setting.rounding:.0e}")
    console.print(Padding(notes, (0, 0, 1, 2)), style="dim")


def kilobytes(size: float, mark: str = " ") -> str:
    """Bytes in kB of 1000, with room for a mark."""
    return f"{size / 1000:.1f} kB {mark}"


def number(difference: float) -> str:
    """A difference, which may be none at all."""
    return f"{difference:.1e}" if difference else "0"


STYLES = (
    {"color": "#c9c9c9", "linewidth": 6.0, "solid_capstyle": "round"},  # wide, so that it is seen behind the others
    {"color": "#1f6fb2", "linewidth": 1.6},
    {"color": "#e08214", "linewidth": 1.6, "dashes": (3, 2.5)},
    {"color": "#5a3d8f", "linewidth": 1.2},
)


def draw_curves(outcomes: list[Outcome], setting: Setting, output: Path) -> None:
    """Above the losses, one on top of the other; below how far parameters are from plain DDP's."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator

    steps = range(1, setting.steps + 1)
    with mpl.rc_context({"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.5, 6.2), dpi=160, layout="constrained")
        losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for outcome, style in zip(outcomes, STYLES, strict=True):
            losses.plot(steps, outcome.losses, label=outcome.title, **style)
            if outcome.differences is not None:
                seen = [difference or float("nan") for difference in outcome.differences]  # a log axis has no 0
                label = outcome.title if any(outcome.differences) else f"{outcome.title}: 0 at every step"
                differences.plot(steps, seen, label=label, **style)
        losses.set(ylabel="training loss of the batch (cross-entropy)", xlim=(0, 1.02 * setting.steps))
        losses.set_title(f"Digits, {setting.shares} a step: the same training four ways", loc="left", weight="bold")
        reference = outcomes[0].losses
        if max(reference) > 10 * min(reference):
            losses.set_yscale("log")
            losses.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        differences.set(yscale="log", xlabel="step", ylabel="largest difference of a\nparameter from plain DDP")
        largest = max(max(outcome.differences or [0]) for outcome in outcomes)
        differences.set_ylim(setting.rounding / 30, max(3 * largest, 1e5 * setting.rounding))
        differences.xaxis.set_major_locator(MaxNLocator(integer=True))
        differences.axhline(setting.rounding, color="#888888", linewidth=0.8, linestyle=":")
        differences.annotate(
            "float32 rounding of the largest parameter",
            (1, setting.rounding),
            xycoords=("axes fraction", "data"),
            xytext=(0, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            color="#666666",
            fontsize=8,
        )
        for axes in (losses, differences):
            axes.minorticks_off()
            axes.legend(frameon=False, handlelength=3.5)
        losses.yaxis.set_major_formatter("{x:g}")
        figure.savefig(output)
