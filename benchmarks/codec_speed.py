"""How fast each codec packs and unpacks on one core, as ratios to copying the same float32 numbers.

    python benchmarks/codec_speed.py                       # all codecs, 32 MB, about a minute
    python benchmarks/codec_speed.py --only int8 sign --repeats 31 --markdown --json out.json

See README.md beside this file for what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time

import torch
from torch import Tensor

import ptcollect as pc

KEY = pc.codecs.Key(step=0, path="benchmark", rank=0, hop=0)

CODECS: dict[str, pc.Codec] = {
    "bf16": pc.codecs.bf16(),
    "fp16": pc.codecs.fp16(),
    "fp8": pc.codecs.fp8(),
    "int8": pc.codecs.int8(),
    "int8 stochastic": pc.codecs.int8(stochastic=True),
    "int4": pc.codecs.int4(),
    "int4 stochastic": pc.codecs.int4(stochastic=True),
    "sign": pc.codecs.sign(),
    "ternary": pc.codecs.ternary(),
    "ternary stochastic": pc.codecs.ternary(stochastic=True),
    "topk(1 %)": pc.codecs.topk(0.01),
    "topk(1 %, int8)": pc.codecs.topk(0.01, values="int8"),
    "randk(1 %)": pc.codecs.randk(0.01),
}

# The largest ratios that are good enough: encode, decode.
GOALS = {"bf16": (1.2, 1.2), "int8": (2.5, 1.2), "sign": (2.0, 2.0), "topk(1 %)": (5.0, 2.0)}

CLOCKS = {"cpu": thread_time, "wall": perf_counter}


@dataclass(frozen=True)
class Row:
    """One operation of one codec; ratios are to the copy of the same round."""

    codec: str
    operation: str
    ratio: float
    """Median over the rounds."""
    best: float
    """Shortest time over the shortest copy."""
    lowest: float
    highest: float
    gigabytes_per_second: float
    """Of float32 numbers, by the median time."""
    goal: float | None
    samples: list[float]

    @property
    def met(self) -> bool | None:
        """Whether the ratio reaches its goal; None without a goal."""
        return None if self.goal is None else self.ratio <= self.goal


@dataclass(frozen=True)
class Operation:
    """Something to time."""

    codec: str
    name: str
    run: Callable[[], object]
    goal: float | None = None


def operations(numbers: Tensor, names: Iterable[str]) -> list[Operation]:
    """What is timed for each codec."""
    into = torch.zeros_like(numbers)
    found = [Operation("none", "a new row of zeros", lambda: torch.zeros_like(numbers))]
    for name in names:
        found += _of_codec(name, CODECS[name], numbers, into)
    return found


def _of_codec(name: str, codec: pc.Codec, numbers: Tensor, into: Tensor) -> list[Operation]:
    packet = codec.encode(numbers, KEY)
    assert packet.numel() == codec.wire_bytes(numbers.numel())
    encode, decode = GOALS.get(name, (None, None))
    return [
        Operation(name, "encode", lambda: codec.encode(numbers, KEY), encode),
        Operation(name, "decode", lambda: codec.accumulate(packet, into, 0.0, 1.0), decode),
        Operation(name, "add", lambda: codec.accumulate(packet, into, 1.0, 1.0)),
        Operation(name, "decode, new row", lambda: codec.decode(packet, numbers.numel(), torch.float32)),
    ]


def measure(numbers: Tensor, names: Iterable[str], repeats: int, clock: Callable[[], float]) -> list[Row]:
    """All operations in turn, round after round, each with a copy just before it."""
    copy = torch.empty_like(numbers)
    timed = operations(numbers, names)
    rounds: list[list[tuple[float, float]]] = [[] for _ in timed]
    for number in range(repeats + 1):
        for place in range(len(timed)):
            at = (place + number) % len(timed)  # each round starts with another one
            pair = _seconds(lambda: copy.copy_(numbers), clock), _seconds(timed[at].run, clock)
            if number:  # the first round warms up
                rounds[at].append(pair)
    size = numbers.numel() * numbers.element_size()
    return [_row(operation, pairs, size) for operation, pairs in zip(timed, rounds, strict=True)]


def _seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    result = run()
    end = clock()
    del result  # giving memory back is not timed
    return end - begin


def _row(operation: Operation, pairs: Sequence[tuple[float, float]], size: int) -> Row:
    ratios = [ours / copy for copy, ours in pairs]
    return Row(
        codec=operation.codec,
        operation=operation.name,
        ratio=median(ratios),
        best=min(ours for _, ours in pairs) / min(copy for copy, _ in pairs),
        lowest=min(ratios),
        highest=max(ratios),
        gigabytes_per_second=size / median(ours for _, ours in pairs) / 1e9,
        goal=operation.goal,
        samples=ratios,
    )


# Table --------------------------------------------------------------------------------------------------------------

HEADER = ("codec", "operation", "copies", "best of", "min-max", "GB/s", "goal", "met?")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.codec,
        row.operation,
        f"{row.ratio:.2f}",
        f"{row.best:.2f}",
        f"{row.lowest:.2f}-{row.highest:.2f}",
        f"{row.gigabytes_per_second:.1f}",
        "" if row.goal is None else f"<= {row.goal:.1f}",
        {None: "", True: "yes", False: "NO"}[row.met],
    )


def format_table(rows: Iterable[Row], *, markdown: bool) -> str:
    """The rows as an aligned table, plain or in Markdown."""
    lines = [HEADER, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in aligned)
    rule = [":" + "-" * (w - 1) if index < 2 else "-" * (w - 1) + ":" for index, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [aligned[0], rule, *aligned[1:]])


def as_json(rows: Sequence[Row]) -> str:
    """The rows with every sample, and where they were measured."""
    machine = {"python": platform.python_version(), "torch": version("torch"), "cpus": os.cpu_count()}
    return json.dumps({**machine, "rows": [{**asdict(row), "met": row.met} for row in rows]}, indent=1)


# Run ----------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure the chosen codecs and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CODECS, default=list(CODECS), metavar="CODEC", help="default: all")
    parser.add_argument("--megabytes", type=float, default=32, help="of float32, in units of 2**20 (default 32)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds after the warm-up (default 15)")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="cpu", help="processor time of the thread (default), or wall time"
    )
    parser.add_argument("--json", type=Path, help="also write the rows and all samples here")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats: at least 1")
    torch.set_num_threads(1)
    numbers = torch.randn(max(1, round(args.megabytes * 2**18)), generator=torch.Generator().manual_seed(0))
    rows = measure(numbers, args.only, args.repeats, CLOCKS[args.clock])
    print(format_table(rows, markdown=args.markdown))
    if args.json:
        args.json.write_text(as_json(rows))


if __name__ == "__main__":
    main()
