"""`python -m ptcollect bench`: measures a user's own links, codecs and pipelines."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import ptcollect as pc
from ptcollect.commands import bench_tables
from ptcollect.commands.arguments import read_pipeline, read_shapes, read_size, split
from ptcollect.commands.deadline import end_with_parent
from ptcollect.commands.local_ranks import run_local_ranks
from ptcollect.measure import codecs, link, pipelines
from ptcollect.measure.link import MeasuredLink
from ptcollect.measure.pipelines import PipelineTime
from ptcollect.shapes import of_size

NOT_LAUNCHED = (
    "no launcher started this process (RANK is not set): torchrun --nproc-per-node 4 -m ptcollect bench ..., or on "
    "this machine alone: python -m ptcollect bench --local 4"
)


def bench(
    pipeline_texts: Annotated[
        list[str] | None,
        typer.Option(
            "--pipelines",
            metavar="LIST",
            help="What to measure: short names (dense, bf16, int8, topk, low_rank) and Python expressions such as "
            "'chain(bucketize(), compress(\"int8\"), ring_reduce())', with commas between; may be given several times. "
            "Default: all short names.",
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option(metavar="LIST", help="Sizes of float32 gradients, laid out as a language model's.")
    ] = "4KiB,1MiB,25MiB",
    params: Annotated[
        str, typer.Option(metavar="COUNT", help='Parameters of your model, such as "124M"; instead of --sizes.')
    ] = "",
    shapes_file: Annotated[
        Path | None,
        typer.Option(
            "--model-shapes",
            metavar="FILE",
            help='Shapes of your model, as JSON {"fc.weight": [10, 256], ...}; instead of --sizes.',
        ),
    ] = None,
    codec_names: Annotated[
        str, typer.Option("--codecs", metavar="LIST", help="Codecs to time, by name; may be empty.")
    ] = "bf16,fp16,fp8,int8,int4,sign,ternary,topk",
    codec_size: Annotated[str, typer.Option(metavar="SIZE", help="Float32 numbers that codecs work on.")] = "16MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 7,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write every sample here (rank 0); plan --link reads it."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that one operation waits for other ranks.")] = 120.0,
    local: Annotated[
        int, typer.Option(min=0, metavar="N", help="Run N ranks on this machine instead of being launched.")
    ] = 0,
    limit: Annotated[
        float, typer.Option(min=1.0, help="With --local: seconds after which all ranks are killed.")
    ] = 900,
) -> None:
    """Measure your links, codecs and pipelines where they will run: under the launcher that training will have.

    torchrun --nproc-per-node 4 -m ptcollect bench --params 124M --json measured.json

    Rank 0 prints: latency and bandwidth between ranks; codecs beside copying memory; pipelines beside dist.all_reduce
    of a flat buffer in the same rounds, with what the link alone would take for their bytes. The exit code is 1 if
    anything could not be measured.
    """
    chosen = _read(lambda: _pipelines(pipeline_texts or ["dense,bf16,int8,topk,low_rank"]), "--pipelines")
    trees = _read(lambda: _trees(sizes, params, shapes_file), "--sizes, --params, --model-shapes")
    chosen_codecs = _read(lambda: [pc.codecs.by_name(name) for name in split(codec_names)], "--codecs")
    codec_bytes = _read(lambda: read_size(codec_size), "--codec-size")
    if local:
        arguments = ["bench", "--sizes", sizes, "--params", params, "--codecs", codec_names, "--codec-size", codec_size]
        arguments += ["--repeats", str(repeats), "--timeout", str(timeout)]
        arguments += [part for text in pipeline_texts or [] for part in ("--pipelines", text)]
        arguments += ["--model-shapes", str(shapes_file)] if shapes_file else []
        arguments += ["--json", str(json_file)] if json_file else []
        raise typer.Exit(run_local_ranks(local, arguments, limit))
    if "RANK" not in os.environ:
        raise typer.BadParameter(NOT_LAUNCHED, param_hint="bench")
    end_with_parent()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"bench: {str(error).splitlines()[0]}\npython -m ptcollect doctor finds out why\n")
        raise typer.Exit(1) from None
    if dist.get_world_size() < 2:
        raise typer.BadParameter("one rank has no link to measure: launch at least two", param_hint="bench")
    measured = _measure(chosen, trees, chosen_codecs, codec_bytes, repeats)
    failed = False
    if dist.get_rank() == 0:
        bench_tables.show(measured)
        if json_file:
            json_file.write_text(json.dumps(measured, indent=1) + "\n")
        failed = any(row["failed"] for row in [*measured["codecs"], *measured["pipelines"]])
    dist.barrier()
    dist.destroy_process_group()
    raise typer.Exit(int(failed))


# What to measure ----------------------------------------------------------------------------------------------------

Shapes = dict[str, tuple[int, ...]]


def _read(read: Callable[[], Any], option: str) -> Any:
    """What `read` returns; what is wrong with it as a complaint about the option."""
    try:
        return read()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _pipelines(texts: Sequence[str]) -> dict[str, pc.Pipeline]:
    return {name: read_pipeline(name) for text in texts for name in split(text)}


def _shapes(params: int | str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in of_size(params).items()}


def _trees(sizes: str, params: str, shapes_file: Path | None) -> dict[str, Shapes]:
    """Trees to synchronise, by what the user called them."""
    trees: dict[str, Shapes] = {}
    if shapes_file:
        trees[shapes_file.name] = read_shapes(shapes_file)
    if params:
        trees[f"{params} parameters"] = _shapes(params)
    return trees or {size: _shapes(max(1, read_size(size) // 4)) for size in split(sizes)}


# Measure ------------------------------------------------------------------------------------------------------------


def _measure(
    chosen: Mapping[str, pc.Pipeline],
    trees: Mapping[str, Shapes],
    chosen_codecs: Sequence[pc.Codec],
    codec_bytes: int,
    repeats: int,
) -> dict[str, Any]:
    """Everything, as it goes into JSON; the same on all ranks, but for the codecs, which only rank 0 times."""
    rank, n = dist.get_rank(), dist.get_world_size()
    total = link.rounds(n) + codecs.rounds(len(chosen_codecs), repeats)
    total += len(trees) * pipelines.rounds(len(chosen), repeats)
    with _progress(total, shown=rank == 0 and sys.stderr.isatty()) as tick:
        wire = link.measure_link(min(repeats, 5), tick)
        speeds = codecs.measure_codecs(chosen_codecs, codec_bytes, repeats, tick) if rank == 0 else []
        dist.barrier()
        rows = [
            _row(name, len(shapes), time, wire)
            for name, shapes in trees.items()
            for time in pipelines.measure_pipelines(chosen, shapes, repeats, tick)
        ]
    hosts: list[Any] = [None] * n
    dist.all_gather_object(hosts, platform.node())
    return {
        "ptcollect": pc.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hosts": hosts,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "world_size": n,
        "repeats": repeats,
        **asdict(wire),
        "codecs": [{**asdict(speed), "gigabytes_per_second": speed.gigabytes_per_second} for speed in speeds],
        "pipelines": rows,
    }


def _row(tree: str, leaves: int, time: PipelineTime, wire: MeasuredLink) -> dict[str, Any]:
    """One contender with what the link alone would take, and the fraction of that rate which it reached."""
    limit = wire.limit(time.sent_bytes)
    return {
        "tree": tree,
        "leaves": leaves,
        **asdict(time),
        "limit_seconds": limit,
        "fraction": None if time.seconds is None else limit / time.seconds.median,
    }


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, and what moves it on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:32.32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=total)
        started = False

        def tick(doing: str) -> None:
            nonlocal started
            bar.update(task, description=doing, advance=int(started))
            started = True

        yield tick
