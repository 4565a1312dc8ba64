"""Topologies against graphs from networkx, published numbers, and products of matrices; their schedules for every n."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import re
import sys
import tracemalloc

import networkx as nx
import pytest
import torch
from gossip_ranks import NAMES
from matplotlib.image import imread
from torch import Tensor

import ptcollect as pc
from ptcollect.topologies.colouring import rounds_of_digraph, rounds_of_graph

ONE_WAY = {"exponential", "one_peer_exponential"}
"""Directed: in a round a rank may send to one and hear from another."""
every_name = pytest.mark.parametrize("name", NAMES)


def steps(topology: pc.topologies.Topology, n: int) -> range:
    return range(topology.period(n) or 6)


def product(topology: str | pc.topologies.Topology, n: int, count: int) -> Tensor:
    out = torch.eye(n, dtype=torch.float64)
    for step in range(count):
        out = pc.mixing_matrix(topology, n, step) @ out
    return out


# Schedules ----------------------------------------------------------------------------------------------------------


@every_name
def test_rounds_match_and_weights_are_doubly_stochastic_for_every_n(name: str):
    topology = pc.topologies.by_name(name)
    for n in range(1, 34):
        for step in steps(topology, n):
            parts = [topology.part(n, step, rank) for rank in range(n)]
            rounds = {len(part.turns) for part in parts}
            assert len(rounds) == 1, (n, step)
            for number in range(rounds.pop()):
                turns = [part.turns[number] for part in parts]
                for rank, turn in enumerate(turns):
                    assert turn.to != rank
                    assert turn.to is None or turns[turn.to].source == rank, (n, step, number, rank)
                    assert turn.source is None or turns[turn.source].to == rank, (n, step, number, rank)
                    if name not in ONE_WAY:
                        assert turn.to == turn.source, "one partner, both ways"
            weights = pc.mixing_matrix(name, n, step)
            ones = torch.ones(n, dtype=torch.float64)
            assert bool((weights >= 0).all())
            torch.testing.assert_close(weights.sum(0), ones, rtol=0, atol=1e-14)
            torch.testing.assert_close(weights.sum(1), ones, rtol=0, atol=1e-14)


@every_name
def test_a_step_repeats_after_the_period(name: str):
    topology = pc.topologies.by_name(name)
    for n in (2, 5, 8, 12):
        period = topology.period(n)
        if period is None:
            assert name == "random_matching"
            continue
        for step in range(period):
            assert torch.equal(pc.mixing_matrix(name, n, step), pc.mixing_matrix(name, n, step + 3 * period))
        assert topology.varies or period == 1


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("complete", nx.complete_graph),
        ("ring", nx.cycle_graph),
        ("torus", lambda n: nx.grid_2d_graph(*{12: (3, 4), 16: (4, 4), 7: (1, 7)}[n], periodic=True)),
        ("hypercube", lambda n: nx.hypercube_graph(round(math.log2(n)))),
    ],
)
@pytest.mark.parametrize("n", [7, 12, 16])
def test_a_graph_is_the_one_of_that_name(name, known, n):
    n = 8 if name == "hypercube" and n != 16 else n  # networkx has powers of two only
    graph = known(n)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    ours = nx.Graph(
        (i, j) for i, row in enumerate(pc.mixing_matrix(name, n).tolist()) for j, w in enumerate(row) if w and i != j
    )
    assert nx.is_isomorphic(ours, graph)
    degree = len(graph.edges) * 2 // n
    assert set(pc.mixing_matrix(name, n).flatten().tolist()) - {0.0} == {1 / (1 + degree)}


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("complete", {4: 3, 5: 5}), ("ring", {4: 2, 5: 3, 2: 1, 3: 3}), ("torus", {16: 4, 9: 6}), ("hypercube", {8: 3})],
)
def test_as_few_rounds_as_there_can_be(name, rounds):
    for n, expected in rounds.items():
        assert len(pc.topologies.by_name(name).part(n, 0, 0).turns) == expected


def test_a_hypercube_that_is_not_full_stays_connected():
    for n in range(2, 34):
        assert pc.spectral_gap("hypercube", n) > 0.04


def test_bipartite_meets_the_other_side_only():
    for n in range(2, 20):
        met = set()
        for step in range(12):
            for rank in range(n):
                for turn in pc.topologies.bipartite().part(n, step, rank).turns:
                    if turn.to is not None:
                        assert (turn.to - rank) % 2 == 1
                        met.add((min(rank, turn.to), max(rank, turn.to)))
        assert nx.is_connected(nx.Graph(met))


def test_random_matchings_are_perfect_fair_and_their_own():
    before = random.getstate(), torch.get_rng_state().clone()
    seen = {}
    for step in range(300):
        pairs = set()
        for rank in range(5):
            (turn,) = pc.topologies.random_matching(seed=1).part(5, step, rank).turns
            if turn.to is not None:
                pairs.add((min(rank, turn.to), max(rank, turn.to)))
        assert len(pairs) == 2, "one of five idles"
        for pair in pairs:
            seen[pair] = seen.get(pair, 0) + 1
    assert len(seen) == 10
    assert all(30 < count < 90 for count in seen.values()), "each pair 300 * 2 / 10 = 60 times, give or take 4 sigma"
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    others = [pc.mixing_matrix(pc.topologies.random_matching(seed), 16) for seed in range(4)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(others, 2))


@every_name
def test_one_ranks_peers_among_4096_need_no_matrix(name: str):
    tracemalloc.start()
    part = pc.topologies.by_name(name).part(4096, 3, rank=1234)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(turn.to is not None for turn in part.turns) in {1, 2, 4, 12, 4095}
    assert peak < 40e6, "16 million entries are 128 MB in float64"


# Gaps, exactness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "gap"),
    [
        ("ring", 4, 0.666667),
        ("ring", 16, 0.050747),
        ("ring", 64, 0.003210),
        ("torus", 16, 0.4),
        ("torus", 64, 0.117157),
        ("hypercube", 8, 0.5),
        ("hypercube", 16, 0.4),
        ("exponential", 8, 0.5),
        ("exponential", 16, 0.4),
        ("complete", 7, 1.0),
        ("one_peer_exponential", 8, 1.0),
        ("base_k", 7, 1.0),
    ],
)
def test_spectral_gaps(name, n, gap):
    assert round(pc.spectral_gap(name, n), 6) == gap


@pytest.mark.parametrize("n", [4, 5, 6])
def test_the_gap_of_random_matchings_is_that_of_their_mean(n):
    # The mean over all maximal matchings, listed: W is a projection, so W^T W = W.
    total, count = torch.zeros(n, n, dtype=torch.float64), 0
    for order in itertools.permutations(range(n)):
        weights = torch.eye(n, dtype=torch.float64)
        for a, b in zip(order[0 : n - 1 : 2], order[1:n:2], strict=True):
            weights[[a, b, a, b], [a, b, b, a]] = 0.5
        total, count = total + weights, count + 1
    second = torch.linalg.eigvalsh(total / count)[-2].item()
    assert pc.spectral_gap("random_matching", n) == pytest.approx(1 - second**0.5, abs=1e-12)


def test_one_peer_exponential_is_exact_for_powers_of_two_only():
    for n in (2, 4, 8, 16, 32):
        rounds = round(math.log2(n))
        assert torch.equal(product("one_peer_exponential", n, rounds), torch.full((n, n), 1 / n, dtype=torch.float64))
        assert not torch.equal(product("one_peer_exponential", n, rounds - 1), torch.full((n, n), 1 / n).double())
    for count in range(1, 30):
        assert (product("one_peer_exponential", 6, count) - 1 / 6).abs().max() > 1e-12


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
def test_base_k_is_exact_for_every_n_in_as_many_steps_as_its_paper_states(k):
    topology = pc.topologies.base_k(k)
    for n in range(2, 33):
        length = topology.period(n)
        assert length <= 2 * math.log(n) / math.log(k + 1) + 2, "theorem 1"
        torch.testing.assert_close(
            product(topology, n, length), torch.full((n, n), 1 / n, dtype=torch.float64), rtol=0, atol=1e-15
        )
        for step in range(length):
            assert int((pc.mixing_matrix(topology, n, step) > 0).sum(1).max()) <= k + 1


@pytest.mark.parametrize(
    ("k", "lengths"),
    # Powers of k+1 and products of factors up to k+1: one step a factor. 5 = 4 + 1 in base 2: 2 steps in the four, one
    # between, 2 more; 6 = 2 * 3: 3 inside the threes, one across; 7 = 4 + 2 + 1: as 5.
    [
        (1, {2: 1, 4: 2, 5: 5, 6: 4, 7: 5, 8: 3, 16: 4, 32: 5}),
        (2, {3: 1, 5: 3, 6: 2, 9: 2, 27: 3, 12: 3}),
        (4, {25: 2}),
    ],
)
def test_base_k_lengths_by_hand(k, lengths):
    assert {n: pc.topologies.base_k(k).period(n) for n in lengths} == lengths


@every_name
def test_steps_to_consensus_by_multiplying_on(name: str):
    for n in (1, 2, 6, 9):
        for tol in (0.5, 1e-2, 1e-6):
            left, count = torch.eye(n, dtype=torch.float64), 0
            while n > 1 and torch.linalg.matrix_norm(left - 1 / n, ord=2) > tol:
                left, count = pc.mixing_matrix(name, n, count) @ left, count + 1
            assert pc.rounds_to_consensus(name, n, tol) == count, (n, tol)


def test_steps_to_consensus_refuses_what_never_comes():
    apart = pc.topologies.matrix([[0, 1], [1, 0]])
    assert pc.spectral_gap(apart, 2) == 0
    with pytest.raises(ValueError, match=r"does not come to 0\.1"):
        pc.rounds_to_consensus(apart, 2, 0.1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        pc.rounds_to_consensus("ring", 4, 0)


# Matrices and graphs ------------------------------------------------------------------------------------------------

THIRD = [[1 / 2, 1 / 2, 0], [1 / 2, 1 / 4, 1 / 4], [0, 1 / 4, 3 / 4]]


@pytest.mark.parametrize(
    "given", [THIRD, tuple(map(tuple, THIRD)), torch.tensor(THIRD)], ids=["lists", "tuples", "tensor"]
)
def test_any_mixing_matrix(given):
    assert torch.equal(pc.mixing_matrix(given, 3), torch.tensor(THIRD, dtype=torch.float64))
    topology = pc.topologies.read(given)
    assert hash(topology) == hash(pc.topologies.matrix(THIRD))
    assert len(topology.part(3, 0, 1).turns) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0.5, 0.5], [0.5, 0.4]], "row 1 sums to 0.9, expected 1"),
        ([[1.5, -0.5], [0.5, 0.5]], "row 0 has the weight -0.5 for rank 1"),
        ([[0.5, 0.5], [float("nan"), 0.5]], "row 1 has the weight nan"),
        ([[0.5, 0.5], [1.0]], "row 1 has 1 weights, expected 2"),
        ([[1.0, 0.0], [0.0, 1.0]], "rank 1 never hears of rank 0"),
        ([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]], "rank 2 never hears of rank 0"),
        ([[1.0, 0.0], [0.5, 0.5]], "rank 1 is never heard of by rank 0"),
    ],
)
def test_wrong_matrices_are_refused_with_the_row_named(rows, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pc.topologies.matrix(rows)
    with pytest.raises(ValueError, match=re.escape(message)):
        pc.gossip_avg(rows)


def test_networkx_graphs():
    star = nx.star_graph(4)
    expected = torch.tensor(
        [[1 / 5] * 5, *([1 / 5, *(4 / 5 * (i == j) for j in range(4))] for i in range(4))], dtype=torch.float64
    )
    torch.testing.assert_close(pc.mixing_matrix(star, 5), expected, rtol=0, atol=1e-15)
    weighted = nx.Graph()
    weighted.add_weighted_edges_from([(0, 1, 0.5), (1, 2, 0.25)])
    assert torch.equal(pc.mixing_matrix(weighted, 3), torch.tensor(THIRD, dtype=torch.float64))
    one_way = nx.DiGraph([(0, 1), (0, 2), (1, 2), (2, 0)])
    shares = torch.tensor([[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]], dtype=torch.float64)
    assert torch.equal(pc.mixing_matrix(one_way, 3), shares)
    assert torch.equal(pc.mixing_matrix({0: [1, 2], 1: [2], 2: [0]}, 3), shares)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nx.Graph([("a", "b")]), "expected the nodes 0 to 1, which are the ranks, got the node 'a'"),
        (lambda: nx.Graph([(0, 1), (2, 3)]), "rank 2 never hears of rank 0"),
        (lambda: nx.DiGraph([(0, 1), (1, 2)]), "rank 1 is never heard of by rank 0"),
        (lambda: nx.Graph([(0, 1, {"weight": 0.5}), (1, 2)]), "the edge (1, 2) has no weight"),
        (lambda: nx.Graph([(0, 1, {"weight": 0.75}), (1, 2, {"weight": 0.75})]), "row 1 has the weight -0.5"),
        (lambda: [*nx.path_graph(3).edges, (2, 2)], "row 0 has 2 weights, expected 3"),
    ],
)
def test_wrong_graphs_are_refused_with_the_node_named(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pc.mixing_matrix(make(), 3)


def test_a_node_without_an_edge_is_named():
    graph = nx.Graph([(0, 1)])
    graph.add_node(2)
    with pytest.raises(ValueError, match="node 2 has no edge"):
        pc.gossip_avg(graph)


def test_colourings_need_no_more_rounds_than_the_theorems_say():
    rng = random.Random(0)
    for _ in range(200):
        n, density = rng.randint(2, 14), rng.random()
        graph = nx.gnp_random_graph(n, density, seed=rng.randint(0, 10**6))
        rounds = rounds_of_graph(n, graph.edges)
        assert sorted(edge for each in rounds for edge in each) == sorted(graph.edges)
        assert len(rounds) <= max(dict(graph.degree).values()) + 1
        for each in rounds:
            ranks = [rank for edge in each for rank in edge]
            assert len(ranks) == len(set(ranks))
        directed = nx.gnp_random_graph(n, density, seed=rng.randint(0, 10**6), directed=True)
        rounds = rounds_of_digraph(n, directed.edges)
        assert sorted(edge for each in rounds for edge in each) == sorted(directed.edges)
        degrees = [*dict(directed.in_degree).values(), *dict(directed.out_degree).values()]
        assert len(rounds) == max(degrees)
        for each in rounds:
            assert len({a for a, _ in each}) == len({b for _, b in each}) == len(each)


# Values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (pc.topologies.ring(), "ring()"),
        (pc.topologies.base_k(3), "base_k(3)"),
        (pc.topologies.torus(rows=2), "torus(2)"),
        (pc.topologies.random_matching(seed=5), "random_matching(5)"),
        (pc.topologies.graph([(1, 0), (1, 2)]), "graph(((0, 1), (1, 2)))"),
        (pc.topologies.digraph([[0, 1], [1, 0]]), "digraph(((0, 1), (1, 0)))"),
        (pc.topologies.matrix([[0.5, 0.5], [0.5, 0.5]]), "matrix(((0.5, 0.5), (0.5, 0.5)))"),
    ],
    ids=repr,
)
def test_topologies_are_values_that_print_as_code(topology, text):
    assert repr(topology) == text
    assert eval(text, vars(pc.topologies)) == topology
    topology.part(topology.size if hasattr(topology, "size") else 6, 0, 0)
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert len({topology, eval(text, vars(pc.topologies))}) == 1


def test_stages_print_topologies_as_they_are_written():
    assert repr(pc.gossip_avg("torus")) == 'gossip_avg("torus")'
    assert repr(pc.gossip_avg(pc.topologies.base_k(2), step_size=0.5)) == "gossip_avg(base_k(2), step_size=0.5)"
    assert repr(pc.push_sum("ring", axis="node")) == 'push_sum("ring", axis="node")'
    assert pc.gossip_avg("ring") == pc.gossip_avg(pc.topologies.ring())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pc.gossip_avg("star"), ValueError, "unknown topology 'star'; known by name: 'complete', 'ring'"),
        (lambda: pc.gossip_avg(3), pc.PipelineError, "expected a topology: a name such as"),
        (lambda: pc.gossip_avg({"w": torch.ones(2)}), pc.PipelineError, "expected a topology"),
        (lambda: pc.gossip_avg(pc.topologies.ring), pc.PipelineError, "got the class ring; call it: ring()"),
        (lambda: pc.topologies.base_k(0), ValueError, "base_k(k): expected a whole number from 1"),
        (lambda: pc.mixing_matrix(pc.topologies.torus(rows=3), 8), ValueError, "8 ranks do not make 3 equal rows"),
        (lambda: pc.mixing_matrix(THIRD, 4), ValueError, "has 3 ranks, numbered from 0, and the group has 4"),
        (lambda: pc.topologies.graph([(0, 0)]), ValueError, "the edge (0, 0) joins rank 0 with itself"),
        (lambda: pc.topologies.graph([]), ValueError, "expected pairs of ranks, got none"),
        (lambda: pc.topologies.graph([(0, -1)]), ValueError, "got (0, -1)"),
    ],
)
def test_what_is_no_topology(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


# Pictures -----------------------------------------------------------------------------------------------------------


def test_pictures_show_rounds_and_weights(tmp_path):
    picture = imread(pc.draw_topology("ring", 5, tmp_path / "ring.png"))
    assert picture.shape[0] > 600
    svg = pc.draw_topology("base_k", 6, tmp_path / "base_k.svg").read_text()
    assert svg.count("<!-- step") == 4
    assert all(f"<!-- {text} -->" in svg for text in ("base_k() on 6 ranks, repeats after 4 steps", ".67", ".33"))
    one = pc.draw_topology({0: [1, 2], 1: [2], 2: [0]}, 3, tmp_path / "one.svg", step=7).read_text()
    assert "<!-- step 7: 2 rounds -->" in one


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'ptcollect[plot]'")):
        pc.draw_topology("ring", 4, tmp_path / "ring.png")
