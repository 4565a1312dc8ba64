"""`error_feedback`: what it is for, what it refuses, and what its state is."""

from __future__ import annotations

import copy
import math
import pickle
import re

import pytest
import torch
from codec_table import one_thread, same_data  # noqa: F401  (one_thread is a fixture)

import ptcollect as pc
from ptcollect.comm import Axis, Comm

C = pc.codecs
FEEDBACK = pc.error_feedback()


# What it is for -----------------------------------------------------------------------------------------------------


def value(x: torch.Tensor) -> float:
    """Karimireddy et al. 2019, counterexample 2: no multiple of the sign of its gradient ever changes x1 + x2."""
    return 0.5 * abs(float(x[0] + x[1])) + abs(float(x[0] - x[1]))


def subgradient(x: torch.Tensor) -> torch.Tensor:
    along, across = (1.0 if total >= 0 else -1.0 for total in (x[0] + x[1], x[0] - x[1]))
    return torch.tensor([0.5 * along + across, 0.5 * along - across], dtype=torch.float64)


def descent(sync: pc.Pipeline, steps: int = 500) -> list[float]:
    """Values along the way from (1, 1.5), on two ranks with the same gradient, with falling steps."""
    x, states, values = torch.tensor([1.0, 1.5], dtype=torch.float64), None, []
    for step in range(steps):
        run = pc.simulate(sync, [subgradient(x)] * 2, states)
        states = run.states if sync.stateful else None
        x = x - 0.5 * 0.98**step * run.trees[0]
        values.append(value(x))
    return values


@pytest.mark.parametrize("reducer", [pc.ring_reduce(), pc.all_to_all_avg(), pc.all_gather_avg()], ids=repr)
def test_signs_stall_where_signs_with_error_feedback_arrive(reducer):
    # Only where both numbers travel in one block do they lose their proportion.
    plain = descent(pc.chain(pc.compress("sign"), pc.all_gather_avg()))
    assert min(plain) >= 1.25 - 1e-5  # scales are float32
    assert plain[-1] == pytest.approx(1.25, abs=1e-2)
    assert descent(pc.chain(FEEDBACK, pc.compress("sign"), reducer))[-1] < 1e-2


def test_small_gradients_get_through_in_the_end():
    # Beside 1.0 an int4 step is 1/7: 0.05 never arrives without error feedback, and on average arrives whole with it.
    grads = [torch.tensor([1.0, 0.05])] * 2
    plain = pc.chain(pc.compress("int4"), pc.all_gather_avg())
    assert pc.simulate(plain, grads).trees[0].tolist() == [1.0, 0.0]
    sync, states, total = pc.chain(FEEDBACK, plain), None, 0.0
    for _ in range(100):
        run = pc.simulate(sync, grads, states)
        states, total = run.states, total + float(run.trees[0][1])
    assert total == pytest.approx(5.0, abs=2 / 7)


# Its arithmetic, by hand --------------------------------------------------------------------------------------------


def test_the_residual_is_added_to_the_next_gradient():
    sync = pc.chain(FEEDBACK, pc.compress(C.topk(0.5)), pc.all_gather_avg())
    first = pc.simulate(sync, [torch.tensor([3.0, 2.0]), torch.tensor([1.0, -4.0])])
    assert first.trees[0].tolist() == [1.5, -2.0]
    owed = [state["error_feedback"]["residual"]["<tensor>"].tolist() for state in first.states]
    assert owed == [[0.0, 2.0], [1.0, 0.0]]
    second = pc.simulate(sync, [torch.tensor([3.0, 2.0]), torch.tensor([1.0, 1.0])], first.states)
    assert second.trees[0].tolist() == [1.0, 2.0]  # [0, 4] of rank 0, [2, 0] of rank 1
    owed = [state["error_feedback"]["residual"]["<tensor>"].tolist() for state in second.states]
    assert owed == [[3.0, 0.0], [0.0, 1.0]]


def test_what_the_result_loses_is_booked_by_its_owner_times_the_ranks():
    # Rank 0 owns element 0, rank 1 element 1; bf16 keeps 8 bits, and the means need 9.
    sync = pc.chain(FEEDBACK, pc.compress("bf16"), pc.all_to_all_avg())
    run = pc.simulate(sync, [torch.tensor([256.0, 3.0]), torch.tensor([258.0, 512.0])])
    assert run.trees[0].tolist() == [256.0, 258.0]  # 257 and 257.5; 257 lies in the middle, 256 is even
    owed = [state["error_feedback"]["residual"]["<tensor>"].tolist() for state in run.states]
    assert owed == [[2.0, 0.0], [0.0, -1.0]]


def test_narrow_leaves_keep_what_their_dtype_cannot_hold():
    # 1/3 of 1.0 and two zeros: bf16 has no 1/3, every rank books its share of the difference.
    grads = [{"w": torch.tensor([each], dtype=torch.bfloat16)} for each in (1.0, 0.0, 0.0)]
    sync = pc.chain(FEEDBACK, pc.compress(C.topk(1.0)), pc.all_gather_avg())
    states, total = None, 0.0
    for step in range(1, 30):
        run = pc.simulate(sync, grads, states)
        states = run.states
        assert run.trees[0]["w"].dtype == torch.bfloat16
        total += 3 * float(run.trees[0]["w"])
        owed = [state["error_feedback"]["residual"]["w"] for state in states]
        assert all(leaf.dtype == torch.float32 for leaf in owed)
        assert total + sum(map(float, owed)) == pytest.approx(step, abs=1e-5)
        assert total == pytest.approx(step, abs=3 / 256)


@pytest.mark.parametrize(
    ("leaf", "kept"),
    [
        (torch.ones(3), torch.float32),
        (torch.ones(3, dtype=torch.float64), torch.float64),
        (torch.ones(3, dtype=torch.bfloat16), torch.float32),
        (torch.ones(3, dtype=torch.float16), torch.float32),
        (torch.ones(3, dtype=torch.float8_e5m2), torch.float32),
        (torch.ones(3, dtype=torch.complex64), torch.complex64),
        (torch.ones(()), torch.float32),
        (torch.ones(0, 3), torch.float32),
        (torch.ones(3, dtype=torch.int32), None),
    ],
    ids=lambda value: f"{value.dtype}{tuple(value.shape)}" if isinstance(value, torch.Tensor) else "",
)
def test_what_the_state_holds(leaf, kept):
    sync = pc.chain(FEEDBACK, pc.compress("int8"), pc.ring_reduce())
    state = sync.init({"w": leaf, "v": torch.ones(1)})
    for each in (state, *pc.simulate(sync, [{"w": leaf, "v": torch.ones(1)}] * 2, [state] * 2).states):
        residual = each["error_feedback"]["residual"]
        assert set(residual) == ({"w", "v"} if kept else {"v"})
        if kept:
            assert residual["w"].dtype == kept
            assert residual["w"].shape == leaf.shape
    assert not any(leaf.any() for leaf in state["error_feedback"]["residual"].values())


@pytest.mark.parametrize("stages", [(), (pc.bucketize(),), (pc.bucketize(4),)], ids=repr)
def test_residuals_have_storage_of_their_own(stages):
    # A checkpoint of one residual must not hold a whole bucket, nor must two share memory with it or with the result.
    grads = [{"a": torch.randn(40, 3), "b": torch.randn(7), "c": torch.randn(3, 40).t()} for _ in range(2)]
    run = pc.simulate(pc.chain(FEEDBACK, *stages, pc.compress("int8"), pc.ring_reduce()), grads)
    for tree, result, state in zip(grads, run.trees, run.states, strict=True):
        residual = state["error_feedback"]["residual"]
        assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in residual.values())
        kept = {leaf.untyped_storage().data_ptr() for leaf in residual.values()}
        others = {leaf.untyped_storage().data_ptr() for leaf in (*result.values(), *tree.values())}
        assert len(kept) == 3
        assert not kept & others


def test_a_missing_leaf_keeps_its_residual():
    sync = pc.chain(FEEDBACK, pc.bucketize(), pc.compress("int4"), pc.ring_reduce())
    full = [{"a": torch.tensor([1.0, 0.3 + r]), "b": torch.tensor([2.0, 0.7])} for r in range(2)]
    before = pc.simulate(sync, full).states
    run = pc.simulate(sync, [{"a": None, "b": full[r]["b"]} for r in range(2)], before)
    for old, new, tree in zip(before, run.states, run.trees, strict=True):
        assert tree["a"] is None
        was, now = (state["error_feedback"]["residual"]["a"] for state in (old, new))
        assert was.any()
        assert torch.equal(was, now)
    # Missing on one rank only, as zeros: there the residual alone travels.
    some = pc.simulate(sync, [full[0], {"a": None, "b": full[1]["b"]}], before, missing="zeros")
    owed = [state["error_feedback"]["residual"]["a"].double() for state in (*before, *some.states)]
    put_in = owed[0] + owed[1] + full[0]["a"].double()
    assert torch.allclose(2 * some.trees[0]["a"].double() + owed[2] + owed[3], put_in, atol=1e-6)


def test_weights_scale_what_goes_in():
    sync = pc.chain(FEEDBACK, pc.compress("int4"), pc.ring_reduce())
    grads = [torch.tensor([1.0, 0.3]), torch.tensor([0.2, -1.0]), torch.tensor([0.5, 0.45])]
    weights = [1.0, 3.0, 4.0]
    run = pc.simulate(sync, grads, weights=weights)
    put_in = sum(3 * w / 8 * g.double() for w, g in zip(weights, grads, strict=True))
    owed = sum(state["error_feedback"]["residual"]["<tensor>"].double() for state in run.states)
    assert torch.allclose(3 * run.trees[0].double() + owed, put_in, atol=1e-6)


def test_one_rank_owes_nothing():
    sync = pc.chain(FEEDBACK, pc.compress("sign"), pc.ring_reduce())
    run = pc.simulate(sync, [{"w": torch.tensor([1.0, 2.0])}])
    assert run.trees[0]["w"].tolist() == [1.0, 2.0]
    assert run.bytes == [0]
    assert not run.states[0]["error_feedback"]["residual"]["w"].any()


def test_inputs_and_states_are_left_alone():
    sync = pc.chain(FEEDBACK, pc.bucketize(), pc.compress("int4"), pc.ring_reduce())
    trees = [{"w": torch.randn(7, generator=torch.Generator().manual_seed(r))} for r in range(2)]
    states = pc.simulate(sync, trees).states
    before = copy.deepcopy((trees, states))
    after = pc.simulate(sync, trees, states).states
    assert same_data(before, (trees, states))
    assert states[0]["step"] == 1
    assert after[0]["step"] == 2


# What it refuses ----------------------------------------------------------------------------------------------------

INT8 = pc.compress("int8")


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: pc.chain(FEEDBACK, pc.ring_reduce()), ("nothing to feed back", 'compress("bf16"), ring_reduce()')),
        (lambda: pc.chain(FEEDBACK, pc.bucketize(), pc.all_to_all_avg()), ("nothing to feed back", "bucketize()")),
        (lambda: pc.chain(FEEDBACK, pc.compress("bf16"), pc.all_reduce()), ("all_reduce()", "ring_reduce()")),
        (lambda: pc.chain(FEEDBACK, pc.low_rank(2), pc.all_reduce()), ("all_reduce()", "ring_reduce()")),
        (
            lambda: pc.chain(FEEDBACK, pc.clip_by_global_norm(1.0), INT8, pc.ring_reduce()),
            ("clip_by_global_norm(1.0) between", "chain(clip_by_global_norm(1.0), error_feedback(), ...)"),
        ),
        (lambda: pc.chain(FEEDBACK, pc.scale(2.0), INT8, pc.ring_reduce()), ("scale(2.0)", "error_feedback()")),
        (lambda: pc.chain(FEEDBACK, INT8, pc.scale(2.0), pc.ring_reduce()), ("scale(2.0)", "error_feedback()")),
        (lambda: pc.chain(FEEDBACK, FEEDBACK, INT8, pc.ring_reduce()), ("error_feedback() inside error_feedback()",)),
        (
            lambda: pc.chain(FEEDBACK, pc.skip_nonfinite(), INT8, pc.ring_reduce()),
            ("skip_nonfinite() inside error_feedback()", "chain(skip_nonfinite(), error_feedback(), ...)"),
        ),
        (lambda: pc.chain(pc.bucketize(), FEEDBACK, INT8, pc.ring_reduce()), ("error_feedback()", "bucketize()")),
        (lambda: pc.chain(FEEDBACK, pc.scale(2.0)), ("no reducer", "chain(")),
        (lambda: pc.chain(INT8, pc.all_reduce()), ('compress("int8")', "all_reduce()", "not numbers", "ring_reduce()")),
        (lambda: pc.chain(pc.compress("topk"), pc.all_reduce()), ('compress("topk")', "all_reduce()")),
        (
            lambda: pc.chain(INT8, pc.compress("bf16"), pc.ring_reduce()),
            ('compress("int8") around compress("bf16")', 'chain(compress("bf16"), ring_reduce())'),
        ),
        (lambda: pc.error_feedback()({"w": torch.ones(1)}), ("tree", "error_feedback")),
        (lambda: pc.chain(pc.error_feedback, INT8, pc.ring_reduce()), ("error_feedback",)),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_built(build, parts):
    with pytest.raises(pc.PipelineError, match="".join(f"(?=.*{re.escape(part)})" for part in parts)):
        build()


def test_a_state_for_other_parameters_is_refused():
    sync = pc.chain(FEEDBACK, INT8, pc.ring_reduce())
    state = sync.init({"w": torch.zeros(3)})
    with pytest.raises(pc.PipelineError, match=r"'v' of shape \(3,\) needs a residual like it.*none.*init\(params\)"):
        pc.simulate(sync, [{"v": torch.ones(3)}] * 2, [state] * 2)
    with pytest.raises(pc.PipelineError, match=r"'w' of shape \(4,\).*one of shape \(3,\).*init\(params\)"):
        pc.simulate(sync, [{"w": torch.ones(4)}] * 2, [state] * 2)
    with pytest.raises(pc.PipelineError, match=r"(?s)keeps state \(error_feedback\).*init"):
        sync({"w": torch.ones(3)})


def test_a_mesh_is_fed_back_along_one_axis():
    sync = pc.chain(FEEDBACK, INT8, pc.ring_reduce(axis="node"))
    trees = [torch.tensor([1.0, 0.3 * rank]) for rank in range(4)]
    run = pc.simulate(sync, trees, axes={"node": 2, "local": 2})
    for rank in range(2):
        peers = (rank, rank + 2)
        owed = sum(run.states[peer]["error_feedback"]["residual"]["<tensor>"].double() for peer in peers)
        put_in = sum(trees[peer].double() for peer in peers)
        assert torch.allclose(2 * run.trees[rank].double() + owed, put_in, atol=1e-6)


# A value ------------------------------------------------------------------------------------------------------------


def test_it_is_a_value():
    sync = pc.chain(pc.error_feedback(), pc.bucketize("1MiB"), pc.compress("int8"), pc.ring_reduce())
    assert repr(sync) == 'chain(error_feedback(), bucketize("1MiB"), compress("int8"), ring_reduce())'
    names = {name: getattr(pc, name) for name in pc.__all__}
    for other in (eval(repr(sync), names), pickle.loads(pickle.dumps(sync)), copy.deepcopy(sync)):
        assert other == sync
        assert hash(other) == hash(sync)
    assert sync != pc.chain(pc.error_feedback(), pc.compress("int8"), pc.ring_reduce())
    assert sync.stateful
    assert sync.consensus


def test_a_rank_with_nan_poisons_openly():
    # Without skip_nonfinite NaN must come out, and not hide in a residual.
    for codec in ("bf16", "int8", "int4", "fp8", "sign", "ternary", "topk"):
        sync = pc.chain(FEEDBACK, pc.compress(codec), pc.all_gather_avg())
        grads = [torch.ones(200), torch.ones(200)]
        grads[1][77] = math.nan
        assert not torch.isfinite(pc.simulate(sync, grads).trees[0]).all(), codec


@pc.reducer
async def partly_encoded(x, comm):
    """Encodes some parts of `x`, some of them twice, and sends nothing."""
    for start, stop in ((2, 5), (9, 12), (4, 6), (0, 1)):
        comm.encode(x[start:stop], at=start)
    return x


def test_what_is_encoded_twice_is_booked_twice_and_the_rest_is_zero():
    x = torch.arange(15.0).add(0.3).to(torch.bfloat16).float() + 2.0**-10
    lost = 2.0**-10  # bf16 keeps none of it
    times = torch.tensor([1, 0, 1, 1, 2, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0])
    run = pc.simulate(pc.chain(FEEDBACK, pc.compress("bf16"), partly_encoded()), [x.clone(), x.clone()])
    for state in run.states:
        assert torch.equal(state["error_feedback"]["residual"]["<tensor>"], times * lost)
    alone = pc.simulate(pc.chain(FEEDBACK, pc.compress("bf16"), partly_encoded()), [x.clone()])
    assert not alone.states[0]["error_feedback"]["residual"]["<tensor>"].any()


def test_a_donated_gradient_takes_its_residual_in_place():
    grad = {"a": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)), "half": torch.ones(3).bfloat16()}
    residual = {"a": torch.full((5, 7), 0.25), "half": torch.full((3,), 0.25)}
    for owned in (False, True):
        tree = {path: leaf.clone() for path, leaf in grad.items()}
        comm = Comm({None: Axis(0, 1)}).replace(owned=owned)
        inner = pc.chain(pc.compress("int4"), pc.ring_reduce())
        steps = FEEDBACK.update(inner, tree, {"residual": residual, "inner": inner.begin(tree)}, comm)
        with pytest.raises(StopIteration) as end:  # noqa: PT011
            steps.send(None)  # alone: it asks for nothing
        result, _ = end.value.value
        assert torch.equal(result["a"], grad["a"] + 0.25)
        assert torch.equal(result["half"], torch.full((3,), 1.25).bfloat16())
        assert (result["a"].data_ptr() == tree["a"].data_ptr()) == owned
        assert owned or same_data(tree, grad)
        assert (residual["a"] == 0.25).all()
