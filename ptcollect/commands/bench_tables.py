"""How the results of `bench` are printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = dict[str, Any]
ALL_PAIRS = 12  # more pairs than that are summed up
LEGEND = (
    "",
    "ratio: to dist.all_reduce in the same round",
    "limit: what the bytes sent would take on the fastest link of each rank, latency left out; of limit: limit / time",
    "off by: distance of the first call's result from the mean; error feedback sends what is missing in later calls",
)
MARK = "[bold red]FAILED[/bold red]"


def show(measured: Row) -> None:
    """Print what was measured, one table a subject."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    hosts = len(set(measured["hosts"]))
    console.print(
        f"{measured['world_size']} ranks on {hosts} host{'s' if hosts > 1 else ''} of {measured['cores']} cores, "
        f"torch {measured['torch']}, ptcollect {measured['ptcollect']}, medians of {measured['repeats']}\n"
    )
    console.print(_link(measured))
    if measured["codecs"]:
        console.print(_codecs(measured["codecs"]))
    for name, rows in groupby(measured["pipelines"], key=lambda row: str(row["tree"])):
        console.print(_pipelines(name, list(rows)))
    for line in LEGEND:
        console.print(f"[dim]{line}[/dim]", soft_wrap=True)
    for name, code in {row["name"]: row["pipeline"] for row in measured["pipelines"]}.items():
        if name != code:
            console.print(f"[dim]{escape(name)} = {escape(code)}[/dim]", soft_wrap=True)
    for row in [*measured["codecs"], *measured["pipelines"]]:
        if row["failed"]:
            what = row.get("name") or f"{row['codec']} {row['operation']}"
            console.print(f"{MARK} {escape(what)}: {escape(row['failed'])}", soft_wrap=True)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    return table


def _link(measured: Row) -> Table:
    table = _table("link, one message at a time", "from - to", "latency", "bandwidth")
    n = measured["world_size"]
    pairs = sorted(
        (measured["bandwidth"][i][j], measured["latency"][i][j], f"{i} - {j}")
        for i in range(n)
        for j in range(n)
        if i != j
    )
    if len(pairs) <= ALL_PAIRS:
        rows = sorted(pairs, key=lambda pair: [int(end) for end in pair[2].split(" - ")])
    else:
        typical = (median(pair[0] for pair in pairs), median(pair[1] for pair in pairs), f"median of {len(pairs)}")
        rows = [*((rate, latency, f"{ends} (slow)") for rate, latency, ends in pairs[:3]), typical, pairs[-1]]
    for rate, latency, ends in rows:
        table.add_row(ends, f"{latency * 1e6:.0f} us", f"{rate / 1e6:.0f} MB/s")
    table.add_row("each further message", f"{measured['message_overhead'] * 1e6:.1f} us", "")
    return table


def _codecs(rows: Sequence[Row]) -> Table:
    size = rows[0]["bytes"] / 2**20
    title = f"\ncodecs on rank 0, {size:.3g} MiB of float32; copies: time of copying the same, the limit"
    table = _table(title, "codec", "wire", "encode", "copies", "min-max", "decode", "copies", "min-max")
    by_codec: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_codec.setdefault(row["codec"], {})[row["operation"]] = row
    for codec, operations in by_codec.items():
        if "copy" in operations:
            table.add_row("copy", "100 %", f"{operations['copy']['gigabytes_per_second']:.1f} GB/s", "1.0")
            continue
        encode, decode = operations["encode"], operations["decode"]
        wire = f"{encode['wire_bytes'] / encode['bytes']:.1%}"
        table.add_row(codec, wire, *_speed(encode), *_speed(decode))
    return table


def _speed(row: Row) -> tuple[str, str, str]:
    if row["failed"]:
        return MARK, "", ""
    copies = row["copies"]
    return (
        f"{row['gigabytes_per_second']:.1f} GB/s",
        f"{copies['median']:.1f}",
        f"{copies['lowest']:.1f}-{copies['highest']:.1f}",
    )


def _pipelines(name: str, rows: Sequence[Row]) -> Table:
    size, leaves = rows[0]["bytes"], rows[0]["leaves"]
    title = f"\n{name}: {_bytes(size)} of float32 in {leaves} {'leaf' if leaves == 1 else 'leaves'}"
    headings = ("pipeline", "time", "min-max", "ratio", "min-max", "sent", "limit", "of limit", "off by")
    table = _table(title, *headings)
    for row in rows:
        sent, limit = _bytes(max(row["sent_bytes"])), _ms(row["limit_seconds"])
        name = escape(row["name"])
        if row["failed"]:
            table.add_row(name, MARK, "", "", "", sent, limit, "", "")
            continue
        seconds, ratio = row["seconds"], row["ratio"]
        table.add_row(
            name,
            f"{_ms(seconds['median'])} ms",
            f"{_ms(seconds['lowest'])}-{_ms(seconds['highest'])}",
            f"{ratio['median']:.2f}",
            f"{ratio['lowest']:.2f}-{ratio['highest']:.2f}",
            sent,
            f"{limit} ms",
            f"{row['fraction']:.1%}",
            "" if row["off"] is None else f"{row['off']:.1e}",
        )
    return table


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _bytes(number: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number} B"
