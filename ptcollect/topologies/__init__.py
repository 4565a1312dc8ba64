"""Topologies: who talks to whom, by step. `gossip_avg` and `push_sum` take those for any world size by name.

>>> import torch, ptcollect as pc
>>> pc.topologies.by_name("torus")
torus()
>>> pc.mixing_matrix("ring", 4)[0]
tensor([0.3333, 0.3333, 0.0000, 0.3333], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from ptcollect.errors import PipelineError
from ptcollect.topologies.base_k import base_k
from ptcollect.topologies.fixed import complete, exponential, hypercube, ring, torus
from ptcollect.topologies.graph import digraph, from_adjacency, from_networkx, graph, matrix
from ptcollect.topologies.topology import Part, Topology, Turn
from ptcollect.topologies.varying import bipartite, one_peer_exponential, random_matching

__all__ = [
    "Part",
    "Topology",
    "Turn",
    "base_k",
    "bipartite",
    "by_name",
    "complete",
    "digraph",
    "exponential",
    "graph",
    "hypercube",
    "matrix",
    "one_peer_exponential",
    "random_matching",
    "read",
    "ring",
    "torus",
]

TopologyLike: TypeAlias = Any
"""A name, a `Topology`, a mixing matrix, ``{sender: receivers}`` or a networkx graph."""

_NAMED: dict[str, Callable[[], Topology]] = {
    "complete": complete,
    "ring": ring,
    "torus": torus,
    "hypercube": hypercube,
    "exponential": exponential,
    "one_peer_exponential": one_peer_exponential,
    "base_k": base_k,
    "random_matching": random_matching,
    "bipartite": bipartite,
}


def by_name(name: str) -> Topology:
    """The topology called `name`, with its default options.

    Args:
        name: such as ``"ring"``.

    Returns:
        A `Topology`.

    Raises:
        ValueError: no topology has that name; the message lists those that exist.

    >>> import ptcollect as pc
    >>> pc.topologies.by_name("base_k")
    base_k()
    """
    if name not in _NAMED:
        known = ", ".join(repr(known) for known in _NAMED)
        raise ValueError(f"unknown topology {name!r}; known by name: {known}; others are values: matrix(...)")
    return _NAMED[name]()


def read(topology: TopologyLike) -> Topology:
    """Whatever stages take as a topology, as a value.

    Args:
        topology: a name; a `Topology`; a mixing matrix, as a tensor or nested lists; ``{sender: receivers}``, a
            directed graph; or a networkx graph, directed or not, of the nodes 0 to n-1, with a ``weight`` on every edge
            or on none.

    Returns:
        A `Topology`.

    Raises:
        ValueError: an unknown name, a matrix or a graph that cannot be used.
        PipelineError: none of these things.

    >>> import ptcollect as pc
    >>> pc.topologies.read({0: [1], 1: [2], 2: [0]})
    digraph(((0, 1), (1, 2), (2, 0)))
    """
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str):
        return by_name(topology)
    if isinstance(topology, Mapping) and topology and all(isinstance(sender, int) for sender in topology):
        return from_adjacency(topology)
    if hasattr(topology, "is_directed") and hasattr(topology, "number_of_nodes"):
        return from_networkx(topology)
    if (isinstance(topology, Tensor) and topology.dim() == 2) or (
        isinstance(topology, (list, tuple)) and topology and all(isinstance(row, (list, tuple)) for row in topology)
    ):
        return matrix(topology)  # type: ignore[arg-type]  # made a tuple there
    if isinstance(topology, type) and issubclass(topology, Topology):
        raise PipelineError(f"expected a topology, got the class {topology.__name__}; call it: {topology.__name__}()")
    raise PipelineError(
        'expected a topology: a name such as "ring", a value such as topologies.base_k(2), a mixing matrix, '
        f"{{sender: receivers}} or a networkx graph, got {type(topology).__name__}: {topology!r}"
    )
