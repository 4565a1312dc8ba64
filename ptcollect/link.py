"""Links between ranks, as the planner sees them: how long a message takes, and which port it occupies meanwhile."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ptcollect.value import whole_number

Table = tuple[tuple[float, ...], ...]
"""One number per pair of ranks: ``table[source][destination]``."""


_BITS = {"": 1 / 8, "k": 1e3 / 8, "m": 1e6 / 8, "g": 1e9 / 8, "t": 1e12 / 8}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def _quantity(name: str, value: Any, units: Mapping[str, float]) -> float | Table:
    """`value` as a float in bytes per second or seconds, or a matrix of such."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        rows = tuple(
            tuple(_number(name, each, units, diagonal=i == j) for j, each in enumerate(row))
            for i, row in enumerate(value)
        )
        if any(len(row) != len(rows) for row in rows):
            raise ValueError(f"Link({name}): expected a square matrix, got rows of {[len(row) for row in rows]}")
        return rows
    return _number(name, value, units)


def _number(name: str, value: Any, units: Mapping[str, float], *, diagonal: bool = False) -> float:
    if diagonal and value is None:
        return math.nan
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9.]+(?:e[-+]?[0-9]+)?)\s*([a-zµ]*?)(bit(?:/s)?|bps)?\s*", value.lower())
        if found and found[2] in units and bool(found[3]) == (units is _BITS):
            return _number(name, float(found[1]) * units[found[2]], units, diagonal=diagonal)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
        if diagonal or number > 0 or (number == 0 and units is _TIMES):
            return number
    wanted = (
        'bytes per second above 0, or text such as "1gbit"' if units is _BITS else 'seconds, or text such as "20ms"'
    )
    raise ValueError(f"Link({name}): expected {wanted}, got {value!r}")


class Route(NamedTuple):
    """What a message from one rank to another meets."""

    out: tuple[str, int]
    """The port that it leaves by; one message at a time."""
    into: tuple[str, int]
    """The port that it arrives by; one message at a time."""
    seconds_per_byte: float
    latency: float
    overhead: float

    def busy(self, size: int) -> float:
        """How long a message of `size` bytes occupies both ports."""
        return self.overhead + size * self.seconds_per_byte


@dataclass(frozen=True)
class Link:
    r"""What joins the ranks: every rank has one full-duplex port, which carries one message at a time each way.

    .. math:: t(m) = \text{latency} + \text{message\_overhead} + \frac{m}{\text{bandwidth}}

    for m bytes, from when both sides are ready and both ports are free until the message is there. The ports are
    occupied for all of that but the latency.

    `save` and `load` keep it as JSON: ``{"bandwidth": bytes per second, "latency": seconds, "message_overhead":
    seconds}``, where each may be a matrix, a list of rows indexed ``[source][destination]``; and for `two_level`
    ``{"inside": {...}, "between": {...}, "ranks_per_node": int, "shared_uplink": bool}``, with a link as above in
    either place. Other keys are left alone.

    Args:
        bandwidth: bytes per second, or text in bits per second such as ``"1gbit"`` or ``"200mbit"``; or a matrix of
            either, ``bandwidth[source][destination]``, whose diagonal is not looked at.
        latency: seconds, or text such as ``"20ms"``; or a matrix. What the backend does before the bytes of a message
            may leave, when both sides are ready, belongs to it.
        message_overhead: seconds that a message costs at its ports beside its bytes; or text, or a matrix.

    Raises:
        ValueError: not a quantity of that kind, or matrices of different sizes.

    Source: Hockney 1994, The communication challenge for MPP (latency and bandwidth); Alexandrov et al. 1997, LogGP
    (what a message costs at its port).

    >>> import ptcollect as pc
    >>> pc.Link("1gbit", latency="20ms")
    Link(bandwidth=125000000.0, latency=0.02, message_overhead=0.0)
    """

    bandwidth: Any
    latency: Any = 0.0
    message_overhead: Any = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth", _quantity("bandwidth", self.bandwidth, _BITS))
        object.__setattr__(self, "latency", _quantity("latency", self.latency, _TIMES))
        object.__setattr__(self, "message_overhead", _quantity("message_overhead", self.message_overhead, _TIMES))
        sizes = {len(each) for each in self._quantities() if isinstance(each, tuple)}
        if len(sizes) > 1:
            raise ValueError(f"Link: expected matrices for one number of ranks, got some for {sorted(sizes)}")

    def check(self, ranks: int) -> None:
        """Raise if it does not join that many ranks.

        Raises:
            ValueError: a matrix is for another number of ranks.
        """
        for each in self._quantities():
            if isinstance(each, tuple) and len(each) != ranks:
                raise ValueError(f"Link: the matrix is for {len(each)} ranks, and there are {ranks}")

    @property
    def alike(self) -> bool:
        """Whether it is the same between any two ranks of a node, and between any two nodes."""
        return not any(isinstance(each, tuple) for each in self._quantities())

    def node(self, rank: int) -> int:
        """The node that `rank` is in; all ranks are in one where nothing is said about nodes."""
        return 0

    def route(self, source: int, destination: int) -> Route:
        """What a message between two ranks meets."""
        bandwidth, latency, overhead = (
            each[source][destination] if isinstance(each, tuple) else each for each in self._quantities()
        )
        return Route(("rank", source), ("rank", destination), 1 / bandwidth, latency, overhead)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, in the format above."""
        Path(path).write_text(json.dumps(self._json(), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Link:
        """Read what `save` or a measurement has written.

        Raises:
            ValueError: the file has another format; the message says what is expected.
        """
        return _from_json(json.loads(Path(path).read_text()), str(path))

    def _json(self) -> dict[str, Any]:
        return {"bandwidth": self.bandwidth, "latency": self.latency, "message_overhead": self.message_overhead}

    def _quantities(self) -> tuple[float | Table, float | Table, float | Table]:
        return self.bandwidth, self.latency, self.message_overhead


@dataclass(frozen=True)
class TwoLevel(Link):
    """See `two_level`."""

    bandwidth: Any = math.inf
    inside: Link = Link(math.inf)
    between: Link = Link(math.inf)
    ranks_per_node: int = 1
    shared_uplink: bool = True

    def __repr__(self) -> str:
        shared = "" if self.shared_uplink else ", shared_uplink=False"
        return f"two_level(inside={self.inside}, between={self.between}, ranks_per_node={self.ranks_per_node}{shared})"

    def check(self, ranks: int) -> None:
        if ranks % self.ranks_per_node:
            raise ValueError(f"two_level: {ranks} ranks do not fill nodes of {self.ranks_per_node}")

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def route(self, source: int, destination: int) -> Route:
        here, there = self.node(source), self.node(destination)
        if here == there:
            return self.inside.route(source, destination)
        # A port of its own: what goes out does not hold up what stays in the node.
        ends = (here, there) if self.shared_uplink else (source, destination)
        route = self.between.route(here, there)
        return route._replace(out=("uplink", ends[0]), into=("uplink", ends[1]))

    def _json(self) -> dict[str, Any]:
        return {
            "inside": self.inside._json(),
            "between": self.between._json(),
            "ranks_per_node": self.ranks_per_node,
            "shared_uplink": self.shared_uplink,
        }


def two_level(inside: Link, between: Link, ranks_per_node: int, *, shared_uplink: bool = True) -> Link:
    """Nodes of several ranks: one kind of link inside a node, another between nodes.

    A rank's messages inside its node and those that leave it go by different ports. Ranks are numbered node by node.

    Args:
        inside: between ranks of a node.
        between: between ranks of different nodes.
        ranks_per_node: how many ranks a node has, from 1.
        shared_uplink: whether the ranks of a node share one port to the other nodes, which carries one message at a
            time each way; else each has its own.

    Returns:
        A `Link`.

    Raises:
        ValueError: `ranks_per_node` is not a positive int, or a link is no uniform one.

    >>> import torch, ptcollect as pc
    >>> link = pc.two_level(pc.Link("80gbit"), pc.Link("8gbit"), ranks_per_node=2)
    >>> flat = pc.plan(pc.ring_reduce(), {"w": (1000, 1000)}, world=4, link=link, check="off")
    >>> sharded = pc.chain(pc.shard("local"), pc.ring_reduce(axis="node"))
    >>> levels = pc.plan(sharded, {"w": (1000, 1000)}, world={"node": 2, "local": 2}, link=link, check="off")
    >>> round(flat.seconds * 1e3, 3), round(levels.seconds * 1e3, 3)
    (6.0, 4.4)
    """
    whole_number("two_level(ranks_per_node)", ranks_per_node)
    given: dict[str, Any] = {"inside": inside, "between": between}
    for name, link in given.items():
        if not isinstance(link, Link) or isinstance(link, TwoLevel) or not link.alike:
            raise ValueError(f"two_level({name}): expected a Link with one bandwidth and latency, got {link!r}")
    return TwoLevel(inside=inside, between=between, ranks_per_node=ranks_per_node, shared_uplink=shared_uplink)


def _from_json(found: Any, where: str) -> Link:
    if isinstance(found, dict) and "inside" in found:
        known = {"inside", "between", "ranks_per_node"}
        if known <= found.keys():
            inside, between = _from_json(found["inside"], where), _from_json(found["between"], where)
            return two_level(
                inside, between, found["ranks_per_node"], shared_uplink=bool(found.get("shared_uplink", True))
            )
    elif isinstance(found, dict) and "bandwidth" in found:
        return Link(found["bandwidth"], found.get("latency", 0.0), found.get("message_overhead", 0.0))
    raise ValueError(
        f'{where}: expected {{"bandwidth": bytes per second, "latency": seconds, "message_overhead": seconds}}, or '
        f'{{"inside": ..., "between": ..., "ranks_per_node": ...}}, got {str(found)[:200]}'
    )
