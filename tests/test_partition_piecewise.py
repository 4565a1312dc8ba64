"""`partition`: a pipeline per parameter; `piecewise`: a pipeline per step."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import oracle
import pytest
import torch
from codec_table import one_thread, same_data  # noqa: F401  (one_thread is a fixture)
from torch import Tensor

import ptcollect as pc

C = pc.codecs
RING = pc.ring_reduce()
INT8 = pc.chain(pc.error_feedback(), pc.compress("int8"), RING)
SIGN = pc.chain(pc.error_feedback(), pc.compress("sign"), pc.all_to_all_avg())
LOW = pc.chain(pc.error_feedback(), pc.low_rank(1), RING)


def all_of(*parts: str) -> str:
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)


def tree(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    return {
        "layers": [{"weight": torch.randn(6, 5, generator=generator), "bias": torch.randn(5, generator=generator)}] * 2,
        "norm": {"weight": torch.randn(7, generator=generator)},
        "embedding": torch.randn(20, 3, generator=generator),
    }


def flat(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {path: torch.randn(size, generator=generator) for path, size in (("a", 5), ("b", 7), ("c.d", 3))}


# partition ----------------------------------------------------------------------------------------------------------

RULES = {
    "embedding": pc.chain(pc.error_feedback(), pc.compress(C.topk(0.1)), pc.all_gather_avg()),
    "*.bias": pc.all_to_all_avg(),
    "layers.*": LOW,
    "*": pc.chain(pc.bucketize(), pc.compress("bf16"), RING),
}


def test_each_leaf_is_treated_by_its_first_rule_alone():
    # The same as running every rule's pipeline on its own part.
    trees = [tree(rank) for rank in range(3)]
    together = pc.simulate(pc.partition(RULES), trees)
    parts = {
        "embedding": lambda each: {"embedding": each["embedding"]},
        "*.bias": lambda each: {"layers": [{"bias": layer["bias"]} for layer in each["layers"]]},
        "layers.*": lambda each: {"layers": [{"weight": layer["weight"]} for layer in each["layers"]]},
        "*": lambda each: {"norm": each["norm"]},
    }
    sent = 0
    for pattern, part in parts.items():
        alone = pc.simulate(RULES[pattern], [part(each) for each in trees])
        sent += alone.bytes[0]
        assert all(oracle.same_bits(part(got), want) for got, want in zip(together.trees, alone.trees, strict=True)), (
            pattern
        )
    assert together.bytes[0] == sent
    assert oracle.structure(together.trees[0]) == oracle.structure(trees[0])
    state = together.states[0]
    assert set(state) == {"step", "error_feedback", "error_feedback_1", "low_rank"}
    assert set(state["error_feedback"]["residual"]) == {"embedding"}
    assert set(state["error_feedback_1"]["residual"]) == {"layers.0.weight", "layers.1.weight"}


def test_order_of_rules_decides():
    trees = [{"w": torch.tensor([1.0, 0.001])}, {"w": torch.tensor([1.0, 0.001])}]
    dense, sparse = RING, pc.chain(pc.compress(C.topk(0.5)), pc.all_gather_avg())
    assert pc.simulate(pc.partition({"w": dense, "*": sparse}), trees).trees[0]["w"][1] > 0
    assert pc.simulate(pc.partition({"*": sparse, "w": dense}), trees).trees[0]["w"][1] == 0


def test_patterns_are_shell_patterns_over_dotted_paths():
    trees = [{"a": {"b": {"weight": torch.tensor([float(r)])}}, "abc": torch.tensor([float(r)])} for r in range(2)]
    for pattern in ("a.*", "*.weight", "a.b.weight", "a?b.weight", "[a].b.*"):
        run = pc.simulate(pc.partition({pattern: pc.chain(), "*": RING}), trees)
        assert run.trees[1]["a"]["b"]["weight"].item() == 1.0, pattern
        assert run.trees[1]["abc"].item() == 0.5
    with pytest.raises(pc.PipelineError, match="'abc'"):
        pc.simulate(pc.partition({"a.*": RING, "A*": RING}), trees)  # case counts


def test_unmatched_leaves_are_all_listed():
    rules = pc.partition({"*.weight": RING, "norm.*": RING})
    for run in (lambda: pc.simulate(rules, [tree(0)] * 2), lambda: pc.partition({"x": INT8}).init(tree(0))):
        with pytest.raises(
            pc.PipelineError, match=all_of("no rule matches", "'embedding'", "layers.0.bias", "default")
        ):
            run()


def test_a_rule_that_no_leaf_matches_does_no_harm():
    trees = [flat(rank) for rank in range(3)]
    for unused in (INT8, LOW, RING, pc.chain(pc.bucketize(), RING), pc.clip_by_global_norm(1.0)):
        run = pc.simulate(pc.partition({"zz.*": unused, "*": RING}), trees)
        assert oracle.same_bits(run.trees[0], pc.simulate(RING, trees).trees[0])


def test_missing_leaves_in_a_partition():
    trees = [{**flat(rank), "a": None} for rank in range(2)]
    run = pc.simulate(
        pc.partition({"a": INT8, "*": RING}), trees, [pc.partition({"a": INT8, "*": RING}).init(flat(0))] * 2
    )
    assert run.trees[0]["a"] is None
    assert oracle.same_bits(run.trees[0], pc.simulate(RING, trees).trees[0])


def test_transforms_around_a_partition():
    inner = pc.partition({"a": pc.chain(pc.compress("int8"), RING), "*": pc.chain(pc.low_rank(1), RING)})
    sync = pc.error_feedback()(inner)
    state = sync.init(flat(0))
    assert set(state["error_feedback"]["residual"]) == {"a", "b", "c.d"}
    assert sync.consensus
    with pytest.raises(pc.PipelineError, match=all_of("all_reduce()", "error_feedback()")):
        pc.error_feedback()(pc.partition({"a": pc.chain(pc.compress("bf16"), RING), "*": pc.all_reduce()}))


def test_buckets_have_no_paths_to_partition():
    with pytest.raises(pc.PipelineError, match=all_of("partition(", "inside bucketize()")):
        pc.bucketize()(pc.partition({"*.bias": pc.all_to_all_avg(), "*": RING}))


@pytest.mark.parametrize(
    ("rules", "parts"),
    [
        ({}, ("no rules", '"*"')),
        ({"a": pc.bucketize()}, ("'a'", "bucketize()", "chain(transform, ring_reduce())")),
        ({3: RING}, ("3: ring_reduce()", "pattern")),
        ({"a": "int8"}, ("'a': 'int8'",)),
        ({"a": torch.ones(1)}, ("tree",)),
    ],
)
def test_bad_rules(rules, parts):
    with pytest.raises(pc.PipelineError, match=all_of(*parts)):
        pc.partition(rules)


def test_a_partition_agrees_only_if_all_its_rules_do():
    assert pc.partition({"a": RING, "*": pc.all_gather_avg()}).consensus
    assert not pc.partition({"a": pc.gather_avg(), "*": RING}).consensus


# piecewise ----------------------------------------------------------------------------------------------------------


def test_pieces_begin_at_their_steps():
    pieces = {
        0: RING,
        2: pc.chain(pc.compress("bf16"), RING),
        3: pc.chain(
            pc.compress(
                "int8",
            ),
            RING,
        ),
    }
    trees, states, sent = [{"w": torch.ones(512)}] * 2, None, []
    for _ in range(5):
        run = pc.simulate(pc.piecewise(pieces), trees, states)
        states = run.states
        sent.append(run.bytes[0])
    assert sent == [2048, 2048, 1024, 520, 520]
    assert states[0] == {"step": 5, "piecewise": {"piece": 2}}


def test_order_in_which_pieces_are_written_does_not_matter():
    one, other = pc.piecewise({0: RING, 5: INT8, 20: SIGN}), pc.piecewise({20: SIGN, 0: RING, 5: INT8})
    assert one == other
    assert repr(one) == repr(other)


def test_a_piece_by_itself_is_what_runs():
    # From its own first step on, a piece does what its pipeline would do with the same state.
    trees = [flat(rank) for rank in range(3)]
    sync, states = pc.piecewise({0: RING, 3: INT8}), None
    for _ in range(3):
        states = pc.simulate(sync, trees, states).states
    alone = [{"step": 3, **{key: value for key, value in INT8.init(flat(0)).items() if key != "step"}}] * 3
    for _ in range(3):
        run, expected = pc.simulate(sync, trees, states), pc.simulate(INT8, trees, alone)
        assert same_data(run.trees, expected.trees)
        own = [{key: value for key, value in state.items() if key != "piecewise"} for state in run.states]
        assert same_data(own, expected.states)
        states, alone = run.states, expected.states


def test_state_of_a_piece_that_has_not_begun_is_as_init_made_it():
    sync = pc.piecewise({0: SIGN, 4: LOW})
    first = sync.init(flat(0))
    run = pc.simulate(sync, [flat(rank) for rank in range(2)])
    for key in ("error_feedback_1", "low_rank"):
        assert same_data(run.states[0][key], first[key])


def test_residuals_move_over_and_count_once():
    trees = [flat(rank) for rank in range(2)]
    sync = pc.piecewise({0: SIGN, 1: pc.chain(pc.error_feedback(), pc.compress(C.topk(1.0)), pc.all_gather_avg())})
    states = pc.simulate(sync, trees).states
    owed = [state["error_feedback"]["residual"] for state in states]
    run = pc.simulate(sync, trees, states)
    # topk(1.0) sends everything: the second mean is that of gradients and what was owed.
    for path in trees[0]:
        want = sum(trees[r][path].double() + owed[r][path].double() for r in range(2)) / 2
        assert torch.allclose(run.trees[0][path].double(), want, atol=1e-6)
        assert not run.states[0]["error_feedback"]["residual"][path].any()
        assert not run.states[0]["error_feedback_1"]["residual"][path].any()


def test_residuals_of_other_paths_stay_where_they_are():
    only_b = pc.partition({"b": INT8, "*": RING})
    sync = pc.piecewise({0: SIGN, 1: only_b})
    trees = [flat(rank) for rank in range(2)]
    states = pc.simulate(sync, trees).states
    after = pc.simulate(sync, trees, states).states
    for old, new in zip(states, after, strict=True):
        was, now = (state["error_feedback"]["residual"] for state in (old, new))
        assert torch.equal(was["a"], now["a"])
        assert not now["b"].any()


def test_falling_ratios_as_a_row_of_pieces():
    # Deep gradient compression, section 3.3: 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %.
    ratios = (0.25, 0.0625, 0.015625, 0.004, 0.001)
    sync = pc.piecewise(
        {
            i: pc.chain(pc.error_feedback(), pc.compress(C.topk(ratio)), pc.all_gather_avg())
            for i, ratio in enumerate(ratios)
        }
    )
    trees = [{"w": torch.randn(1000, generator=torch.Generator().manual_seed(r))} for r in range(2)]
    states, sent = None, []
    for _ in ratios:
        run = pc.simulate(sync, trees, states)
        states = run.states
        sent.append(run.bytes[0])
    assert sent == [k * 6 for k in (250, 63, 16, 4, 1)]


def test_inputs_and_states_are_left_alone():
    sync, trees = pc.piecewise({0: SIGN, 1: INT8}), [flat(rank) for rank in range(2)]
    states = pc.simulate(sync, trees).states
    before = copy.deepcopy((trees, states))
    pc.simulate(sync, trees, states)
    assert same_data(before, (trees, states))


def test_a_stateless_row_still_counts_steps():
    sync = pc.piecewise({0: RING, 2: pc.all_to_all_avg()})
    assert sync.init(flat(0)) == {"step": 0, "piecewise": {"piece": 0}}
    with pytest.raises(pc.PipelineError, match=all_of("keeps state", "piecewise", "init(params)")):
        sync(flat(0))


@pytest.mark.parametrize(
    ("pieces", "parts"),
    [
        ({}, ("{0: pipeline",)),
        ({5: RING}, ("{0: pipeline", "{5: ring_reduce()}")),
        ({0: pc.bucketize()}, ("at step 0", "bucketize()", "reducer")),
        ({0: RING, 10: "int8"}, ("at step 10", "'int8'")),
        ({0: torch.ones(1)}, ("tree",)),
        ({0: RING, -1: RING}, ("whole number from 0 on", "-1")),
        ({0: RING, 1.5: RING}, ("whole number from 0 on", "1.5")),
        ({0: RING, "7": RING}, ("whole number from 0 on", "'7'")),
    ],
)
def test_bad_pieces(pieces, parts):
    with pytest.raises(pc.PipelineError, match=all_of(*parts)):
        pc.piecewise(pieces)


@pytest.mark.parametrize(
    "sync",
    [
        pc.partition(RULES),
        pc.piecewise({0: RING, 100: INT8, 1000: LOW}),
        pc.partition({"a": pc.piecewise({0: RING, 9: INT8}), "*": RING}),
        pc.chain(pc.skip_nonfinite(), pc.partition({'odd"name': RING, "*": INT8})),
    ],
    ids=["partition", "piecewise", "nested", "quotes"],
)
def test_they_are_values(sync):
    names = {**vars(C), **{name: getattr(pc, name) for name in pc.__all__}}
    for other in (eval(repr(sync), names), pickle.loads(pickle.dumps(sync)), copy.deepcopy(sync)):
        assert other == sync
        assert hash(other) == hash(sync)
    assert sync.consensus
