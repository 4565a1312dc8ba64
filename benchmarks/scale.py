"""What a step would cost far beyond this machine: writes docs/scale.md from `plan`.

    python benchmarks/scale.py --write docs/scale.md              # some minutes on one core
    python benchmarks/scale.py --keep cells.json --most 200       # go on until 200 s are over, and keep what is planned
    python benchmarks/scale.py --params 124M --worlds 8 64        # to look at, on the screen

Every figure is a prediction of `plan`; nothing is measured but how long planning takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import inf
from pathlib import Path
from time import process_time

import torch

import ptcollect as pc
from ptcollect.commands.candidates import Candidate, candidate
from ptcollect.commands.plan import duration
from ptcollect.shapes import count

RANKS_PER_NODE = 8
TOKENS = 4096
"""Per rank and step, for the time of a token: at 6 multiplications and additions per parameter and token."""
FLOPS = 2e14
"""Of one rank, as a modern accelerator attains in training."""
INSIDE = pc.Link("400gbit", latency="10us")
LINKS = {
    "10 Gbit/s, 0.1 ms": pc.Link("10gbit", latency="0.1ms"),
    "1 Gbit/s, 10 ms": pc.Link("1gbit", latency="10ms"),
    "100 Mbit/s, 50 ms": pc.Link("100mbit", latency="50ms"),
}
NAMES = ("dense", "large", "bf16", "int8", "low_rank", "hierarchical", "diloco")
TITLES = {
    "dense": "dense ring",
    "large": "dense ring, 1 GiB buckets",
    "bf16": "bf16",
    "int8": "int8 + EF",
    "low_rank": "low_rank(4) + EF",
    "hierarchical": "hierarchical",
    "diloco": "DiLoCo(500)",
}
CHEAP = 0.5
"""A sync makes sense while it takes no longer than this part of a step's computation; it could hide behind it then."""


@dataclass(frozen=True)
class Cell:
    """One pipeline on one link in one world."""

    link: str
    world: int
    name: str
    seconds: float
    bytes: float
    planning: float


def cells(params: int, worlds: Sequence[int], keep: Path | None, most: float) -> list[Cell]:
    """All of them; the hierarchical one has nodes of eight ranks that share the link, the others a link a rank."""
    large = Candidate("large", pc.chain(pc.bucketize("1GiB"), pc.ring_reduce()))
    known = {name: large if name == "large" else candidate(name) for name in NAMES}
    found = [Cell(*row) for row in json.loads(keep.read_text())] if keep is not None and keep.exists() else []
    begin = process_time()
    for title, world in itertools.product(LINKS, worlds):
        for name in NAMES:
            if any((c.link, c.world, c.name) == (title, world, name) for c in found):
                continue
            if process_time() - begin > most:
                sys.exit(f"scale: {len(found)} planned; call again with the same --keep for the others")
            found.append(_cell(title, LINKS[title], known[name], params, world, process_time()))
            print(found[-1], file=sys.stderr, flush=True)
            if keep is not None:
                keep.write_text(json.dumps([astuple(cell) for cell in found]))
    return found


def _cell(title: str, link: pc.Link, each: Candidate, params: int, world: int, start: float) -> Cell:
    on = {"node": world // RANKS_PER_NODE, "local": RANKS_PER_NODE} if each.on_nodes else world
    links = pc.two_level(INSIDE, link, RANKS_PER_NODE) if each.on_nodes else link
    cost = pc.plan(each.pipeline, params, world=on, link=links, step=each.step)
    seconds, sent = cost.seconds / each.every, max(cost.bytes) / each.every
    return Cell(title, world, each.name, seconds, sent, process_time() - start)


def page(params: int, found: Sequence[Cell], worlds: Sequence[int]) -> str:
    """The page of the documentation."""
    compute = 6 * params * TOKENS / FLOPS
    slowest = max(found, key=lambda cell: cell.planning)
    text = f"""# At scale

<!-- Written by `python benchmarks/scale.py --write docs/scale.md`; change that instead. -->

What one step's synchronisation of {params / 1e9:g} billion float32 parameters would take, by [`plan`](planning.md) on
links that nobody here has: predictions, not measurements. Codecs count as free.

Every rank has a link of its own, but in *hierarchical* the {RANKS_PER_NODE} ranks of a node share one, with 400 Gbit/s
and 10 µs inside the node. *DiLoCo(500)* is one dense sync in 500 steps, counted for each step; between them nothing is
sent, and ranks drift apart. EF: `error_feedback`. Buckets are of 8 MiB where nothing else is said; four of them are in
flight at a time, and each four pay the latency of all rounds, so that large worlds need larger ones.

A step of {TOKENS} tokens a rank at {FLOPS / 1e12:g} TFLOP/s computes for {duration(compute)} (6 floating-point
operations a parameter and token). **Bold**: the sync takes at most {CHEAP:.0%} of that, so it could hide behind the
backward pass.
*A token* is the time of a step, computing and then synchronising, over the tokens of all ranks of the largest world.
"""
    for title in LINKS:
        lines = [*_table(title, found, worlds, compute), "", *_reading(title, found, worlds, compute)]
        text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    minutes = sum(cell.planning for cell in found if cell.name != "diloco") / 60
    return (
        text
        + f"""
## How long planning takes

The slowest of these plans, {TITLES[slowest.name]} on {slowest.world} ranks, took {slowest.planning:.0f} s of one core;
all of them {minutes:.1f} min.
"""
    )


def _table(title: str, found: Sequence[Cell], worlds: Sequence[int], compute: float) -> list[str]:
    table = _by_place(title, found)
    lines = [
        "| pipeline | " + " | ".join(f"{world} ranks" for world in worlds) + " | MB a rank and step | a token |",
        "| :-- |" + " --: |" * (len(worlds) + 2),
    ]
    for name in NAMES:
        row = [table[name, world] for world in worlds]
        times = [f"**{duration(c.seconds)}**" if c.seconds <= CHEAP * compute else duration(c.seconds) for c in row]
        if name == "hierarchical" and worlds[0] == RANKS_PER_NODE:
            times[0] += " (one node)"
        megabytes = f"{row[-1].bytes / 1e6:.3g}" if row[-1].bytes < 1e8 else f"{row[-1].bytes / 1e6:.0f}"
        # All ranks' tokens of a step, for the largest world.
        token = duration((compute + row[-1].seconds) / (TOKENS * row[-1].world))
        lines.append(f"| {TITLES[name]} | {' | '.join(times)} | {megabytes} | {token} |")
    return lines


def _reading(title: str, found: Sequence[Cell], all_worlds: Sequence[int], compute: float) -> list[str]:
    """Where each stops making sense, in words."""
    table = _by_place(title, found)
    lines = []
    for name in NAMES:
        worlds = [world for world in all_worlds if name != "hierarchical" or world > RANKS_PER_NODE]
        good = [world for world in worlds if table[name, world].seconds <= CHEAP * compute]
        ratios = [table[name, world].seconds / compute for world in worlds]
        if good == worlds:
            text = f"hides behind computation up to {worlds[-1]} ranks"
        elif good:
            text = f"hides behind computation up to {max(good)} ranks"
        else:
            text = f"takes {_times(ratios[0])} times as long as computing with {worlds[0]} ranks already"
        grows = table[name, worlds[-1]].seconds / table[name, worlds[0]].seconds
        if grows > 3:
            text += f"; latency decides in large worlds: {_times(grows)} times as long with {worlds[-1]} ranks"
        if name not in ("dense", "large", "diloco"):
            gains = [table["dense", world].seconds / table[name, world].seconds for world in worlds]
            if gains[0] > 1.2 > gains[-1]:
                text += f"; saves next to nothing with {worlds[-1]} ranks, where rounds cost more than bytes"
        lines.append(f"* {TITLES[name]} {text}.")
    return lines


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _by_place(title: str, found: Sequence[Cell]) -> Mapping[tuple[str, int], Cell]:
    return {(cell.name, cell.world): cell for cell in found if cell.link == title}


def main() -> None:
    """Plan, and write the page or show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", default="1B", help="how many parameters (default 1B)")
    parser.add_argument("--worlds", nargs="+", type=int, default=[8, 64, 512, 4096], help="numbers of ranks")
    parser.add_argument("--keep", type=Path, help="read what is planned already from here, and add to it")
    parser.add_argument("--most", type=float, default=inf, help="begin no plan after so many seconds")
    parser.add_argument("--write", type=Path, help="write the page here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    params = count(args.params)
    text = page(params, cells(params, args.worlds, args.keep, args.most), args.worlds)
    if args.write:
        args.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
