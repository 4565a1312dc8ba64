"""``python -m ptcollect plan``: which pipeline would pay on these links, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ptcollect.commands.candidates import Candidate, Row, candidate, compare
from ptcollect.link import Link, two_level
from ptcollect.shapes import count
from ptcollect.timeline import pyplot

DEFAULT = ("dense", "bf16", "int8", "topk", "low_rank", "diloco")


def plan(
    params: Annotated[str, typer.Option(help='How many parameters there are, as in "124M" or "1B".')],
    world: Annotated[int, typer.Option(help="Number of ranks.")],
    bandwidth: Annotated[str, typer.Option(help='Of each link, as in "1gbit" or "200mbit".')] = "1gbit",
    latency: Annotated[str, typer.Option(help='As in "20ms" or "50us".')] = "1ms",
    overhead: Annotated[str, typer.Option(help="Time that a message costs at its ports beside its bytes.")] = "0s",
    link: Annotated[
        Path | None, typer.Option(help="Measured link as JSON, in place of --bandwidth, --latency, --overhead.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks in a node, which share one link to other nodes.")
    ] = None,
    inside_bandwidth: Annotated[str, typer.Option(help="Inside a node, with --ranks-per-node.")] = "100gbit",
    inside_latency: Annotated[str, typer.Option(help="Inside a node, with --ranks-per-node.")] = "10us",
    codec_speed: Annotated[
        Path | None, typer.Option(help="Measured speeds as JSON: benchmarks/codec_speed.py --json. None: free.")
    ] = None,
    pipelines: Annotated[
        list[str] | None,
        typer.Option(
            help="Short names (dense, bf16, int8, topk, low_rank, hierarchical, diloco) or Python: 'chain(bucketize(), "
            'compress("int8"), ring_reduce())\'. Once for each.'
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time against world size, as PNG or SVG.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
) -> None:
    """Compare pipelines on links: predicted time, bytes and what each loses."""
    try:
        chosen = [candidate(text) for text in pipelines or _default(ranks_per_node)]
        outside = Link.load(link) if link is not None else Link(bandwidth, latency, overhead)
        links = _on_nodes(outside, ranks_per_node, inside_bandwidth, inside_latency)
        rows = compare(
            chosen, count(params), world=world, link=links, codec_speed=codec_speed, ranks_per_node=ranks_per_node
        )
    except (ValueError, TypeError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = Console()
    console.print(_table(rows, f"{params} parameters on {world} ranks, {links}"))
    for row in rows:
        for warning in row.warnings:
            console.print(f"{row.candidate.name}: {warning}", style="yellow", markup=False)
    if codec_speed is None:
        console.print("Codecs count as free; --codec-speed gives them time.", style="dim")
    if json_file is not None:
        json_file.write_text(json.dumps([_as_json(row) for row in rows], indent=1))
    if plot is not None:
        _draw(plot, chosen, params, world, links, codec_speed, ranks_per_node)


def _default(ranks_per_node: int | None) -> tuple[str, ...]:
    return DEFAULT if ranks_per_node is None else (*DEFAULT, "hierarchical")


def _on_nodes(outside: Link, ranks_per_node: int | None, bandwidth: str, latency: str) -> Link:
    return outside if ranks_per_node is None else two_level(Link(bandwidth, latency), outside, ranks_per_node)


def _table(rows: list[Row], title: str) -> Table:
    table = Table("pipeline", "time a step", "MB a rank", "messages", "against dense", "loses", title=title)
    dense = next((row.seconds for row in rows if row.candidate.name == "dense"), None)
    for column in table.columns[1:5]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            f"{row.candidate.name} (!)" if row.warnings else row.candidate.name,
            duration(row.seconds),
            f"{row.bytes / 1e6:.3g}" if row.bytes < 1e8 else f"{row.bytes / 1e6:.0f}",
            f"{row.messages:.4g}",
            "" if dense is None else f"{row.seconds / dense:.3g}",
            row.candidate.loses,
        )
    return table


def duration(seconds: float) -> str:
    """Seconds with a fitting unit and three digits."""
    for limit, unit in ((1e-3, "µs"), (1.0, "ms"), (120.0, "s"), (7200.0, "min")):
        if seconds < limit:
            return f"{seconds / {'µs': 1e-6, 'ms': 1e-3, 's': 1.0, 'min': 60.0}[unit]:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.candidate.name,
        "pipeline": repr(row.candidate.pipeline),
        "every": row.candidate.every,
        "seconds": row.seconds,
        "bytes": row.bytes,
        "messages": row.messages,
        "stages": row.cost.stages,
        "loses": row.candidate.loses,
        "warnings": row.warnings,
    }


def _draw(
    path: Path,
    chosen: list[Candidate],
    params: str,
    world: int,
    link: Link,
    codec_speed: Path | None,
    ranks_per_node: int | None,
) -> None:
    try:
        plt = pyplot()
    except ModuleNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    least = ranks_per_node or 1
    worlds = [least * 2**k for k in range(1, 20) if least * 2**k <= max(world, 2 * least)]
    curves: dict[str, list[float]] = {each.name: [] for each in chosen}
    for size in worlds:
        rows = compare(
            chosen,
            count(params),
            world=size,
            link=link,
            codec_speed=codec_speed,
            ranks_per_node=ranks_per_node,
            warn=False,
        )
        for row in rows:
            curves[row.candidate.name].append(row.seconds)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, seconds in curves.items():
        axes.loglog(worlds, seconds, marker="o", label=name)
    axes.set(xlabel="ranks", ylabel="seconds a step", title=f"{params} parameters", xticks=worlds, xticklabels=worlds)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
