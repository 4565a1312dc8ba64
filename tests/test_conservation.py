"""Law 6: nothing is lost. What arrived n times, and what is left in residuals, is what was put in."""

from __future__ import annotations

import pytest
import torch
from codec_table import (
    CODECS,
    REDUCERS,
    Books,
    gradients,
    one_thread,  # noqa: F401  (a fixture)
    residuals,
    run,
    same_data,
)
from torch import Tensor

import ptcollect as pc

C = pc.codecs

PACKINGS = {
    "plain": (lambda codec: (pc.compress(codec),), 0),
    "buckets": (lambda codec: (pc.bucketize(200), pc.compress(codec)), 0),
    "low_rank": (lambda codec: (pc.low_rank(2), pc.compress(codec)), 2),
    "low_rank in buckets": (lambda codec: (pc.low_rank(2), pc.bucketize(), pc.compress(codec)), 2),
}


def with_feedback(packing: str, codec: pc.Codec, reducer: pc.Pipeline) -> tuple[pc.Pipeline, int]:
    """The pipeline, and the rank of low_rank in it."""
    stages, rank = PACKINGS[packing]
    return pc.chain(pc.error_feedback(), *stages(codec), reducer), rank


every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
every_reducer = pytest.mark.parametrize("reducer", REDUCERS, ids=repr)


@every_reducer
@every_codec
def test_nothing_is_lost_in_20_steps(codec, reducer):
    for packing, steps in (("plain", 20), ("buckets", 4), ("low_rank", 4), ("low_rank in buckets", 20)):
        pipeline, rank = with_feedback(packing, codec, reducer)
        states, books = run(pipeline, 3, steps, Books(3, rank))
        books.check(states, gradients(0, 0))


@every_reducer
@every_codec
@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
def test_nothing_is_lost_at_any_world_size(n, codec, reducer):
    packing = list(PACKINGS)[(n + CODECS.index(codec) + REDUCERS.index(reducer)) % len(PACKINGS)]
    pipeline, rank = with_feedback(packing, codec, reducer)
    states, books = run(pipeline, n, 3, Books(n, rank))
    books.check(states, gradients(0, 0))


@every_reducer
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_low_rank_alone_loses_nothing(n, reducer):
    pipeline = pc.chain(pc.error_feedback(), pc.low_rank(2), reducer)
    states, books = run(pipeline, n, 8, Books(n, 2))
    books.check(states, gradients(0, 0))


def test_the_bound_would_catch_a_lost_residual():
    # The bound is of no use unless it is far below what one step of one rank drops.
    for codec in CODECS:
        pipeline, rank = with_feedback("plain", codec, pc.ring_reduce())
        states, books = run(pipeline, 3, 20, Books(3, rank))
        gaps = books.gap(states[:2])
        assert max(float(gap.abs().max() / books.bound(gap)) for gap in gaps.values() if gap.numel()) > 10, codec


# Where it can be exact: integers, codecs that send the values they keep as they are, ranks a power of two -------------


def integers(rank: int, step: int) -> dict[str, Tensor]:
    """Whole numbers, too large for bf16 and fp16 to hold: every sum of them is exact in float32."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {
        "w": torch.randint(-6000, 6000, (23,), generator=generator).float(),
        "s": torch.randint(-6000, 6000, (), generator=generator).float(),
    }


@every_reducer
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("codec", [C.topk(0.2), C.randk(0.2), C.bf16(), C.fp16()], ids=repr)
def test_integers_are_never_off(codec, n, reducer):
    for packing in ("plain", "buckets"):
        pipeline, _ = with_feedback(packing, codec, reducer)
        states, books = run(pipeline, n, 20, make=integers)
        for path, gap in books.gap(states).items():
            assert not gap.any(), f"{path}: {gap}"
        assert n == 1 or any(leaf.any() for state in states for _, leaf in residuals(state))


# On a mesh ----------------------------------------------------------------------------------------------------------

MESHES = ((2, 2), (2, 3), (3, 2), (1, 3), (3, 1))
ON_NODES = (pc.ring_reduce(axis="node"), pc.all_to_all_avg(axis="node"), pc.all_gather_avg(axis="node"))
LEVELS = {
    "between nodes": (lambda codec: (pc.shard("local"), pc.compress(codec)), 0),
    "between nodes, in buckets": (lambda codec: (pc.bucketize(200), pc.shard("local"), pc.compress(codec)), 0),
    "both levels": (lambda codec: (pc.compress(codec), pc.bucketize(200), pc.shard("local")), 0),
    "a codec each": (lambda codec: (pc.compress("bf16"), pc.shard("local"), pc.compress(codec)), 0),
    "low rank": (lambda codec: (pc.low_rank(2), pc.bucketize(), pc.shard("local"), pc.compress(codec)), 2),
}


@pytest.mark.parametrize("reducer", ON_NODES, ids=repr)
@every_codec
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_lost_between_parts_of_a_mesh(level, codec, reducer):
    stages, rank = LEVELS[level]
    turn = list(LEVELS).index(level) + CODECS.index(codec) + ON_NODES.index(reducer)
    for nodes, ranks in (MESHES[turn % 5], MESHES[(turn + 2) % 5]):
        pipeline = pc.chain(pc.error_feedback(), *stages(codec), reducer)
        n, axes = nodes * ranks, {"node": nodes, "local": ranks}
        states, books = run(pipeline, n, 3, Books(n, rank), axes=axes)
        books.check(states, gradients(0, 0))
        if nodes > 1:
            assert any(leaf.any() for state in states for _, leaf in residuals(state)), "nothing was lost"


def test_nothing_is_lost_on_three_levels():
    inside = (
        pc.shard("local"),
        pc.compress("bf16"),
        pc.shard("node"),
        pc.compress("int8"),
        pc.ring_reduce(axis="rack"),
    )
    pipeline = pc.chain(pc.error_feedback(), pc.bucketize(), pc.compress("fp16"), *inside)
    states, books = run(pipeline, 8, 5, axes={"rack": 2, "node": 2, "local": 2})
    books.check(states, gradients(0, 0))


@pytest.mark.parametrize("reducer", ON_NODES, ids=repr)
@pytest.mark.parametrize("level", ["between nodes", "both levels"])
@pytest.mark.parametrize("codec", [C.topk(0.2), C.bf16(), C.fp16()], ids=repr)
def test_integers_are_never_off_on_a_mesh(level, codec, reducer):
    stages, _ = LEVELS[level]
    for nodes, ranks in ((2, 2), (2, 4), (4, 2)):
        pipeline = pc.chain(pc.error_feedback(), *stages(codec), reducer)
        states, books = run(pipeline, nodes * ranks, 6, make=integers, axes={"node": nodes, "local": ranks})
        for path, gap in books.gap(states).items():
            assert not gap.any(), f"{path}: {gap}"


@pytest.mark.parametrize("level", ["between nodes", "both levels"])
def test_sums_on_a_mesh_keep_the_books_too(level):
    stages, _ = LEVELS[level]
    pipeline = pc.chain(pc.error_feedback(), *stages(C.int4()), pc.ring_reduce(op="sum", axis="node"))
    n, axes = 6, {"node": 3, "local": 2}
    states, books = [pipeline.init(gradients(r, 0)) for r in range(n)], Books(n)
    for step in range(5):
        trees = [gradients(r, step) for r in range(n)]
        ran = pc.simulate(pipeline, trees, states, axes=axes)
        books.step(trees, states, [{path: leaf.double() / n for path, leaf in ran.trees[0].items() if path != "steps"}])
        states = ran.states
    books.check(states, gradients(0, 0))


@pytest.mark.parametrize(
    ("stages", "groups"),
    [
        ((pc.compress(C.int8()), pc.ring_reduce(op="sum", axis="node")), [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (
            (pc.shard("local"), pc.compress(C.int8()), pc.ring_reduce(op="sum", axis="node")),
            [(0, 1, 2, 3), (4, 5, 6, 7)],
        ),
    ],
    ids=["one dim", "two dims"],
)
def test_sums_over_some_dims_of_a_mesh_keep_the_books_of_each_group(stages, groups):
    # What a bf16 result cannot hold is booked once in each group, not once on the mesh.
    pipeline = pc.chain(pc.error_feedback(), *stages)
    trees = [gradients(rank, 0) for rank in range(8)]
    states = [pipeline.init(tree) for tree in trees]
    ran = pc.simulate(pipeline, trees, states, axes={"pod": 2, "node": 2, "local": 2})
    for group in groups:
        n, first, books = len(group), group[0], Books(len(group))
        mean = {path: leaf.double() / n for path, leaf in ran.trees[first].items() if path != "steps"}
        books.step([trees[rank] for rank in group], [states[rank] for rank in group], [mean])
        books.check([ran.states[rank] for rank in group], gradients(0, 0))


# Sums instead of means ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["plain", "low_rank"])
@pytest.mark.parametrize("n", [2, 3])
def test_sums_keep_the_books_too(n, packing):
    # Here the result itself, and not n times it, is what arrived; bf16 leaves included.
    stages, rank = PACKINGS[packing]
    pipeline = pc.chain(pc.error_feedback(), *stages(C.int4()), pc.ring_reduce(op="sum"))
    states, books = [pipeline.init(gradients(r, 0)) for r in range(n)], Books(n, rank)
    for step in range(6):
        trees = [gradients(r, step) for r in range(n)]
        ran = pc.simulate(pipeline, trees, states)
        books.step(trees, states, [{path: leaf.double() / n for path, leaf in ran.trees[0].items() if path != "steps"}])
        states = ran.states
    books.check(states, gradients(0, 0))


# More than one reducer, or one that is no mean, in the scope ---------------------------------------------------------


@pytest.mark.parametrize(
    "inner",
    [
        lambda: pc.chain(pc.compress("int8"), pc.ring_reduce(), pc.compress("int8"), pc.ring_reduce()),
        lambda: pc.chain(pc.compress("int8"), pc.gather_avg(), pc.compress("int8"), pc.broadcast()),
        lambda: pc.compress("int8")(pc.chain(pc.gather_avg(), pc.broadcast())),
        lambda: pc.chain(pc.compress("int8"), pc.broadcast()),
        lambda: pc.chain(pc.compress("int8"), pc.gather_avg()),
    ],
)
def test_a_scope_that_cannot_keep_the_books_is_refused(inner):
    try:
        pipeline = pc.error_feedback()(inner())
    except pc.PipelineError as error:
        assert "error_feedback" in str(error)  # noqa: PT017  (refusing is one right answer, balancing the other)
        return
    states, books = [pipeline.init(gradients(r, 0)) for r in range(3)], Books(3)
    for step in range(4):
        trees = [gradients(r, step) for r in range(3)]
        ran = pc.simulate(pipeline, trees, states)
        books.step(trees, states, ran.trees)
        states = ran.states
    books.check(states, gradients(0, 0))


# partition, piecewise and skip_nonfinite ----------------------------------------------------------------------------


def feedback(*stages: pc.Transform | pc.Pipeline) -> pc.Pipeline:
    return pc.chain(pc.error_feedback(), *stages)


RULES = {
    "m*": feedback(pc.low_rank(2), pc.compress("int8"), pc.ring_reduce()),
    "s*": feedback(pc.bucketize(), pc.compress("sign"), pc.all_to_all_avg()),
    "*": feedback(pc.compress(C.topk(0.2)), pc.all_gather_avg()),
}
PIECES = {
    0: feedback(pc.compress("sign"), pc.ring_reduce()),
    2: feedback(pc.bucketize(200), pc.compress(C.topk(0.1)), pc.all_to_all_avg()),
    5: feedback(pc.low_rank(2), pc.compress("int4"), pc.ring_reduce()),
    7: feedback(pc.compress("bf16"), pc.all_gather_avg()),
}


@pytest.mark.parametrize("n", [2, 3, 5])
def test_partition_keeps_the_books(n):
    states, books = run(pc.partition(RULES), n, 6, Books(n, 2))
    books.check(states, gradients(0, 0))
    around = {
        "m*": pc.chain(pc.low_rank(2), pc.ring_reduce()),
        "*": pc.chain(pc.compress("int4"), pc.all_to_all_avg()),
    }
    states, books = run(pc.error_feedback()(pc.partition(around)), n, 6, Books(n, 2))
    books.check(states, gradients(0, 0))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_piecewise_keeps_the_books_across_its_switches(n):
    pipeline = pc.piecewise(PIECES)
    states, books = None, Books(n, 2)
    for step in range(10):
        states, books = run(pipeline, n, 1, books, states, first=step)
        books.check(states, gradients(0, 0))
        # What was owed by earlier pieces has moved on: only the piece that runs holds any.
        now = max(i for i, first in enumerate(PIECES) if first <= step)
        for state in states:
            for i in range(len(PIECES)):
                held = state["error_feedback" + (f"_{i}" if i else "")]["residual"]
                assert i == now or not any(leaf.any() for leaf in held.values()), (step, i)


def test_error_feedback_around_piecewise_keeps_the_books():
    pieces = {0: pc.ring_reduce(), 2: pc.chain(pc.compress("sign"), pc.ring_reduce()), 5: pc.all_to_all_avg()}
    states, books = run(pc.error_feedback()(pc.piecewise(pieces)), 3, 7)
    books.check(states, gradients(0, 0))
    assert not any(leaf.any() for state in states for path, leaf in residuals(state) if path != "half")


def test_residuals_move_by_path_whatever_stage_keeps_them():
    # From several error feedbacks to one, and back: each path has one residual at a time, in the piece that runs.
    one = feedback(pc.compress("int4"), pc.ring_reduce())
    many = pc.partition({"m*": one, "*": one})
    for pieces in ({0: many, 1: one}, {0: one, 1: many}):
        states, books = run(pc.piecewise(pieces), 2, 2)
        books.check(states, gradients(0, 0))
        for state in states:
            owed = [path for path, leaf in residuals(state) if leaf.any()]
            assert len(owed) == len(set(owed)), f"{pieces}: {sorted(owed)}"


def spoilt(rank: int, step: int, bad: float) -> dict[str, Tensor]:
    tree = gradients(rank, step)
    tree["matrix"][3, 3] = bad
    return tree


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "inner",
    [feedback(pc.low_rank(2), pc.bucketize(), pc.compress("int8"), pc.ring_reduce()), pc.partition(RULES)],
    ids=["chain", "partition"],
)
def test_a_skipped_step_changes_nothing(inner, bad):
    n = 3
    pipeline = pc.chain(pc.skip_nonfinite(), inner)
    states, books = run(pipeline, n, 2, Books(n, 2))
    for who in range(n):
        trees = [spoilt(r, 2, bad) if r == who else gradients(r, 2) for r in range(n)]
        ran = pc.simulate(pipeline, trees, states)
        for before, after, tree in zip(states, ran.states, ran.trees, strict=True):
            assert not any(leaf.any() for leaf in tree.values())
            assert after["step"] == before["step"] + 1
            assert after["skip_nonfinite"] == {"skipped": who + 1, "in_a_row": who + 1}
            own = before.keys() - {"step", "skip_nonfinite"}
            assert same_data({key: after[key] for key in own}, {key: before[key] for key in own})
        states = ran.states
    states, books = run(pipeline, n, 2, books, states, first=3)
    books.check(states, gradients(0, 0))
    assert states[0]["skip_nonfinite"] == {"skipped": 3, "in_a_row": 0}


def test_a_piece_whose_first_step_is_skipped_still_takes_over_the_residuals():
    pieces = {0: feedback(pc.compress("int4"), pc.ring_reduce()), 2: feedback(pc.compress("int8"), pc.ring_reduce())}
    pipeline = pc.chain(pc.skip_nonfinite(), pc.piecewise(pieces))
    states, books = run(pipeline, 2, 2)
    states = pc.simulate(pipeline, [spoilt(r, 2, float("nan")) for r in range(2)], states).states
    states, books = run(pipeline, 2, 1, books, states, first=3)
    books.check(states, gradients(0, 0))
    assert not any(leaf.any() for leaf in states[0]["error_feedback"]["residual"].values()), "left behind"
