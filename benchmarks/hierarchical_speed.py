"""Hierarchical sync against a flat ring, on nodes whose ranks share one slow uplink.

    python benchmarks/hierarchical_speed.py                    # 2 nodes x 2 ranks, 100 Mbit/s between nodes; needs root
    python benchmarks/hierarchical_speed.py --rate 200mbit --repeats 9 --json out.json --markdown

What simulations send over an uplink predicts the times; README.md beside this file says how.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import netlab
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ptcollect as pc

NODES, LOCAL = 2, 2
TIMEOUT_SECONDS = 200.0
TOLERANCE = 0.15
"""How far the measured factor may fall below the predicted one, for dense sync."""

FLAT = pc.chain(pc.bucketize(), pc.ring_reduce())
DENSE = pc.chain(pc.bucketize(), pc.shard("local"), pc.ring_reduce(axis="node"))
INT8 = pc.chain(pc.bucketize(), pc.shard("local"), pc.compress("int8"), pc.ring_reduce(axis="node"))


@dataclass(frozen=True)
class Row:
    """One contender: its times, and how much faster than the flat ring it is and should be."""

    pipeline: str
    uplink_bytes: int
    seconds: list[float]
    factor: float
    lowest: float
    highest: float
    predicted: float
    link_used: float
    met: bool | None


# Prediction ---------------------------------------------------------------------------------------------------------


def flat_uplink_bytes(tree: ranks.Tree) -> int:
    """What the flat ring sends out of a node: ranks send to the right only, so all that a node's last rank sends."""
    sent = pc.simulate(FLAT, [tree] * (NODES * LOCAL)).bytes
    return max(sent[node * LOCAL + LOCAL - 1] for node in range(NODES))


def sharded_uplink_bytes(pipeline: pc.Pipeline, tree: ranks.Tree) -> int:
    """What it sends out of a node: all that the node's ranks send, less what they would send if it were alone."""
    whole = pc.simulate(pipeline, [tree] * (NODES * LOCAL), axes={"node": NODES, "local": LOCAL}).bytes
    alone = sum(pc.simulate(pipeline, [tree] * LOCAL, axes={"node": 1, "local": LOCAL}).bytes)
    return max(sum(whole[node * LOCAL : (node + 1) * LOCAL]) - alone for node in range(NODES))


# Measurement --------------------------------------------------------------------------------------------------------


def on_rank(rounds: int, out: Path) -> None:
    """Check and time all contenders on this rank; rank 0 writes the seconds of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (NODES, LOCAL), mesh_dim_names=("node", "local"))
    on_mesh: Callable[[pc.Pipeline], Any] = lambda pipeline: partial(pipeline, group=mesh)  # noqa: E731
    contenders = [
        ranks.Contender("flat", repr(FLAT), FLAT),
        ranks.Contender("dense", repr(DENSE), on_mesh(DENSE)),
        ranks.Contender("int8", repr(INT8), on_mesh(INT8), tolerance=ranks.BF16),
    ]
    tree = ranks.gradients(ranks.transformer(blocks=6))
    for contender in contenders:
        ranks.check(contender, tree)
    seconds = ranks.time_in_turn(contenders, tree, rounds, calls=1)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def measure(rate: str, tcp: str | None, rounds: int) -> list[Row]:
    """Run the contenders on the network and compare with what their bytes predict."""
    with tempfile.TemporaryDirectory() as folder, netlab.node_network(NODES, LOCAL, rate, tcp) as net:
        out = Path(folder) / "seconds.json"
        net.run([sys.executable, __file__, "--repeats", str(rounds), "--on-rank", str(out)], TIMEOUT_SECONDS)
        seconds: list[list[float]] = json.loads(out.read_text())
    tree = ranks.rebuild(shapes := ranks.transformer(blocks=6), map(torch.zeros, ranks.leaves(shapes)))
    sent = [flat_uplink_bytes(tree), sharded_uplink_bytes(DENSE, tree), sharded_uplink_bytes(INT8, tree)]
    rows = []
    for pipeline, uplink_bytes, samples in zip((FLAT, DENSE, INT8), sent, seconds, strict=True):
        factors = [flat / own for flat, own in zip(seconds[0], samples, strict=True)]
        predicted = sent[0] / uplink_bytes
        rows.append(
            Row(
                pipeline=repr(pipeline),
                uplink_bytes=uplink_bytes,
                seconds=samples,
                factor=median(factors),
                lowest=min(factors),
                highest=max(factors),
                predicted=predicted,
                link_used=uplink_bytes * 8 / netlab.bits_per_second(rate) / median(samples),
                met=abs(median(factors) / predicted - 1) <= TOLERANCE if pipeline == DENSE else None,
            )
        )
    return rows


# Table --------------------------------------------------------------------------------------------------------------

HEADER = ("pipeline", "uplink MB", "median", "faster", "min-max", "predicted", "within 15 %?", "link used")


def format_table(rows: Sequence[Row], *, markdown: bool) -> str:
    """The rows as a table, plain or in Markdown."""
    lines = [HEADER]
    for row in rows:
        pipeline = f"`{row.pipeline}`" if markdown else row.pipeline
        lines.append(
            (
                pipeline,
                f"{row.uplink_bytes / 1e6:.1f}",
                f"{median(row.seconds) * 1e3:.0f} ms",
                f"{row.factor:.2f}",
                f"{row.lowest:.2f}-{row.highest:.2f}",
                f"{row.predicted:.2f}",
                {None: "", True: "yes", False: "NO"}[row.met],
                f"{row.link_used:.0%}",
            )
        )
    if markdown:
        lines.insert(1, (":--", *["--:"] * (len(HEADER) - 1)))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="a node's uplink, as tc writes it (default 100mbit)")
    parser.add_argument(
        "--tcp", choices=("reno", "bbr", "cubic", "machine"), default="reno", help="congestion control (default reno)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="rounds after the warm-up (default 7)")
    parser.add_argument("--json", type=Path, help="also write the rows and all samples here")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--on-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_rank:
        on_rank(args.repeats, args.on_rank)
        return
    netlab.exit_on_sigterm()
    try:
        rows = measure(args.rate, None if args.tcp == "machine" else args.tcp, args.repeats)
    except netlab.NetlabError as error:
        sys.exit(f"hierarchical_speed: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(format_table(rows, markdown=args.markdown))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
