"""Topologies of the user's own for one world size: a mixing matrix, an undirected graph, a directed graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ptcollect.topologies.colouring import reached, rounds_of_digraph, rounds_of_graph
from ptcollect.topologies.topology import IDLE, Part, Topology, Turn, own_weight

Edge = tuple[int, int]
TOLERANCE = 1e-6
"""How far from 1 a row may sum, so that float32 will do for weights like 1/3."""


@dataclass(frozen=True, repr=False)
class _Given(Topology):
    """A topology that is given edge by edge, and so for one world size."""

    @functools.cached_property
    def size(self) -> int:
        """The world size that it is for."""
        raise NotImplementedError(f"{type(self).__qualname__}.size")

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """By rank, what it does."""
        raise NotImplementedError(f"{type(self).__qualname__}.parts")

    def check(self, n: int) -> None:
        if n != self.size:
            raise ValueError(
                f"{self.name}(...) has {self.size} ranks, numbered from 0, and the group has {n}; give one for {n} "
                'ranks, or a topology for any number by name, such as "ring"'
            )

    def part(self, n: int, step: int, rank: int) -> Part:
        self.check(n)
        return self.parts[rank]


@dataclass(frozen=True, repr=False)
class matrix(_Given):
    r"""A mixing matrix: row i has the weights with which rank i takes its own tensor and its neighbours'.

    .. math:: y_i = \sum_j W_{ij} x_j, \qquad \sum_j W_{ij} = 1, \quad W_{ij} \ge 0

    Rounds come from an edge colouring: with D neighbours at most, D + 1 at most where messages go both ways, and D
    where some go one way only.

    Args:
        rows: n rows of n weights, as a tensor or nested lists.

    Raises:
        ValueError: not square; a row with a negative weight or one that is no number, or that does not sum to 1; ranks
            that the others never reach. The message names the row.

    >>> import ptcollect as pc
    >>> pc.topologies.matrix([[0.75, 0.25], [0.25, 0.75]]).part(2, 0, rank=1)
    Part(own=0.75, turns=(Turn(to=0, source=0, weight=0.25),))
    """

    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        given: Any = self.rows
        given = given.tolist() if isinstance(given, Tensor) else given
        try:
            rows = tuple(tuple(float(weight) for weight in row) for row in given)
        except TypeError:
            raise ValueError(f"matrix(rows): expected n rows of n weights, got {given!r}") from None
        for i, row in enumerate(rows):
            if len(row) != len(rows):
                raise ValueError(f"matrix: row {i} has {len(row)} weights, expected {len(rows)}, one for each row")
            for j, weight in enumerate(row):
                if not (math.isfinite(weight) and weight >= 0):
                    raise ValueError(
                        f"matrix: row {i} has the weight {weight} for rank {j}; weights are finite and not negative"
                    )
            if abs(math.fsum(row) - 1) > TOLERANCE:
                raise ValueError(
                    f"matrix: row {i} sums to {math.fsum(row):.9g}, expected 1; divide the row by its sum, or give the "
                    "edges to graph(...), which finds weights"
                )
        object.__setattr__(self, "rows", rows)
        _check_connected(self.name, len(rows), self._edges())

    @functools.cached_property
    def size(self) -> int:
        return len(self.rows)

    @property
    def unbalanced(self) -> str | None:
        for j, column in enumerate(zip(*self.rows, strict=True)):
            if abs(math.fsum(column) - 1) > TOLERANCE:
                return f"column {j} of the matrix sums to {math.fsum(column):.6g}, not 1"
        return None

    def _edges(self) -> list[Edge]:
        """(sender, receiver)."""
        return [(j, i) for i, row in enumerate(self.rows) for j, weight in enumerate(row) if weight and i != j]

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        weights = {(j, i): weight for i, row in enumerate(self.rows) for j, weight in enumerate(row)}
        # The own weight is what the others leave of 1, and not what float32 may have made of it.
        return _scheduled(self.size, self._edges(), weights, None)


@dataclass(frozen=True, repr=False)
class graph(_Given):
    r"""An undirected graph from its edges, with Metropolis and Hastings' weights, which need no more than degrees.

    .. math:: W_{ij} = W_{ji} = \frac{1}{1 + \max(d_i, d_j)}, \qquad W_{ii} = 1 - \sum_{j \ne i} W_{ij}

    Args:
        edges: pairs of ranks, from 0 to n-1; every rank is in one.

    Raises:
        ValueError: an edge that is no pair of different ranks, or ranks that the others never reach.

    Source: Xiao, Boyd and Lall 2005, A scheme for robust distributed sensor fusion, section 2.4.

    >>> import ptcollect as pc
    >>> pc.mixing_matrix(pc.topologies.graph([(0, 1), (1, 2)]), 3)
    tensor([[0.6667, 0.3333, 0.0000],
            [0.3333, 0.3333, 0.3333],
            [0.0000, 0.3333, 0.6667]], dtype=torch.float64)
    """

    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        edges = sorted({(min(edge), max(edge)) for edge in _checked_edges(self.name, self.edges)})
        object.__setattr__(self, "edges", tuple(edges))
        _check_connected(self.name, self.size, _both_ways(edges))

    @functools.cached_property
    def size(self) -> int:
        return 1 + max(max(edge) for edge in self.edges)

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        degree = [0] * self.size
        for edge in self.edges:
            for rank in edge:
                degree[rank] += 1
        weights = {(i, j): 1 / (1 + max(degree[i], degree[j])) for i, j in _both_ways(self.edges)}
        return _scheduled(self.size, list(weights), weights, None)


@dataclass(frozen=True, repr=False)
class digraph(_Given):
    r"""A directed graph from its edges: each rank splits what it has equally between itself and whom it sends to.

    .. math:: P_{ij} = \frac{1}{1 + d_j} \quad\text{for } i = j \text{ and for each edge } j \to i

    with d the number of edges that leave a rank. Columns sum to 1 and rows need not, so it is for `push_sum`.

    Args:
        edges: pairs (sender, receiver) of ranks, from 0 to n-1; edges of a rank to itself go without saying.

    Raises:
        ValueError: an edge that is no pair of ranks, or ranks that cannot be reached or cannot reach the others.

    Source: Kempe, Dobra and Gehrke 2003, Gossip-based computation of aggregate information, section 2.

    >>> import ptcollect as pc
    >>> pc.mixing_matrix(pc.topologies.digraph([(0, 1), (0, 2), (1, 2), (2, 0)]), 3)
    tensor([[0.3333, 0.0000, 0.5000],
            [0.3333, 0.5000, 0.0000],
            [0.3333, 0.5000, 0.5000]], dtype=torch.float64)
    """

    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        edges = sorted(set(_checked_edges(self.name, self.edges, loops=True)))
        object.__setattr__(self, "edges", tuple(edges))
        _check_connected(self.name, self.size, edges)

    @functools.cached_property
    def size(self) -> int:
        return 1 + max(max(edge) for edge in self.edges)

    @property
    def unbalanced(self) -> str | None:
        into = [part.own + math.fsum(turn.weight for turn in part.turns) for part in self.parts]
        odd = next((i for i, total in enumerate(into) if abs(total - 1) > TOLERANCE), None)
        return None if odd is None else f"what reaches rank {odd} of its directed graph sums to {into[odd]:.9g}, not 1"

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        leaving = [0] * self.size
        for sender, _ in self.edges:
            leaving[sender] += 1
        shares = {(sender, receiver): 1 / (1 + leaving[sender]) for sender, receiver in self.edges}
        return _scheduled(self.size, list(self.edges), shares, [1 / (1 + count) for count in leaving])


def from_networkx(given: Any) -> Topology:
    """A topology of a networkx graph, whose nodes are the ranks 0 to n-1.

    Raises:
        ValueError: other nodes, or edges of which some have a ``weight`` and others none.
    """
    n = given.number_of_nodes()
    if set(given.nodes) != set(range(n)):
        odd = next(node for node in given.nodes if node not in range(n))
        raise ValueError(
            f"a graph of {n} nodes: expected the nodes 0 to {n - 1}, which are the ranks, got the node {odd!r}; see "
            "networkx.convert_node_labels_to_integers"
        )
    edges = [(a, b) for a, b in given.edges() if a != b]
    linked = {rank for edge in edges for rank in edge}
    if n > 1 and linked != set(range(n)):
        raise ValueError(f"a graph of {n} nodes: node {min(set(range(n)) - linked)} has no edge, so it never meets any")
    weights = {(a, b): weight for a, b, weight in given.edges(data="weight")}
    if all(weight is None for weight in weights.values()):
        return digraph(tuple(edges)) if given.is_directed() else graph(tuple(edges))
    rows = [[0.0] * n for _ in range(n)]
    for (a, b), weight in weights.items():
        if weight is None:
            raise ValueError(f"the edge ({a}, {b}) has no weight, and other edges have one; give all or none")
        rows[b][a] = float(weight)
        if not given.is_directed():
            rows[a][b] = float(weight)
    for i, row in enumerate(rows):
        if row[i] == 0:
            row[i] = 1 - math.fsum(row)
    return matrix(tuple(map(tuple, rows)))


def from_adjacency(given: Mapping[Any, Iterable[int]]) -> Topology:
    """A directed graph from ``{sender: receivers}``."""
    return digraph(tuple((sender, receiver) for sender, receivers in given.items() for receiver in receivers))


def _scheduled(n: int, edges: list[Edge], weights: Mapping[Edge, float], own: list[float] | None) -> tuple[Part, ...]:
    """What every rank does, with the edges (sender, receiver) coloured: both ways at once where all go both ways."""
    if set(edges) == {(b, a) for a, b in edges}:
        rounds = [_both_ways(each) for each in rounds_of_graph(n, sorted(edge for edge in edges if edge[0] < edge[1]))]
    else:
        rounds = rounds_of_digraph(n, sorted(edges))
    to: list[list[int | None]] = [[None] * len(rounds) for _ in range(n)]
    source: list[list[int | None]] = [[None] * len(rounds) for _ in range(n)]
    for number, each in enumerate(rounds):
        for sender, receiver in each:
            to[sender][number], source[receiver][number] = receiver, sender
    parts = []
    for rank in range(n):
        turns = tuple(
            IDLE if a is None and b is None else Turn(a, b, 0.0 if b is None else weights[b, rank])
            for a, b in zip(to[rank], source[rank], strict=True)
        )
        parts.append(Part(own_weight(turns) if own is None else own[rank], turns))
    return tuple(parts)


def _both_ways(edges: Iterable[Edge]) -> list[Edge]:
    return [pair for a, b in edges for pair in ((a, b), (b, a))]


def _checked_edges(name: str, edges: Any, *, loops: bool = False) -> list[Edge]:
    checked = []
    for edge in edges:
        pair = tuple(edge) if isinstance(edge, (tuple, list)) else ()
        if len(pair) != 2 or any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in pair):
            raise ValueError(f"{name}(edges): expected pairs of ranks, numbered from 0, got {edge!r}")
        if pair[0] == pair[1] and not loops:
            raise ValueError(f"{name}(edges): the edge {edge!r} joins rank {pair[0]} with itself; leave it out")
        if pair[0] != pair[1]:
            checked.append(pair)
    if not checked:
        raise ValueError(f"{name}(edges): expected pairs of ranks, got none")
    return checked


def _check_connected(name: str, n: int, edges: list[Edge]) -> None:
    """Whether everybody hears of everybody, sooner or later."""
    for what, links in (("never hears of", edges), ("is never heard of by", [(b, a) for a, b in edges])):
        missing = set(range(n)) - reached(n, links)
        if missing:
            raise ValueError(f"{name}: not connected: rank {min(missing)} {what} rank 0; add an edge between the two")
