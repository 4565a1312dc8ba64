"""Parameters averaged every few steps, and DiLoCo: against loops over ranks in float64, and by what is sent when."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchopt
from test_examples import EXAMPLES
from test_examples import run as run_example
from torch import Tensor

import ptcollect as pc

sys.path.append(str(EXAMPLES))
import diloco_digits

RANKS, LR = 4, 0.1
Trees = list[dict[str, Tensor]]


def start(rank: int = 0) -> dict[str, Tensor]:
    new = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=new) for name, shape in (("b", (3,)), ("a.w", (2, 3)), ("c", ()))}


def gradient(params: dict[str, Tensor], rank: int, step: int) -> dict[str, Tensor]:
    """Of a quadratic that is another one on every rank and at every step."""
    new = torch.Generator().manual_seed(100 * step + rank)
    return {name: (p - torch.randn(p.shape, generator=new)) * (1 + rank) for name, p in params.items()}


def stepped(params: dict[str, Tensor], rank: int, step: int) -> dict[str, Tensor]:
    return {
        name: p - LR * g for (name, p), g in zip(params.items(), gradient(params, rank, step).values(), strict=True)
    }


def train(pipeline: pc.Pipeline, steps: int, ranks: int = RANKS, began: Any = None) -> tuple[Trees, Any, list[int]]:
    """Plain SGD inside; the parameters of all ranks, their states, and what each step sent."""
    trees, states, first = began or ([start() for _ in range(ranks)], [pipeline.init(start())] * ranks, 0)
    sent = []
    for step in range(first, first + steps):
        run = pc.simulate(pipeline, [stepped(tree, r, step) for r, tree in enumerate(trees)], states)
        trees, states = run.trees, run.states
        sent.append(run.bytes[0])
    return trees, states, sent


def loop(steps: int, at: Callable[[int], bool], outer: Callable[[Any, Any], Any], ranks: int = RANKS) -> Trees:
    """The oracle: ranks as a list, in float64; `outer` makes the new anchor of the old one and the mean."""
    anchor = {name: p.double() for name, p in start().items()}
    trees = [dict(anchor) for _ in range(ranks)]
    for step in range(steps):
        trees = [
            {name: p - LR * g.double() for (name, p), g in zip(t.items(), oracle_gradient(t, r, step), strict=True)}
            for r, t in enumerate(trees)
        ]
        if at(step):
            mean = {name: sum(t[name] for t in trees) / ranks for name in anchor}
            anchor = outer(anchor, mean)
            trees = [dict(anchor) for _ in range(ranks)]
    return trees


def oracle_gradient(params: dict[str, Tensor], rank: int, step: int) -> list[Tensor]:
    new = torch.Generator().manual_seed(100 * step + rank)
    return [(p - torch.randn(p.shape, generator=new).double()) * (1 + rank) for p in params.values()]


def close(found: Trees, expected: Trees) -> None:
    for mine, other in zip(found, expected, strict=True):
        for name in other:
            torch.testing.assert_close(mine[name].double(), other[name].double(), rtol=0, atol=2e-5)


def averaged(_: Any, mean: Any) -> Any:
    return mean


def every(h: int) -> Callable[[int], bool]:
    return lambda step: (step + 1) % h == 0


# What it computes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [pc.local_sgd(1), pc.diloco(1, outer=pc.sgd(1.0))], ids=repr)
def test_every_step_is_synchronous_averaging_of_gradients(pipeline):
    trees, _, _ = train(pc.chain(pipeline, pc.bucketize(), pc.ring_reduce()), 6)
    expected = {name: p.double() for name, p in start().items()}
    for step in range(6):  # DDP: one set of parameters, the mean of all gradients
        means = [sum(g) / RANKS for g in zip(*(oracle_gradient(expected, r, step) for r in range(RANKS)), strict=True)]
        expected = {name: p - LR * g for (name, p), g in zip(expected.items(), means, strict=True)}
    close(trees, [expected] * RANKS)


@pytest.mark.parametrize("transform", [pc.local_sgd(3), pc.diloco(3, outer=pc.sgd(1.0))], ids=repr)
@pytest.mark.parametrize("reducer", [pc.ring_reduce(), pc.all_to_all_avg(), pc.auto_reduce()], ids=repr)
def test_outer_rate_one_is_averaging_of_parameters(transform, reducer):
    trees, states, sent = train(pc.chain(transform, reducer), 7)
    close(trees, loop(7, every(3), averaged))
    assert [bool(each) for each in sent] == [False, False, True, False, False, True, False]
    assert states[0]["step"] == 7


def test_nesterov_on_a_constant_pseudo_gradient():
    pipeline = pc.chain(pc.diloco(1, outer=pc.nesterov(lr=0.7, momentum=0.9)), pc.ring_reduce())
    trees, states, found = [torch.zeros(1)] * 2, [pipeline.init(torch.zeros(1))] * 2, []
    for _ in range(4):
        run = pc.simulate(pipeline, [tree - 1 for tree in trees], states)
        trees, states = run.trees, run.states
        found.append(trees[0].item())
    assert found == pytest.approx([-1.33, -3.227, -5.6343, -8.50087], abs=1e-5)


@pytest.mark.parametrize("outer", [pc.nesterov(0.7), torchopt.sgd(lr=0.7, momentum=0.9, nesterov=True)], ids=type)
def test_diloco_is_nesterov_on_what_ranks_moved_by(outer):
    trees, states, _ = train(pc.chain(pc.diloco(2, outer=outer), pc.bucketize(), pc.ring_reduce()), 8)
    momentum = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in start().items()}

    def step(anchor: Any, mean: Any) -> Any:
        new = {}
        for name, p in anchor.items():
            delta = p - mean[name]
            momentum[name] = 0.9 * momentum[name] + delta
            new[name] = p - 0.7 * (delta + 0.9 * momentum[name])
        return new

    close(trees, loop(8, every(2), step))
    close([states[0]["diloco"]["anchor"]], trees[:1])


@pytest.mark.parametrize(
    "outer", [torchopt.adam(lr=0.1), (lambda p: {}, lambda g, s, params: (g, s))], ids=["adam", "pair"]
)
def test_any_pair_of_functions_is_an_outer_optimiser(outer):
    pipeline = pc.chain(pc.diloco(2, outer=outer), pc.ring_reduce())
    trees, states, _ = train(pipeline, 4)
    assert all(torch.equal(trees[0][name], tree[name]) for tree in trees for name in tree)
    saved = io.BytesIO()
    torch.save(states[0], saved)
    saved.seek(0)
    again = torch.load(saved, weights_only=True)
    close(train(pipeline, 2, began=(trees, [again] * RANKS, 4))[0], train(pipeline, 6)[0])


@pytest.mark.parametrize("outer", [3, object(), (1, 2), torchopt.sgd], ids=repr)
def test_what_is_no_optimiser(outer):
    with pytest.raises(pc.PipelineError, match="outer: expected an optimiser with init"):
        pc.diloco(2, outer=outer)


def test_post_local_sgd_begins_as_ddp():
    trees, _, sent = train(pc.chain(pc.post_local_sgd(3, every=2), pc.ring_reduce()), 8)
    close(trees, loop(8, lambda step: step < 3 or (step - 2) % 2 == 0, averaged))
    assert [bool(each) for each in sent] == [True, True, True, False, True, False, True, False]


def test_streaming_sends_a_fragment_at_a_time_and_uses_it_later():
    h, parts, delay, alpha = 4, 2, 1, 0.25
    transform = pc.streaming_diloco(h, fragments=parts, delay=delay, alpha=alpha, outer=pc.nesterov(0.7))
    trees, _, sent = train(pc.chain(transform, pc.ring_reduce()), 10)
    fragments = [["a.w", "c"], ["b"]]  # leaves in natural order, in turn

    anchor = {name: p.double() for name, p in start().items()}
    momentum = {name: torch.zeros_like(p) for name, p in anchor.items()}
    local, waiting, expected_sends = [dict(anchor) for _ in range(RANKS)], {}, []
    for step in range(10):
        local = [
            {name: p - LR * g for (name, p), g in zip(t.items(), oracle_gradient(t, r, step), strict=True)}
            for r, t in enumerate(local)
        ]
        now = [f for f in range(parts) if (step + 1 + f * h // parts) % h == 0]
        expected_sends.append(bool(now))
        for fragment in now:
            for name in fragments[fragment]:
                delta = anchor[name] - sum(t[name] for t in local) / RANKS
                momentum[name] = 0.9 * momentum[name] + delta
                anchor[name] = anchor[name] - 0.7 * (delta + 0.9 * momentum[name])
            waiting[step + delay] = fragments[fragment], dict(anchor)
        for name in waiting.get(step, ([], {}))[0]:
            for tree in local:
                tree[name] = alpha * tree[name] + (1 - alpha) * waiting[step][1][name]
    close(trees, local)
    assert [bool(each) for each in sent] == expected_sends


# What it keeps, sends and refuses -----------------------------------------------------------------------------------


STACKS = [
    pc.chain(pc.diloco(3), pc.error_feedback(), pc.bucketize(), pc.compress("int8"), pc.ring_reduce()),
    pc.chain(pc.diloco(3), pc.error_feedback(), pc.low_rank(1), pc.all_to_all_avg()),
    pc.chain(pc.streaming_diloco(4, fragments=2, delay=1), pc.error_feedback(), pc.compress("sign"), pc.ring_reduce()),
    pc.chain(pc.diloco(2), pc.bucketize(), pc.gossip_avg("one_peer_exponential")),
    pc.chain(pc.local_sgd(2), pc.gossip_avg("ring")),
]


@pytest.mark.parametrize("pipeline", STACKS, ids=repr)
def test_a_run_cut_anywhere_goes_on_bit_for_bit(pipeline):
    whole, states, _ = train(pipeline, 9)
    trees, halfway, _ = train(pipeline, 5)
    saved = io.BytesIO()
    torch.save((trees, halfway), saved)
    saved.seek(0)
    trees, halfway = torch.load(saved, weights_only=True)
    again, after, _ = train(pipeline, 4, began=(trees, halfway, 5))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(whole, again, strict=True) for name in a)
    assert repr(after) == repr(states)


@pytest.mark.parametrize("codec", ["int8", "sign", pc.codecs.topk(0.3)], ids=repr)
def test_what_a_codec_drops_from_pseudo_gradients_comes_later(codec):
    """Law 6 at outer rate 1: n times what the anchor moved by, and all residuals, are all pseudo-gradients together."""
    pipeline = pc.chain(pc.diloco(2, outer=pc.sgd(1.0)), pc.error_feedback(), pc.compress(codec), pc.all_to_all_avg())
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in start().items()}
    trees, states = [start() for _ in range(RANKS)], [pipeline.init(start())] * RANKS
    for step in range(8):
        moved = [stepped(tree, r, step) for r, tree in enumerate(trees)]
        if step % 2:
            for tree in moved:
                for name, anchor in states[0]["diloco"]["anchor"].items():
                    total[name] += anchor.double() - tree[name]
        run = pc.simulate(pipeline, moved, states)
        trees, states = run.trees, run.states
    for name, expected in total.items():
        moved_by = (start()[name].double() - states[0]["diloco"]["anchor"][name]) * RANKS
        residuals = sum(state["error_feedback"]["residual"][name].double() for state in states)
        torch.testing.assert_close(moved_by + residuals, expected, rtol=0, atol=1e-4)


def test_with_gossip_inside_each_rank_has_its_own_anchor():
    _, states, _ = train(STACKS[3], 4)
    anchors = [state["diloco"]["own_anchor"]["b"] for state in states]
    assert len({tuple(anchor.tolist()) for anchor in anchors}) > 1
    assert list(pc.rank_local(states[1], rank=1)["diloco"]["own_anchor"]) == ["rank1/a.w", "rank1/b", "rank1/c"]
    assert torch.equal(pc.reshard(states, 6)[5]["diloco"]["own_anchor"]["b"], anchors[0])


def test_ranks_that_begin_differently_are_an_error_in_the_first_round():
    pipeline = pc.chain(pc.diloco(2), pc.ring_reduce())
    inits = [start(), start(), {**start(), "b": start()["b"] + 1}]
    states = [pipeline.init(each) for each in inits]
    once = pc.simulate(pipeline, inits, states)
    with pytest.raises(
        pc.TreeMismatchError, match="the replicas differ: 'b' has other values on rank 2 than on rank 0"
    ):
        pc.simulate(pipeline, once.trees, once.states)


def test_integers_stay_and_inputs_are_left_alone():
    tree = {"w": torch.ones(2), "batches": torch.tensor(3)}
    pipeline = pc.chain(pc.diloco(1, outer=pc.sgd()), pc.ring_reduce())
    state = pipeline.init(tree)
    run = pc.simulate(pipeline, [{"w": torch.full((2,), r), "batches": torch.tensor(r)} for r in (1, 3)], [state] * 2)
    run2 = pc.simulate(
        pipeline, [{"w": torch.full((2,), float(r)), "batches": torch.tensor(r)} for r in (1, 3)], [state] * 2
    )
    assert [t["batches"].item() for t in run2.trees] == [1, 3] == [t["batches"].item() for t in run.trees]
    assert torch.equal(run2.trees[0]["w"], torch.full((2,), 2.0))
    assert torch.equal(state["diloco"]["anchor"]["w"], torch.ones(2))
    assert run2.trees[0]["w"].data_ptr() != run2.states[0]["diloco"]["anchor"]["w"].data_ptr()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (pc.as_ddp_hook, "works on parameters"),
        (lambda p: pc.overlap(p, torch.nn.Linear(1, 1)), "works on parameters"),
        (lambda p: pc.sync_grads(p, torch.nn.Linear(1, 1)), "works on parameters, not on gradients; use sync_params"),
        (lambda p: pc.as_fsdp_hook(p, None), "works on parameters"),
        (lambda p: pc.simulate(p, [torch.ones(1)] * 2, weights=[1, 2]), "weights belong to means of gradients"),
        (pc.error_feedback(), "error_feedback"),
    ],
)
@pytest.mark.parametrize("transform", [pc.diloco(2), pc.local_sgd(2), pc.streaming_diloco(2)], ids=repr)
def test_who_refuses_them(transform, call, says):
    with pytest.raises((pc.PipelineError, ValueError), match=says):
        call(pc.chain(transform, pc.compress("bf16"), pc.ring_reduce()))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: pc.diloco(0), "every"),
        (lambda: pc.local_sgd(2.5), "every"),
        (lambda: pc.post_local_sgd(-1, every=2), "dense"),
        (lambda: pc.streaming_diloco(2, fragments=3), "at most every=2, got 3"),
        (lambda: pc.streaming_diloco(2, delay=2), "less than every=2 steps, got 2"),
        (lambda: pc.streaming_diloco(2, alpha=1), "from 0 to below 1, got 1"),
        (lambda: pc.nesterov(0), "positive"),
        (lambda: pc.nesterov(1, momentum=1), "below 1, got 1"),
    ],
)
def test_bad_options(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_another_tree_than_the_states():
    pipeline = pc.chain(pc.diloco(1), pc.ring_reduce())
    with pytest.raises(pc.PipelineError, match=r"leaf 'b' has shape \(4,\) and the state's anchor has \(3,\)"):
        pc.simulate(pipeline, [{"b": torch.ones(4)}] * 2, [pipeline.init({"b": torch.ones(3)})] * 2)


# Digits -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense() -> tuple[diloco_digits.Digits, float]:
    digits = diloco_digits.Digits.load()
    return digits, diloco_digits.train("dense", digits, 120).accuracy


@pytest.mark.parametrize("name", ["local SGD", "DiLoCo", "DiLoCo, int8", "streaming DiLoCo"])
def test_digits_over_8_ranks_are_as_accurate_as_averaging_at_every_step(name, dense):
    digits, accuracy = dense
    training = diloco_digits.train(name, digits, 120)
    assert accuracy > 0.93
    assert training.accuracy >= accuracy - 0.015
    tree = 4 * (64 * 64 + 64 + 64 * 10 + 10)
    share = 0.26 if "int8" in name else 1
    assert training.sent == pytest.approx(share * 6 * tree * 2 * 7 / 8, rel=0.03), "6 rounds of a ring over 8 ranks"


def test_the_example_prints():
    output = run_example(EXAMPLES / "diloco_digits.py", "--steps", "20")
    assert "Digits, 20 steps on 8 simulated ranks, rounds of 20 steps" in output
    assert re.search(r"DiLoCo, int8 .* [\d,]+ B", output)
