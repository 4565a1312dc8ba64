"""Gossip and push-sum against loops over ranks in float64: what they send and what they keep.

Real ranks run every topology among the checks of `gloo_checks.py`.
"""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import networkx as nx
import oracle
import pytest
import torch
from codec_table import CODECS
from gossip_ranks import NAMES, mixed_tree, same_states, tree
from matplotlib.image import imread
from test_examples import EXAMPLES
from test_examples import run as run_example
from torch import Tensor

import ptcollect as pc

sys.path.append(str(EXAMPLES))
import gossip_digits

C = pc.codecs
STEPS = 120  # of a training: 8 epochs
TRIANGLE = {0: [1, 2], 1: [2], 2: [0]}

every_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def total(trees: Sequence[Any], path: str) -> Tensor:
    return torch.stack([each[path].double() for each in trees]).sum(0)


def run(pipeline: pc.Pipeline, trees: Sequence[Any], count: int, states: Any = None) -> pc.Simulation:
    """So many steps, each on the trees of the one before."""
    for _ in range(count):
        result = pc.simulate(pipeline, trees, states, check="off")
        trees, states = result.trees, result.states
    return result


def apart(trees: Sequence[Any], path: str = "w") -> float:
    """Distance of all ranks from their mean."""
    values = torch.stack([each[path].double() for each in trees])
    return float(torch.linalg.vector_norm(values - values.mean(0)))


# Gossip -------------------------------------------------------------------------------------------------------------


@every_name
@pytest.mark.parametrize("wrap", [pc.chain(), pc.bucketize(64)], ids=["leaves", "buckets"])
def test_a_step_multiplies_by_the_mixing_matrix_of_that_step(name: str, wrap: Any):
    gossip = pc.gossip_avg(name)
    pipeline = pc.chain(wrap, gossip)
    for n in (2, 3, 5, 8):
        trees, states = [tree(rank, dtype=torch.float64) for rank in range(n)], None
        for step in range(4):
            rows = pc.mixing_matrix(name, n, step).tolist()
            right = [
                {path: sum(w * t[path] for w, t in zip(row, trees, strict=True)) for path in trees[0]} for row in rows
            ]
            result = pc.simulate(pipeline, trees, states)
            for got, expected in zip(result.trees, right, strict=True):
                for path in expected:
                    torch.testing.assert_close(got[path], expected[path], rtol=0, atol=2e-15)
            trees, states = result.trees, result.states if pipeline.stateful else None
            if pipeline.stateful:  # once a step, however many leaves and buckets
                assert [state["step"] for state in states] == [step + 1] * n
            peers = [sum(weight > 0 for weight in column) - 1 for column in zip(*rows, strict=True)]
            assert result.bytes == [peers[rank] * 8 * (35 + 6 + 1 + 12) for rank in range(n)], "each peer once"


def test_what_varies_keeps_a_step_count_and_what_does_not_is_a_function():
    varies = {name: pc.gossip_avg(name).stateful for name in NAMES}
    assert {name for name, does in varies.items() if does} == {
        "one_peer_exponential",
        "base_k",
        "random_matching",
        "bipartite",
    }
    assert pc.gossip_avg("base_k").init(tree(0)) == {"step": 0}
    with pytest.raises(pc.PipelineError, match=r"keeps state \(a stage that counts steps\)"):
        pc.gossip_avg("base_k")(tree(0))


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_one_peer_exponential_ends_with_the_exact_mean_of_dyadic_numbers(n: int):
    trees = [{"w": (torch.arange(40.0) * 37 % 101 - 50 + 3 * rank) / 64} for rank in range(n)]
    exact = torch.stack([each["w"].double() for each in trees]).mean(0)
    for pipeline in (pc.gossip_avg(), pc.chain(pc.bucketize(32), pc.gossip_avg("one_peer_exponential"))):
        result = run(pipeline, trees, round(math.log2(n)))
        assert all(torch.equal(each["w"].double(), exact) for each in result.trees)


def test_one_peer_exponential_is_not_exact_on_six_ranks():
    trees = [{"w": torch.tensor([float(rank)], dtype=torch.float64)} for rank in range(6)]
    assert apart(run(pc.gossip_avg(), trees, 6).trees) > 1e-3


def test_base_k_ends_with_the_mean_for_any_number_of_ranks():
    for n in (3, 5, 6, 7, 11, 12):
        for k in (1, 2):
            topology = pc.topologies.base_k(k)
            trees = [tree(rank, dtype=torch.float64) for rank in range(n)]
            result = run(pc.gossip_avg(topology), trees, topology.period(n))
            for each in result.trees:
                torch.testing.assert_close(each["w"], total(trees, "w") / n, rtol=0, atol=5e-15)


@pytest.mark.parametrize("seed", range(8))
def test_any_connected_graph(seed: int):
    n = 3 + seed
    both = nx.connected_watts_strogatz_graph(n, min(4, n - 1), 0.5, seed=seed)
    trees = [tree(rank, dtype=torch.float64) for rank in range(n)]
    weights = [[0.0] * n for _ in range(n)]  # Metropolis and Hastings
    for i, j in both.edges:
        weights[i][j] = weights[j][i] = 1 / (1 + max(both.degree[i], both.degree[j]))
    for i in range(n):
        weights[i][i] = 1 - sum(weights[i])
    for given in (both, torch.tensor(weights, dtype=torch.float32)):
        for row, got in zip(weights, pc.simulate(pc.gossip_avg(given), trees).trees, strict=True):
            right = sum(w * each["w"] for w, each in zip(row, trees, strict=True))
            torch.testing.assert_close(got["w"], right, rtol=0, atol=1e-14 if given is both else 1e-6)
    one_way = nx.DiGraph([*((i, (i + 1) % n) for i in range(n)), *both.edges])
    result = pc.simulate(pc.push_sum(one_way), trees)
    for i in range(n):
        senders = [(j, 1 / (1 + one_way.out_degree[j])) for j in (i, *one_way.predecessors(i))]
        weight = sum(share for _, share in senders)
        right = sum(share * trees[j]["w"] for j, share in senders) / weight
        torch.testing.assert_close(result.trees[i]["w"], right, rtol=0, atol=1e-14)
        assert float(result.states[i]["push_sum"]["weight"]) == pytest.approx(weight, abs=1e-15)


def test_weights_in_float32_do_not_move_the_mean():
    thirds = torch.full((3, 3), 1 / 3)
    trees = [{"w": torch.full((2,), 1e3 * (rank + 1), dtype=torch.float64)} for rank in range(3)]
    result = run(pc.gossip_avg(thirds), trees, 200)
    torch.testing.assert_close(total(result.trees, "w"), total(trees, "w"), rtol=0, atol=1e-9)


def test_step_size_damps():
    trees = [tree(rank, dtype=torch.float64) for rank in range(4)]
    whole = pc.simulate(pc.gossip_avg("ring"), trees).trees
    part = pc.simulate(pc.gossip_avg("ring", step_size=0.3), trees).trees
    for before, after, got in zip(trees, whole, part, strict=True):
        torch.testing.assert_close(got["w"], 0.7 * before["w"] + 0.3 * after["w"], rtol=0, atol=1e-15)


def test_integers_are_mixed_and_rounded_to_even():
    trees = [{"i": torch.tensor([a, 2**40 * a], dtype=torch.int64)} for a in (1, 2, 5, 9)]
    result = pc.simulate(pc.gossip_avg([[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0.5]]), trees)
    assert [each["i"].tolist() for each in result.trees] == [
        [round(value), round(2**40 * value)] for value in (1.5, 3.0, 5.5, 7.0)
    ]


def test_narrow_numbers_cannot_overflow_on_the_way():
    trees = [{"w": torch.full((3,), 40000.0, dtype=torch.float16)} for _ in range(5)]
    for name in NAMES:
        assert all(each["w"].tolist() == [40000.0] * 3 for each in pc.simulate(pc.gossip_avg(name), trees).trees), name


@pytest.mark.parametrize("axis", ["node", "local"])
def test_gossip_along_one_dim_of_a_mesh(axis: str):
    trees = [tree(rank, dtype=torch.float64) for rank in range(12)]
    result = pc.simulate(pc.gossip_avg("ring", axis=axis), trees, axes={"node": 3, "local": 4})
    for rank, got in enumerate(result.trees):
        node, local = divmod(rank, 4)
        others = [node * 4 + (local + d) % 4 for d in (-1, 0, 1)] if axis == "local" else [local, 4 + local, 8 + local]
        torch.testing.assert_close(got["w"], sum(trees[r]["w"] for r in others) / 3, rtol=0, atol=1e-15)


def test_gossip_between_nodes_on_shards_within_them():
    trees = [tree(rank, dtype=torch.float64) for rank in range(8)]
    pipeline = pc.chain(pc.bucketize(), pc.shard("local"), pc.gossip_avg("ring", axis="node"))
    result = pc.simulate(pipeline, trees, axes={"node": 4, "local": 2})
    nodes = [(trees[2 * node]["w"] + trees[2 * node + 1]["w"]) / 2 for node in range(4)]
    for rank, got in enumerate(result.trees):
        right = sum(nodes[(rank // 2 + d) % 4] for d in (-1, 0, 1)) / 3
        torch.testing.assert_close(got["w"], right, rtol=0, atol=2e-15)


def test_weights_count_samples_on_gradients():
    trees = [{"w": torch.tensor([value], dtype=torch.float64)} for value in (1.0, 5.0, 9.0)]
    result = pc.simulate(pc.gossip_avg("ring"), trees, weights=[1, 3, 0])
    assert [each["w"].item() for each in result.trees] == pytest.approx([4.0] * 3)


# What encoding drops ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_sum_over_ranks_is_kept_whatever_a_codec_drops(codec: pc.Codec):
    trees = [tree(rank) for rank in range(5)]
    for name in NAMES:
        for pipeline in (
            pc.chain(pc.compress(codec), pc.gossip_avg(name)),
            pc.chain(pc.bucketize(100), pc.compress(codec), pc.gossip_avg(name, step_size=0.5)),
        ):
            result = run(pipeline, trees, 2)
            for path in trees[0]:
                most = max(float(each[path].abs().max()) for each in (*trees, *result.trees))
                torch.testing.assert_close(
                    total(result.trees, path), total(trees, path), rtol=0, atol=2 * 8 * 5 * 2**-24 * most
                )


def choco(trees: Sequence[Tensor], weights: Tensor, gamma: float, kept: int, count: int) -> list[list[Tensor]]:
    """Algorithm 1 of Koloskova et al. 2019 as written, on all ranks at once in float64; the iterates."""
    x = [each.double().clone() for each in trees]
    estimates = [torch.zeros_like(each) for each in x]
    iterates = []
    for _ in range(count):
        for i in range(len(x)):
            difference = x[i] - estimates[i]
            places = difference.abs().topk(kept).indices
            estimates[i][places] += difference[places]
        x = [
            x[i] + gamma * sum(weights[i, j] * (estimates[j] - estimates[i]) for j in range(len(x)))
            for i in range(len(x))
        ]
        iterates.append(x)
    return iterates


@pytest.mark.parametrize("buckets", [pc.chain(), pc.bucketize()], ids=["leaf", "bucket"])
def test_error_feedback_around_gossip_is_choco(buckets: Any):
    trees = [{"w": torch.linspace(-1, 2, 50, dtype=torch.float64) ** 3 * (rank + 1) + rank} for rank in range(5)]
    pipeline = pc.chain(pc.error_feedback(), buckets, pc.compress(C.topk(0.2)), pc.gossip_avg("ring", step_size=0.4))
    weights = torch.zeros(5, 5, dtype=torch.float64)
    for i in range(5):
        weights[i, [i - 1, i, (i + 1) % 5]] = 1 / 3
    states = None
    for right in choco([each["w"] for each in trees], weights, 0.4, 10, 12):
        result = pc.simulate(pipeline, trees, states)
        trees, states = result.trees, result.states
        for got, expected in zip(trees, right, strict=True):  # topk sends float32
            torch.testing.assert_close(got["w"], expected, rtol=0, atol=1e-5)
    assert set(states[0]["error_feedback"]) == {"estimate", "pull"}


@pytest.mark.parametrize(("codec", "step_size"), [(C.topk(0.1), 0.2), (C.int8(), 0.5)], ids=repr)
def test_differences_come_to_the_mean_at_a_linear_rate_where_plain_compression_stalls(codec, step_size):
    trees = [{"w": tree(rank, dtype=torch.float64)["w"]} for rank in range(8)]
    gossip = pc.gossip_avg("ring", step_size=step_size)
    plain = [apart(run(pc.chain(pc.compress(codec), gossip), trees, count).trees) for count in (100, 200)]
    pipeline = pc.chain(pc.error_feedback(), pc.compress(codec), gossip)
    states, values, distances = None, trees, []
    for _ in range(3):
        result = run(pipeline, values, 100, states)
        values, states = result.trees, result.states
        distances.append(apart(values))
    start = apart(trees)
    assert plain[1] > plain[0] / 2, "stalls"
    assert distances[0] < 0.3 * start
    assert distances[1] < 0.4 * distances[0]
    assert distances[2] < max(0.4 * distances[1], 1e-6 * start)
    torch.testing.assert_close(total(values, "w"), total(trees, "w"), rtol=0, atol=1e-12)


def test_error_feedback_keeps_the_mean_over_many_steps():
    trees = [{"w": tree(rank)["w"] * 10} for rank in range(3)]
    pipeline = pc.chain(pc.error_feedback(), pc.compress("int8"), pc.gossip_avg("ring"))
    result = run(pipeline, trees, 600)
    # Each step rounds to float32 once, at random; what estimates lose must not add up.
    torch.testing.assert_close(total(result.trees, "w"), total(trees, "w"), rtol=0, atol=3 * 40 * 2**-24 * 600**0.5)


def test_error_feedback_on_changing_trees_of_every_dtype_keeps_the_sum():
    pipeline = pc.chain(pc.error_feedback(), pc.bucketize(60), pc.compress("int4"), pc.gossip_avg("exponential"))
    states = None
    for step in range(3):
        trees = [mixed_tree(rank + 10 * step) for rank in range(4)]
        result = pc.simulate(pipeline, trees, states)
        states = result.states
        for path in ("w", "b", "double"):
            torch.testing.assert_close(total(result.trees, path), total(trees, path), rtol=0, atol=1e-5)
        for old, new in zip(trees, result.trees, strict=True):
            assert new["none"] is None
            assert all(
                (new[path].dtype, new[path].shape, new[path].stride())
                == (old[path].dtype, old[path].shape, old[path].stride())
                for path in old
                if path != "none"
            )


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((pc.compress("int8"), pc.gossip_avg()), "estimates are of what fixed neighbours know"),
        ((pc.gossip_avg("ring"),), "has nothing to feed back"),
        ((pc.compress("int8"), pc.shard("local"), pc.gossip_avg("ring", axis="node")), "encodes by itself"),
        (
            (pc.compress("int8"), pc.partition({"a": pc.gossip_avg("ring"), "*": pc.ring_reduce()})),
            "estimates to gossip and residuals to ring_reduce()",
        ),
        ((pc.compress("int8"), pc.push_sum(TRIANGLE)), "takes no mean of all ranks"),
    ],
)
def test_error_feedback_refuses_what_estimates_cannot_follow(stages, message):
    with pytest.raises(pc.PipelineError, match=re.escape(message)):
        pc.error_feedback()(pc.chain(*stages))


# Push-sum -----------------------------------------------------------------------------------------------------------


def test_push_sum_on_three_ranks():
    trees = [{"x": torch.tensor([value], dtype=torch.float64)} for value in (0.0, 3.0, 6.0)]
    right = {
        1: (3.6, 1.8, 3.375),
        2: (3.441176, 2.52, 2.938776),
        5: (2.991139, 3.012749, 3.000289),
    }
    states = None
    for step in range(1, 6):
        result = pc.simulate(pc.push_sum(TRIANGLE), trees, states)
        trees, states = result.trees, result.states
        if step in right:
            assert tuple(round(each["x"].item(), 6) for each in trees) == right[step]
        assert sum(state["push_sum"]["weight"].item() for state in states) == pytest.approx(3, abs=1e-15)
        assert sum(state["push_sum"]["numerator"]["x"].item() for state in states) == pytest.approx(9, abs=1e-14)
    assert [state["step"] for state in states] == [5] * 3
    assert result.bytes == [32, 16, 16], "the numerator and the weight, to two peers or to one"


def test_steps_between_are_those_of_stochastic_gradient_push():
    # Algorithm 1 of Assran et al. 2019, a loop over ranks: gradients are taken at z and applied to x as they are.
    rate, targets, steps = 0.3, [1.0, -2.0, 7.0], 150
    shares = [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]]
    x, w, z = [0.0] * 3, [1.0] * 3, [0.0] * 3
    trees, states = [{"z": torch.zeros(1, dtype=torch.float64)} for _ in range(3)], None
    for step in range(steps):
        now = rate / (1 + step / 10)
        x = [x[i] - now * (z[i] - targets[i]) for i in range(3)]
        x = [sum(p * each for p, each in zip(row, x, strict=True)) for row in shares]
        w = [sum(p * each for p, each in zip(row, w, strict=True)) for row in shares]
        z = [a / b for a, b in zip(x, w, strict=True)]
        stepped = [{"z": each["z"] - now * (each["z"] - target)} for each, target in zip(trees, targets, strict=True)]
        result = pc.simulate(pc.push_sum(TRIANGLE), stepped, states)
        trees, states = result.trees, result.states
        assert [each["z"].item() for each in trees] == pytest.approx(z, abs=1e-12)
    assert z == pytest.approx([2.0] * 3, abs=0.2), "the mean of the targets counts each rank once"


@pytest.mark.parametrize("topology", [TRIANGLE, "one_peer_exponential", "ring", "random_matching"], ids=str)
def test_push_sum_in_buckets_has_the_same_bits(topology: Any):
    trees = [mixed_tree(rank) for rank in range(3)]
    alone = run(pc.push_sum(topology), trees, 4)
    for cap in (1, 60, "1MiB"):
        packed = run(pc.chain(pc.bucketize(cap), pc.push_sum(topology)), trees, 4)
        assert all(oracle.same_bits(a, b) for a, b in zip(alone.trees, packed.trees, strict=True))
        assert same_states(alone.states, packed.states)


@pytest.mark.parametrize("codec", [C.int8(), C.topk(0.2), C.sign()], ids=repr)
def test_compressed_push_sum_keeps_both_sums(codec: pc.Codec):
    trees = [tree(rank) for rank in range(3)]
    result = run(pc.chain(pc.bucketize(100), pc.compress(codec), pc.push_sum(TRIANGLE)), trees, 5)
    for path in trees[0]:
        kept = [state["push_sum"]["numerator"] for state in result.states]
        torch.testing.assert_close(total(kept, path), total(trees, path), rtol=0, atol=2e-5)
    assert sum(float(state["push_sum"]["weight"]) for state in result.states) == pytest.approx(3, abs=1e-14)


def test_push_sum_over_a_balanced_topology_is_gossip():
    trees = [tree(rank, dtype=torch.float64) for rank in range(6)]
    pushed, gossiped = (run(make("exponential"), trees, 3).trees for make in (pc.push_sum, pc.gossip_avg))
    for a, b in zip(pushed, gossiped, strict=True):
        torch.testing.assert_close(a["w"], b["w"], rtol=0, atol=1e-14)


def test_push_sum_leaves_its_inputs_and_states_alone():
    trees = [mixed_tree(rank) for rank in range(3)]
    first = pc.simulate(pc.push_sum(TRIANGLE), trees)
    assert all(oracle.same_bits(a, mixed_tree(rank)) for rank, a in enumerate(trees))
    before = [{path: leaf.clone() for path, leaf in state["push_sum"]["numerator"].items()} for state in first.states]
    second = [pc.simulate(pc.push_sum(TRIANGLE), first.trees, first.states) for _ in range(2)]
    assert all(oracle.same_bits(a, b) for a, b in zip(second[0].trees, second[1].trees, strict=True))
    assert all(
        oracle.same_bits(a, state["push_sum"]["numerator"]) for a, state in zip(before, first.states, strict=True)
    )


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pc.gossip_avg(TRIANGLE), pc.PipelineError, "write push_sum(digraph("),
        (lambda: pc.gossip_avg([[0.9, 0.1], [0.2, 0.8]]), pc.PipelineError, "column 0 of the matrix sums to 1.1"),
        (lambda: pc.push_sum([[0.9, 0.1], [0.2, 0.8]]), pc.PipelineError, "column 0 of the matrix sums to 1.1"),
        (lambda: pc.gossip_avg("ring", step_size=0), ValueError, "above 0 and up to 1"),
        (lambda: pc.gossip_avg("ring", step_size=1.5), ValueError, "above 0 and up to 1"),
        (lambda: pc.chain(pc.low_rank(2), pc.gossip_avg("ring")), pc.PipelineError, "use a reducer with consensus"),
        (lambda: pc.as_ddp_hook(pc.gossip_avg("ring")), pc.PipelineError, 'gossip_avg("ring")'),
        (lambda: pc.as_ddp_hook(pc.chain(pc.bucketize(), pc.push_sum())), pc.PipelineError, "push_sum("),
        (lambda: pc.overlap(pc.gossip_avg(), torch.nn.Linear(1, 1)), pc.PipelineError, "gossip_avg()"),
        (
            lambda: pc.simulate(pc.gossip_avg([[0.5, 0.5], [0.5, 0.5]]), [torch.ones(1)] * 3),
            ValueError,
            "has 2 ranks, numbered from 0, and the group has 3",
        ),
        (
            lambda: pc.simulate(pc.push_sum(TRIANGLE), [torch.ones(1)] * 3, weights=[1, 2, 3]),
            ValueError,
            "does not give every rank a mean",
        ),
    ],
)
def test_what_cannot_work(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_neither_reaches_consensus():
    for pipeline in (pc.gossip_avg("complete"), pc.push_sum(), pc.chain(pc.bucketize(), pc.gossip_avg("ring"))):
        assert pipeline.communicates
        assert not pipeline.consensus
        assert pipeline.works_on == "any"


# State --------------------------------------------------------------------------------------------------------------

STATEFUL = {
    "gossip": pc.chain(pc.bucketize(), pc.compress(C.randk(0.3)), pc.gossip_avg("bipartite")),
    "choco": pc.chain(pc.error_feedback(), pc.bucketize(64), pc.compress("int4"), pc.gossip_avg("ring", step_size=0.5)),
    "push": pc.chain(pc.bucketize(64), pc.compress("int8"), pc.push_sum(TRIANGLE)),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_save_load_and_go_on_is_the_uninterrupted_run(name: str):
    pipeline = STATEFUL[name]
    trees = [tree(rank) for rank in range(3)]
    first = run(pipeline, trees, 2)
    states = []
    for rank, state in enumerate(first.states):
        file = io.BytesIO()
        torch.save(pc.rank_local(state, rank=rank), file)
        file.seek(0)
        states.append(pc.from_rank_local(torch.load(file, weights_only=True), rank=rank))
    resumed, whole = run(pipeline, first.trees, 2, pc.reshard(states, 3)), run(pipeline, trees, 4)
    assert all(oracle.same_bits(a, b) for a, b in zip(resumed.trees, whole.trees, strict=True))
    assert same_states(resumed.states, whole.states)


def test_entries_of_one_rank_are_named_so():
    states = {
        name: run(pipeline, [tree(rank) for rank in range(3)], 1).states[1] for name, pipeline in STATEFUL.items()
    }
    assert set(pc.rank_local(states["choco"], rank=1)["error_feedback"]["pull"]) == {
        f"rank1/{path}" for path in ("w", "b", "scalar", "t")
    }
    saved = pc.rank_local(states["push"], rank=1)["push_sum"]
    assert set(saved["numerator"]) == {f"rank1/{path}" for path in ("w", "b", "scalar", "t")}
    assert set(saved["weight"]) == {"rank1/weight"}
    # A parameter called weight is no weight of push-sum.
    plain = {"step": 1, "low_rank": {"basis": {"weight": torch.ones(2)}}}
    assert pc.rank_local(plain, rank=1) == plain


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("name", ["choco", "push"])
def test_another_number_of_ranks_begins_again_with_the_trees_it_is_given(name: str, ranks: int):
    pipeline = {"choco": STATEFUL["choco"], "push": pc.push_sum("ring")}[name]
    before = run(STATEFUL[name], [tree(rank) for rank in range(3)], 3).states
    trees = [tree(rank, seed="new") for rank in range(ranks)]
    fresh = [{**pipeline.init(trees[0]), "step": 3} for _ in range(ranks)]
    again, anew = pc.simulate(pipeline, trees, pc.reshard(before, ranks)), pc.simulate(pipeline, trees, fresh)
    assert all(oracle.same_bits(a, b) for a, b in zip(again.trees, anew.trees, strict=True))
    assert same_states(again.states, anew.states)


# Training -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense() -> tuple[gossip_digits.Digits, float]:
    digits = gossip_digits.Digits.load()
    return digits, gossip_digits.train("dense", digits, STEPS).accuracy


@pytest.mark.parametrize("name", ["ring", "one_peer_exponential"])
def test_digits_over_8_ranks_are_as_accurate_as_dense(name: str, dense: Any):
    digits, accuracy = dense
    training = gossip_digits.train(name, digits, STEPS)
    assert accuracy > 0.93
    assert training.accuracy >= accuracy - 0.015
    assert min(training.accuracies) >= accuracy - 0.03
    assert training.distances[-1] > 1e-3, "ranks do differ"


def test_the_example_prints_and_draws(tmp_path: Any):
    picture = tmp_path / "gossip.png"
    output = run_example(EXAMPLES / "gossip_digits.py", "--steps", "15", "--output", picture)
    assert "Digits, 15 steps of decentralised SGD on 8 simulated ranks" in output
    sent = {
        name: int(number.replace(",", "")) for name, number in re.findall(r"^(\w+) .* ([\d,]+) B", output, re.MULTILINE)
    }
    tree_bytes = 4 * (64 * 64 + 64 + 64 * 10 + 10)
    peers = {"path": 2, "ring": 2, "torus": 3, "one_peer_exponential": 1}
    assert sent == {
        "dense": pytest.approx(2 * 7 / 8 * tree_bytes, abs=60),
        **{k: v * tree_bytes for k, v in peers.items()},
    }
    assert imread(picture).shape[1] > 1000
