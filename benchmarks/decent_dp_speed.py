"""Gossip on parameters: the decent-dp package beside `gossip_avg`, on the topologies that both have.

    sudo .venv/bin/python benchmarks/decent_dp_speed.py             # 4 ranks behind links of 1 Gbit/s
    .venv/bin/python benchmarks/decent_dp_speed.py --rate loopback  # without root; bytes on the wire are not counted

Every contender trains the same 25 MB of parameters: backward, a step of SGD, and the average of its topology. First
both must come to the same mean of parameters that differ from rank to rank. Then contenders run in turn, blocks of
`STEPS` steps from a barrier on until all is sent, the slowest rank counts, and ratios are medians over rounds. All let
parameters travel during backward, and step with the gradient of what they were. At last, which numbers of ranks either
runs on. Needs `pip install decent-dp`; measured with 0.2.3.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import netlab
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ptcollect as pc

WORLD_SIZE = 4
STEPS = 4  # in a block
SETTLE = 9  # steps after which every topology here has come to the mean
SIZES = (3, 4, 6)


@dataclass(frozen=True)
class Pair:
    """A topology of decent-dp and pipelines that do the same on 4 ranks."""

    topology: str
    ours: tuple[pc.Pipeline, ...]


def gossip(name: str) -> pc.Pipeline:
    """Gossip in buckets."""
    return pc.chain(pc.bucketize(), pc.gossip_avg(name))


PAIRS = (
    Pair("complete", (pc.chain(pc.bucketize(), pc.ring_reduce()), gossip("complete"))),
    Pair("ring", (gossip("bipartite"),)),  # decent-dp's alternates between the two matchings of a ring
    Pair("one-peer-exp", (gossip("base_k"), gossip("one_peer_exponential"))),
)


@dataclass(frozen=True)
class Row:
    """One contender; the first of a topology is the baseline."""

    topology: str
    contender: str
    off: float
    """Largest difference of a parameter from the mean over ranks, relative, after `SETTLE` steps."""
    seconds: list[float]
    """Of one step, the slowest rank's, by round."""
    sent_bytes: float | None
    """By one rank in one step, headers included; None: not counted."""
    ratio: float = 1.0
    lowest: float = 1.0
    highest: float = 1.0


# One rank -----------------------------------------------------------------------------------------------------------


class Weights(nn.Module):
    """Parameters, and a loss whose gradient is the number that it is given."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, slope: float) -> Tensor:
        return slope * torch.stack([weight.sum() for weight in self.weights]).sum()


@dataclass(frozen=True)
class Training:
    """A training step, and a wait for what it has left under way."""

    step: Callable[[float], None]
    drain: Callable[[], None] = lambda: None


def theirs(topology: str, model: Weights) -> Training:
    """Training by decent-dp's wrapper."""
    from decent_dp.ddp import DecentralizedDataParallel

    wrapped = DecentralizedDataParallel(
        model, lambda params: torch.optim.SGD([p for _, p in params], lr=1.0), topology=topology, _local_world_size=1
    )

    def drain() -> None:
        for work in wrapped._comm_ops:
            if work is not None:
                work.wait()

    return Training(lambda slope: wrapped(slope).backward(), drain)


def ours(pipeline: pc.Pipeline, model: Weights) -> Training:
    """The same with a pipeline: parameters travel while backward runs."""
    optimizer, states = torch.optim.SGD(model.parameters(), lr=1.0), [pipeline.init(model)]

    def step(slope: float) -> None:
        params = {name: p.detach() for name, p in model.named_parameters()}
        pending = pipeline.start(params, states[0])
        optimizer.zero_grad()
        model(slope).backward()
        mixed, states[0] = pending.wait()
        for name, value in mixed.items():
            params[name].copy_(value)
        optimizer.step()

    return Training(step)


Make = Callable[[Weights], Training]


def contenders(pair: Pair) -> dict[str, Make]:
    """What makes a training of a model, by what it is called."""
    found: dict[str, Any] = {f'decent-dp "{pair.topology}"': lambda model: theirs(pair.topology, model)}
    for pipeline in pair.ours:
        found[repr(pipeline)] = lambda model, pipeline=pipeline: ours(pipeline, model)
    return found


def settled(make: Make) -> float:
    """How far from the mean parameters are that began as rank + 1 and were only averaged since."""
    model = Weights([(40, 7), (7,)])
    training = make(model)
    training.step(-float(dist.get_rank() + 1))
    for _ in range(SETTLE):
        training.step(0.0)
    training.drain()
    mean = (dist.get_world_size() + 1) / 2
    worst = torch.stack([(weight - mean).abs().max() / mean for weight in model.weights]).max().detach()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def transmitted() -> int | None:
    """Bytes that this rank's own link has sent; None on loopback, which ranks share."""
    own = os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    for line in Path("/proc/net/dev").read_text().splitlines() if own else ():
        if line.strip().startswith("eth0:"):
            return int(line.split()[9])
    return None


def measure(rounds: int) -> list[Row]:
    """Every topology's contenders in turn."""
    shapes = [tuple(shape) for shape in ranks.leaves(ranks.transformer(blocks=6))]
    rows = []
    for pair in PAIRS:
        steps = {name: make(Weights(shapes)) for name, make in contenders(pair).items()}
        off = {name: settled(make) for name, make in contenders(pair).items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        sent: dict[str, list[int]] = {name: [] for name in steps}
        names = list(steps)
        for number in range(rounds + 1):
            turned = names[number % len(names) :] + names[: number % len(names)]
            for name in turned:
                taken, count = block(steps[name])
                if number:  # the first is a warm-up
                    seconds[name].append(taken)
                    sent[name].extend([] if count is None else [count])
        base = seconds[names[0]]
        for name in names:
            ratios = [own / theirs for own, theirs in zip(seconds[name], base, strict=True)]
            weighed = median(sent[name]) if sent[name] else None
            rows.append(
                Row(pair.topology, name, off[name], seconds[name], weighed, median(ratios), min(ratios), max(ratios))
            )
    return rows


def block(training: Training) -> tuple[float, int | None]:
    """Seconds and bytes of a step, the mean of a block of them; seconds on the slowest rank."""
    dist.barrier()
    before, began = transmitted(), time.perf_counter()
    for _ in range(STEPS):
        training.step(1e-3)
    training.drain()
    taken = torch.tensor((time.perf_counter() - began) / STEPS, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)  # and so all have sent all
    after = transmitted()
    return float(taken), None if after is None or before is None else (after - before) // STEPS


def worlds() -> dict[str, str]:
    """What comes of each contender on this number of ranks."""
    found = {}
    for pair in PAIRS:
        for name, make in contenders(pair).items():
            try:
                off = settled(make)
                found[name] = f"{off:.0e} off the mean" if off > 1e-6 else "the mean"
            except Exception as error:
                found[name] = f"{type(error).__name__}" + f": {error}" * bool(str(error))
    return found


def on_rank(what: str, rounds: int, out: Path) -> None:
    """What every rank runs."""
    from loguru import logger

    logger.remove()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    result = [asdict(row) for row in measure(rounds)] if what == "speed" else worlds()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# All ----------------------------------------------------------------------------------------------------------------


def launched(what: str, n: int, rate: str | None, rounds: int) -> Any:
    """What `on_rank` found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, __file__, "--on-rank", what, "--repeats", str(rounds), "--out", str(out)]
        netlab.run_ranks(command, n, rate, timeout=200)
        return json.loads(out.read_text())


HEADER = ("decent-dp's topology", "contender", "off", "step", "ratio", "min-max", "MB sent", "ratio of bytes")


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = [HEADER, (":--", ":--", *["--:"] * 6)]
    base = rows[0]
    for row in rows:
        base = row if row.topology != base.topology else base
        counted = row.sent_bytes is not None and base.sent_bytes is not None
        lines.append(
            (
                row.topology,
                f"`{row.contender}`",
                f"{row.off:.0e}",
                f"{median(row.seconds) * 1e3:.0f} ms",
                f"{row.ratio:.2f}",
                f"{row.lowest:.2f}-{row.highest:.2f}",
                f"{row.sent_bytes / 1e6:.1f}" if counted else "",
                f"{row.sent_bytes / base.sent_bytes:.2f}" if counted else "",
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help='of each link, as tc writes it, or "loopback" (default 1gbit)')
    parser.add_argument("--repeats", type=int, default=7, help="rounds after the warm-up (default 7)")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--on-rank", choices=("speed", "worlds"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_rank:
        on_rank(args.on_rank, args.repeats, args.out)
        return
    netlab.exit_on_sigterm()
    try:
        rows = [Row(**row) for row in launched("speed", WORLD_SIZE, netlab.link_rate(args.rate), args.repeats)]
        print(f"{WORLD_SIZE} ranks, links of {args.rate}\n\n{table(rows)}\n", flush=True)
        outcomes = {n: launched("worlds", n, None, 1) for n in SIZES}
    except netlab.NetlabError as error:
        sys.exit(f"decent_dp_speed: {error}")
    print(f"| contender | {' | '.join(f'{n} ranks' for n in SIZES)} |\n|:--|{':--|' * len(SIZES)}")
    for name in outcomes[SIZES[0]]:
        print(f"| `{name}` | {' | '.join(outcomes[n][name] for n in SIZES)} |")
    if args.json:
        args.json.write_text(json.dumps({"speed": [asdict(row) for row in rows], "ranks": outcomes}, indent=1))


if __name__ == "__main__":
    main()
