"""Make docs/performance.md and its plots from what `run.py` and `soak.py` wrote.

    python benchmarks/report.py benchmarks/results/*.json --write docs/performance.md

The page says nothing that is not in the files; a test compares it with what this makes of them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import Results, Row, byte_size, in_unit, ratio, table
from goals import judge
from report_text import HEAD, SECTIONS, SIZES

MIB = 2**20
LINKS = {"loopback": "Loopback", "200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s uplinks"}


def load(files: Iterable[Path]) -> tuple[Results, dict[str, Any]]:
    """All files as one: rows of a later file take the place of an earlier one's; and what a soak wrote, if one did."""
    parts: list[tuple[str, Results]] = []
    soak: dict[str, Any] = {}
    for file in sorted(files):
        data = json.loads(file.read_text())
        if "rows" in data:
            parts.append((file.name, Results.from_json(data)))
        else:
            soak = data
    rows = {(*row.group, row.key): row for _, part in parts for row in part.rows}
    skipped = [f"{what} ({name})" for name, part in parts for what in part.skipped]
    return Results({name: part.machine for name, part in parts}, list(rows.values()), skipped), soak


# The page -----------------------------------------------------------------------------------------------------------


def page(results: Results, soak: Mapping[str, Any]) -> str:
    """The whole page as Markdown."""
    parts = [HEAD, _machine(results.machine), _goals(results), _sizes(results)]
    parts += [_scenario(results, name, title, text) for name, title, text in SECTIONS]
    parts += [_hooks(results), _soak(soak), _skipped(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(machines: Mapping[str, Mapping[str, Any]]) -> str:
    first = next(iter(machines.values()), {})
    software = f"Linux {first.get('kernel')}, Python {first.get('python')}, torch {first.get('torch')}"
    tcp = f"TCP {first.get('tcp_shaped')} behind shaped links, {first.get('tcp_loopback')} on loopback"
    what = f"{first.get('cpu')}, {first.get('cores')} cores, {software}; {tcp}"
    lines = [
        (f"`{name}`", machine["date"], f"`{machine['revision']}`", str(machine["load_before"]))
        for name, machine in machines.items()
    ]
    shared = "A load above 0.5 before a run means that other work shared the cores with it."
    return f"## Machine\n\n{what}. {shared}\n\n{table(('file', 'measured', 'revision', 'load before'), lines, left=3)}"


def _goals(results: Results) -> str:
    verdicts = judge(results)
    lines = [
        (verdict.goal.text, f"{verdict.got:.3f}", "met" if verdict.met else "**missed**")
        for verdict in sorted(verdicts, key=lambda verdict: verdict.met)
    ]
    text = f"{sum(v.met for v in verdicts)} of {len(verdicts)} are met. Keys are those of the tables below."
    tcp = results.find("dense", "200mbit", 4, 0, "tcp")
    if tcp is not None and tcp.reached is not None:
        text += (
            f" One plain TCP connection that moves the bytes of a dense sync reaches {tcp.reached:.3f} of the limit at "
            "200 Mbit/s: a frame of 1514 bytes carries 1448 of payload."
        )
    return f"## Goals\n\n{text}\n\n{table(('goal', 'measured', ''), lines)}"


def _sizes(results: Results) -> str:
    """A table per link: one line a size, one column a contender."""
    parts = []
    for link, name in LINKS.items():
        groups = [rows for group, rows in results.groups().items() if group[:2] == ("sizes", link)]
        if not groups:
            continue
        keys = list(dict.fromkeys(row.key for rows in groups for row in rows))
        others = [key for key in keys if key not in ("all_reduce", "copy", "tcp")]
        lines = []
        for rows in sorted(groups, key=lambda rows: rows[0].size):
            same = {row.key: row for row in rows}
            base = same["all_reduce"]
            limit = "" if base.limit is None else in_unit(base.limit, "s")
            lines.append(
                [byte_size(base.size), limit, _time_and_share(base), *(_cell(same.get(key), base) for key in others)]
            )
        header = ("size", "limit", "all_reduce", *others)
        parts.append(f"### {name}\n\n{table(header, lines)}")
    if not parts:
        return ""
    return "\n\n".join(["## Dense sync by size", SIZES, *parts])


def _cell(row: Row | None, base: Row) -> str:
    if row is None:
        return ""
    share = "" if row.reached is None else f", {_percent(row.reached)}"
    return f"{ratio(row.samples, base.samples).median:.2f}{share}"


def _time_and_share(row: Row) -> str:
    return in_unit(row.median, "s") + ("" if row.reached is None else f", {_percent(row.reached)}")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 or 0.9 < share < 1 else f"{share:.0%}"


def _scenario(results: Results, name: str, title: str, text: str) -> str:
    parts = []
    for (scenario, link, world, _), rows in results.groups().items():
        if scenario != name:
            continue
        where = [LINKS[link]] if link in LINKS else []
        where += [f"{world} ranks"] * (world > 1 and name not in ("overhead", "memory"))
        heading = "" if name == "memory" or not where else f"### {', '.join(where)}\n\n"
        if name != "overhead":
            parts.append(heading + _rows(rows))
        elif not parts:  # one table for all sizes
            parts.append(_rows([row for row in results.rows if row.scenario == name]))
    return "\n\n".join([f"## {title}", text, *parts]) if parts else ""


def _rows(rows: Sequence[Row]) -> str:
    same = {row.key: row for row in rows}
    lines = []
    for row in rows:
        base = same.get(row.baseline)
        quotient = "" if base is None or base is row else str(ratio(row.samples, base.samples))
        spread = f"{in_unit(min(row.samples), row.unit)} to {in_unit(max(row.samples), row.unit)}"
        limit = "" if row.limit is None else in_unit(row.limit, row.unit)
        reached = "" if row.reached is None else _percent(row.reached)
        title = row.title if row.title == row.key else f"{row.key}: {_code(row.title)}"
        lines.append([title, in_unit(row.median, row.unit), spread, quotient, limit, reached])
    header = ["what", "median", "range", "ratio", "limit", "reached"]
    kept = [i for i in range(len(header)) if any(line[i] for line in lines)]
    return table([header[i] for i in kept], [[line[i] for i in kept] for line in lines])


def _code(title: str) -> str:
    return f"`{title}`" if "(" in title and " hook" not in title and "_hook of" not in title else title


def _hooks(results: Results) -> str:
    rows = [row for row in results.rows if row.scenario == "hooks"]
    if not rows:
        return ""
    lines = [(row.title, f"{row.samples[0]:g} of {row.limit:g}", row.note) for row in rows]
    return (
        "## PowerSGD under DDP\n\nSteps that 4 gloo ranks made of a small model, each case in processes of its own.\n\n"
        + table(("hook and case", "steps", "outcome"), lines)
    )


def _soak(soak: Mapping[str, Any]) -> str:
    if not soak:
        return ""
    lines = [
        (
            name,
            str(each["calls"]),
            in_unit(each["first_third"], "s"),
            in_unit(each["last_third"], "s"),
            f"{each['drift']:.2f}",
        )
        for name, each in soak["pipelines"].items()
    ]
    slope, machine = soak["memory_slope"], soak["machine"]
    counts = [f"{name} {soak[name]['first']} to {soak[name]['last']}" for name in ("descriptors", "threads")]
    text = (
        f"{soak['ranks']} ranks for {soak['minutes']:.1f} minutes, every pipeline in turn, with an error on one rank "
        f"now and then ({soak['errors_recovered']} recovered). Resident memory of the rank where it grows most: "
        f"{slope['mb_per_hour']:+.1f} MB/hour, 95 % between {slope['low']:+.1f} and {slope['high']:+.1f}, over the "
        f"last two thirds of the run. Open {' and '.join(counts)}, on the rank with the largest growth. Measured "
        f"{machine['date']} at `{machine['revision']}`."
    )
    return f"## Soak\n\n{text}\n\n" + table(("pipeline", "calls", "first third", "last third", "ratio"), lines)


def _skipped(results: Results) -> str:
    return "\n".join(["## Not measured", "", *(f"* {what}" for what in results.skipped)]) if results.skipped else ""


# Plots --------------------------------------------------------------------------------------------------------------


def digest(results: Results) -> str:
    """What a plot carries of the data it was made from, so that a test can tell whether it is of the same."""
    return hashlib.sha256(json.dumps(results.as_json(), sort_keys=True).encode()).hexdigest()[:16]


def plots(results: Results) -> dict[str, str]:
    """File name -> SVG, for those that there is data for."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "ptcollect", "svg.fonttype": "none", "font.size": 9})
    drawn = {"sizes": _plot_sizes(results), "training": _plot_training(results), "memory": _plot_memory(results)}
    out = {}
    for name, figure in drawn.items():
        if figure is not None:
            stream = io.StringIO()
            described = {"Date": None, "Description": f"made by benchmarks/report.py from data {digest(results)}"}
            figure.savefig(stream, format="svg", metadata=described, bbox_inches="tight")
            out[f"performance-{name}.svg"] = "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
    return out


def _plot_sizes(results: Results) -> Any:
    from matplotlib.figure import Figure

    links = [link for link in LINKS if any(row.scenario == "sizes" and row.link == link for row in results.rows)]
    if not links:
        return None
    figure = Figure(figsize=(3.2 * len(links), 2.8), layout="constrained")
    axes = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
    for axis, link in zip(axes, links, strict=True):
        for key in ("ring", "direct", "auto", "all_gather"):
            points = []
            for row in results.rows:
                if (row.scenario, row.link, row.key) == ("sizes", link, key):
                    base = results.find("sizes", link, row.world, row.size, "all_reduce")
                    assert base is not None
                    points.append((row.size, ratio(row.samples, base.samples).median))
            if points:
                axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=key)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(xscale="log", title=LINKS[link], xlabel="bytes")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("time / dist.all_reduce")
    axes[-1].legend()
    return figure


def _plot_training(results: Results) -> Any:
    from matplotlib.figure import Figure

    links = [link for link in LINKS if any(row.scenario == "training" and row.link == link for row in results.rows)]
    if not links:
        return None
    figure = Figure(figsize=(3.2 * len(links), 2.8), layout="constrained")
    axes = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
    for axis, link in zip(axes, links, strict=True):
        rows = [row for row in results.rows if (row.scenario, row.link) == ("training", link)]
        colors = ["C0" if row.key.startswith(("hook", "overlap", "sync")) else "grey" for row in rows]
        axis.barh([row.key for row in rows], [row.median * 1e3 for row in rows], color=colors)
        axis.set(title=LINKS[link], xlabel="ms per step")
    axes[0].invert_yaxis()
    return figure


def _plot_memory(results: Results) -> Any:
    from matplotlib.figure import Figure

    rows = {row.key: row for row in results.rows if row.scenario == "memory"}
    keys = [key for key in rows if f"{key} donated" in rows]
    if not keys:
        return None
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axis = figure.subplots()
    for offset, (suffix, label) in enumerate((("", "as it is"), (" donated", "donate=True"))):
        places = [i + 0.4 * offset for i in range(len(keys))]
        axis.barh(places, [rows[key + suffix].median / 1e6 for key in keys], height=0.38, label=label)
    axis.axvline(rows["tree"].median / 1e6, color="grey", linewidth=0.8)
    axis.set(
        yticks=[i + 0.2 for i in range(len(keys))],
        yticklabels=keys,
        xlabel="MB above the level before (line: the tree)",
    )
    axis.invert_yaxis()
    axis.legend()
    return figure


def main() -> None:
    """Write the page and its plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON that run.py or soak.py wrote")
    parser.add_argument(
        "--write", type=Path, help="the page; plots go into images/ beside it (default: print the page)"
    )
    args = parser.parse_args()
    results, soak = load(args.files)
    if args.write is None:
        print(page(results, soak))
        return
    args.write.write_text(page(results, soak))
    images = args.write.parent / "images"
    images.mkdir(exist_ok=True)
    for name, svg in plots(results).items():
        (images / name).write_text(svg)


if __name__ == "__main__":
    main()
