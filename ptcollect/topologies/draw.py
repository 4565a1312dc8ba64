"""A picture of a topology: who meets whom in which round, and the weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ptcollect.topologies import TopologyLike, read
from ptcollect.topologies.mixing import mixing_matrix
from ptcollect.topologies.topology import Topology
from ptcollect.value import whole_number

MOST_STEPS = 6
"""Panels drawn where the step is not given."""


def draw_topology(topology: TopologyLike, n: int, output: str | Path, *, step: int | None = None) -> Path:
    r"""Draw who meets whom, in which round and with which weight.

    Above, ranks in a circle: a line for two that meet, an arrow for a message one way, one colour for each round, and
    wider for a larger weight. Below, the mixing matrix

    .. math:: W^{(t)}, \qquad y_i = \sum_j W^{(t)}_{ij} x_j

    as numbers up to 10 ranks and as shades beyond.

    Args:
        topology: a name, a value from `ptcollect.topologies`, a matrix, ``{sender: receivers}`` or a networkx graph.
        n: world size, from 1.
        output: file to write; its ending says what: ``.png``, ``.svg``, ``.pdf``.
        step: the step to draw; None: each step of a period, 6 at most.

    Returns:
        The path of the file.

    Raises:
        ImportError: matplotlib is not installed; it comes with ``ptcollect[plot]``.
        ValueError: there is no such topology of `n` ranks.

    >>> import tempfile, ptcollect as pc
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pc.draw_topology("ring", 6, f"{folder}/ring.svg").name
    'ring.svg'
    """
    whole_number("draw_topology(n)", n)
    chosen = read(topology)
    chosen.check(n)
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "draw_topology needs matplotlib, which is not installed; run: pip install 'ptcollect[plot]'"
        ) from None
    steps = [step] if step is not None else list(range(min(chosen.period(n) or MOST_STEPS, MOST_STEPS)))
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "ptcollect"}):
        figure = Figure(figsize=(3.4 * len(steps) + 0.6, 6.6), dpi=150, layout="constrained")
        panels = figure.subplots(2, len(steps), squeeze=False, height_ratios=(3, 2.4))
        rounds = 0
        for (above, below), each in zip(panels.T, steps, strict=True):
            rounds = max(rounds, _draw_meetings(above, chosen, n, each))
            _draw_matrix(below, chosen, n, each)
        repeats = chosen.period(n)
        how_often = "the same every step" if repeats == 1 else f"repeats after {repeats} steps" if repeats else "random"
        figure.suptitle(f"{chosen!r} on {n} rank{'s' * (n > 1)}, {how_often}", weight="bold", fontsize=10)
        if 1 < rounds <= 10:
            from matplotlib.lines import Line2D

            lines = [Line2D([], [], color=_colour(r, rounds), linewidth=2.5) for r in range(rounds)]
            names = [f"round {r}" for r in range(rounds)]
            figure.legend(lines, names, loc="outside lower center", ncols=min(rounds, 5), frameon=False)
        figure.savefig(output)
    return Path(output)


def _draw_meetings(axes: Any, topology: Topology, n: int, step: int) -> int:
    """Ranks in a circle and what passes between them; gives the number of rounds."""
    place = [(math.sin(2 * math.pi * rank / n), math.cos(2 * math.pi * rank / n)) for rank in range(n)]
    parts = [topology.part(n, step, rank) for rank in range(n)]
    rounds = len(parts[0].turns)
    size = max(2.0, min(11.0, 90 / n))  # of a rank's disc, in points
    for number in range(rounds):
        for rank, part in enumerate(parts):
            turn = part.turns[number]
            if turn.source is None:
                continue
            both = part.turns[number].to == turn.source
            if both and rank > turn.source:
                continue  # drawn from the other side
            start, end = place[turn.source], place[rank]
            style = {"color": _colour(number, rounds), "linewidth": 0.6 + 4 * turn.weight}
            if both:
                axes.plot(*zip(start, end, strict=True), zorder=1, **style)
                continue
            arrow = {"arrowstyle": "-|>", "shrinkA": size / 2, "shrinkB": size / 2 + 1, **style}
            axes.annotate("", end, start, arrowprops={**arrow, "connectionstyle": "arc3,rad=0.12"})
    axes.plot(*zip(*place, strict=True), "o", color="#333333", markersize=size)
    if n <= 24:
        for rank, (x, y) in enumerate(place):
            axes.text(x, y, str(rank), color="white", ha="center", va="center", fontsize=min(7.0, size * 0.65))
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
    axes.set_title(f"step {step}: {rounds} round{'s' * (rounds != 1)}", fontsize=9)
    axes.axis("off")
    return rounds


def _draw_matrix(axes: Any, topology: Topology, n: int, step: int) -> None:
    weights = mixing_matrix(topology, n, step)
    axes.imshow(weights.tolist(), cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(n) if n <= 16 else [0, n - 1])
    axes.set_yticks(range(n) if n <= 16 else [0, n - 1])
    axes.tick_params(length=0, labelsize=7)
    axes.set_xlabel("from rank", fontsize=8)
    axes.set_ylabel("to rank", fontsize=8)
    if n <= 10:
        for i, row in enumerate(weights.tolist()):
            for j, weight in enumerate(row):
                if weight:
                    shown = f"{weight:.2f}".lstrip("0")
                    colour = "white" if weight > 0.5 else "black"
                    axes.text(j, i, shown, ha="center", va="center", fontsize=6, color=colour)


def _colour(number: int, rounds: int) -> Any:
    import matplotlib as mpl

    return mpl.colormaps["tab10"](number) if rounds <= 10 else mpl.colormaps["viridis"](number / rounds)
