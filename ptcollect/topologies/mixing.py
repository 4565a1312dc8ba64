"""What a topology does to a vector: its mixing matrices, their spectral gap, and the steps to consensus."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ptcollect.topologies import TopologyLike, read
from ptcollect.topologies.topology import Topology
from ptcollect.value import whole_number


def mixing_matrix(topology: TopologyLike, n: int, step: int = 0) -> Tensor:
    r"""The matrix of one gossip step.

    .. math:: y_i = \sum_j W^{(t)}_{ij} x_j

    Args:
        topology: a name, a value from `ptcollect.topologies`, a matrix, ``{sender: receivers}`` or a networkx graph.
        n: world size, from 1.
        step: t, from 0; matters where the topology varies.

    Returns:
        A float64 tensor of shape (n, n), not negative. Rows and columns sum to 1, to rounding; of a `digraph` columns
        only.

    Raises:
        ValueError: there is no such topology of `n` ranks.

    >>> import ptcollect as pc
    >>> pc.mixing_matrix("one_peer_exponential", 4, step=1)
    tensor([[0.5000, 0.0000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.0000, 0.5000],
            [0.5000, 0.0000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.0000, 0.5000]], dtype=torch.float64)
    """
    chosen = _checked("mixing_matrix", topology, n)
    whole_number("mixing_matrix(step)", step, least=0)
    rows: list[int] = []
    columns: list[int] = []
    weights: list[float] = []
    for rank in range(n):
        part = chosen.part(n, step, rank)
        for source, weight in [(rank, part.own), *((turn.source, turn.weight) for turn in part.turns)]:
            if source is not None:
                rows.append(rank)
                columns.append(source)
                weights.append(weight)
    out = torch.zeros(n, n, dtype=torch.float64)
    entries = (torch.tensor(rows), torch.tensor(columns))
    return out.index_put_(entries, torch.tensor(weights, dtype=torch.float64), accumulate=True)


def spectral_gap(topology: TopologyLike, n: int) -> float:
    r"""How fast gossip forgets differences: 1 for the mean itself after some steps, 0 for never.

    .. math:: 1 - |\lambda_2(W)|

    with the second largest eigenvalue by magnitude. Where the topology varies, W is the product of the matrices of one
    period, so the gap is that of a whole period. A random matching has none; its gap is that of the mean square, per
    step: the distance to the mean shrinks in the mean square by

    .. math:: \lambda_2\big(\mathrm E[W^\top W]\big) = \tfrac12 - \tfrac{1}{2 (n - 1)} \;\; (n \text{ even}), \qquad
        \tfrac12 \;\; (n \text{ odd}), \qquad \text{gap } 1 - \sqrt{\lambda_2}

    Args:
        topology: as for `mixing_matrix`.
        n: world size, from 1.

    Returns:
        The gap, from 0 to 1.

    Raises:
        ValueError: there is no such topology of `n` ranks, or it never repeats (and is no `random_matching`).

    Source: Boyd et al. 2006, Randomized gossip algorithms, for random matchings.

    >>> import ptcollect as pc
    >>> [round(pc.spectral_gap(name, 16), 6) for name in ("ring", "torus", "exponential", "one_peer_exponential")]
    [0.050747, 0.4, 0.4, 1.0]
    """
    chosen = _checked("spectral_gap", topology, n)
    if n == 1:
        return 1.0
    if chosen.period(n) is None:
        if chosen.name != "random_matching":
            raise ValueError(f"spectral_gap: {chosen!r} never repeats, so there is no period to take it of")
        return 1 - math.sqrt(0.5 - (0.5 / (n - 1) if n % 2 == 0 else 0))
    sizes = torch.linalg.eigvals(_period(chosen, n)).abs().sort(descending=True).values
    gap = 1 - float(sizes[1])
    # Rounding leaves 1e-16 of an eigenvalue 0, and its square root where the product is no more than nilpotent.
    return gap if 1e-12 < gap < 1 - 1e-7 else float(round(gap))


def rounds_to_consensus(topology: TopologyLike, n: int, tol: float) -> int:
    r"""Gossip steps until any differences between ranks have shrunk to `tol` of what they were.

    .. math:: \min \big\{ T : \| W^{(T-1)} \cdots W^{(0)} - \tfrac1n \mathbf 1 \mathbf 1^\top \|_2 \le \mathit{tol}
        \big\}

    the worst over all inputs. For a directed graph, of the ratios that `push_sum` returns.

    Args:
        topology: as for `mixing_matrix`.
        n: world size, from 1.
        tol: what is left of the distance to the mean, between 0 and 1.

    Returns:
        The number of steps; a step of a topology with several rounds counts once.

    Raises:
        ValueError: `tol` is not between 0 and 1, there is no such topology of `n` ranks, or it does not get there in
            2^20 steps.

    >>> import ptcollect as pc
    >>> pc.rounds_to_consensus("ring", 16, tol=1e-3), pc.rounds_to_consensus("base_k", 16, tol=1e-3)
    (133, 4)
    """
    chosen = _checked("rounds_to_consensus", topology, n)
    if not 0 < tol < 1:
        raise ValueError(f"rounds_to_consensus(tol): expected a number between 0 and 1, got {tol!r}")
    if n == 1:
        return 0
    period = chosen.period(n)
    product, done = torch.eye(n, dtype=torch.float64), 0
    if period is not None:  # whole periods by squaring: as many as leave more than tol
        powers = [_period(chosen, n)]
        while _distance(powers[-1]) > tol:
            if len(powers) > 20:
                raise ValueError(f"rounds_to_consensus: {chosen!r} on {n} ranks does not come to {tol} in 2^20 periods")
            powers.append(powers[-1] @ powers[-1])
        for exponent in range(len(powers) - 2, -1, -1):
            further = powers[exponent] @ product
            if _distance(further) > tol:
                product, done = further, done + (1 << exponent) * period
    while done < 1 << 20:
        product, done = mixing_matrix(chosen, n, done) @ product, done + 1
        if _distance(product) <= tol:
            return done
    raise ValueError(f"rounds_to_consensus: {chosen!r} on {n} ranks does not come to {tol} in 2^20 steps")


def _distance(product: Tensor) -> float:
    """The largest share of a difference between ranks that `product` leaves; rows are divided by their sums."""
    ratios = product / product.sum(1, keepdim=True)
    return float(torch.linalg.matrix_norm(ratios - 1 / len(product), ord=2))


def _period(topology: Topology, n: int) -> Tensor:
    """The product over one period, the first step to the right."""
    product = torch.eye(n, dtype=torch.float64)
    for step in range(topology.period(n) or 1):
        product = mixing_matrix(topology, n, step) @ product
    return product


def _checked(function: str, topology: TopologyLike, n: int) -> Topology:
    whole_number(f"{function}(n)", n)
    chosen = read(topology)
    chosen.check(n)
    return chosen
