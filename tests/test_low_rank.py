"""`low_rank`: PowerSGD, its published numbers, and matrices that are zero, thin, huge, tiny or lack rank."""

from __future__ import annotations

import copy
import math
import pickle
import re

import pytest
import torch
from codec_table import one_thread, same_data  # noqa: F401  (one_thread is a fixture)
from torch import Tensor

import ptcollect as pc

RING = pc.ring_reduce()


def real(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def steps(sync: pc.Pipeline, trees: list[dict[str, Tensor]], count: int) -> pc.Simulation:
    """The last of so many steps with the same gradients."""
    run = pc.simulate(sync, trees)
    for _ in range(count - 1):
        run = pc.simulate(sync, trees, run.states)
    return run


# Published numbers --------------------------------------------------------------------------------------------------


def resnet18_for_cifar10() -> dict[str, tuple[int, ...]]:
    """Shapes of its parameters: a 3x3 stem, four stages of two blocks, a 1x1 shortcut where the width changes."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, out: int, into: int, size: int) -> None:
        shapes[f"{name}.weight"] = (out, into, size, size)
        shapes[f"{name}.norm.weight"] = shapes[f"{name}.norm.bias"] = (out,)

    conv("stem", 64, 3, 3)
    into = 64
    for stage, out in enumerate((64, 128, 256, 512)):
        for block in range(2):
            conv(f"{stage}.{block}.first", out, into, 3)
            conv(f"{stage}.{block}.second", out, out, 3)
            if into != out:
                conv(f"{stage}.{block}.shortcut", out, into, 1)
            into = out
    shapes["fc.weight"], shapes["fc.bias"] = (10, 512), (10,)
    return shapes


def test_the_list_of_shapes_is_the_papers():
    shapes = resnet18_for_cifar10().values()
    assert sum(math.prod(shape) for shape in shapes if len(shape) > 1) == 11_164_352
    assert sum(math.prod(shape) for shape in shapes if len(shape) == 1) == 9_610


@pytest.mark.parametrize(("rank", "times", "mebibytes"), [(1, 243.26, 4.21), (2, 135.84, 7.53), (4, 72.13, 14.18)])
def test_powersgd_compresses_resnet18_as_published(rank, times, mebibytes):
    # Between two ranks a ring sends each of its numbers once, so that bytes are those of the paper's table.
    grads = {name: torch.zeros(shape) for name, shape in resnet18_for_cifar10().items()}
    dense = 4 * (11_164_352 + 9_610)
    assert dense * 24 / 2**20 == pytest.approx(1023.0, abs=0.05)
    run = pc.simulate(pc.chain(pc.low_rank(rank), pc.bucketize(), RING), [grads] * 2)
    for sent in run.bytes:
        assert dense / sent == pytest.approx(times, abs=0.005)
        assert sent * 24 / 2**20 == pytest.approx(mebibytes, abs=0.005)
    for tree in run.trees:  # all of them zero, where torch's own hook makes NaN
        assert not any(leaf.any() for leaf in tree.values())


def test_a_dense_ring_sends_what_it_should():
    assert pc.simulate(RING, [{"w": torch.zeros(100, 100)}] * 2).bytes == [40_000] * 2


# What is sent thin, what dense --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rank", "numbers"),
    [
        ((8, 8), 1, 16),
        ((8, 8), 2, 32),
        ((8, 8), 4, 64),  # 64 either way: dense
        ((8, 8), 100, 64),
        ((2, 3), 2, 6),  # pytorch#52034: P and Q would be larger
        ((3, 5), 4, 15),
        ((5, 4, 3, 3), 1, 5 + 36),  # seen as 5 x 36
        ((6, 1, 1), 1, 6),
        ((1, 100), 1, 100),
        ((100, 1), 1, 100),
        ((7,), 1, 7),
        ((), 1, 1),
        ((0, 9), 1, 0),
        ((9, 0), 1, 0),
    ],
)
@pytest.mark.parametrize("feedback", [False, True])
def test_what_travels(shape, rank, numbers, feedback):
    sync = pc.chain(*([pc.error_feedback()] if feedback else []), pc.low_rank(rank), pc.all_gather_avg())
    trees = [{"w": real(*shape, seed=seed)} for seed in range(2)]
    run = pc.simulate(sync, trees)
    assert run.bytes == [4 * numbers] * 2
    assert run.trees[0]["w"].shape == shape
    if numbers == math.prod(shape):
        assert torch.equal(run.trees[0]["w"], (trees[0]["w"] + trees[1]["w"]) / 2)


def test_all_ps_travel_together_and_all_qs():
    trees = [{f"w{i}": real(20, 10, seed=9 * r + i) for i in range(5)} | {"b": real(3, seed=r)} for r in range(2)]
    run = pc.simulate(pc.chain(pc.low_rank(2), pc.bucketize(), RING), trees)
    once = pc.simulate(RING, [torch.zeros(4)] * 2)
    assert run.rounds == [2 * rounds for rounds in once.rounds]
    assert run.messages == [2 * messages for messages in once.messages]
    assert sum(run.bytes) == 2 * 4 * (5 * 2 * (20 + 10) + 3)


def test_narrow_matrices_travel_in_float32_only_if_they_must():
    # Codecs apply to P and Q as to anything.
    trees = [{"w": real(20, 10, seed=r)} for r in range(2)]
    for codec, each in (("bf16", 2), ("fp16", 2)):
        run = pc.simulate(pc.chain(pc.low_rank(2), pc.compress(codec), RING), trees)
        assert run.bytes == [each * 2 * 30] * 2


# What comes out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_mean_of_that_rank_is_exact_after_two_steps(n, rank):
    # One power iteration from a random start already spans the columns; a second step forgets how the start lay.
    left, right = real(12, rank, seed=1), real(rank, 15, seed=2)
    trees = [{"w": left @ (right * (1 + r))} for r in range(n)]
    mean = sum(tree["w"].double() for tree in trees) / n
    for run in (steps(pc.chain(pc.low_rank(rank), RING), trees, count) for count in (1, 2, 5)):
        off = (run.trees[0]["w"].double() - mean).norm() / mean.norm()
        assert off < 1e-5


def test_the_error_is_at_least_that_of_the_best_approximation_and_falls_to_it():
    singular = torch.tensor([10.0, 8.0, 6.0, 2.0, 1.0, 0.5, 0.2, 0.1], dtype=torch.float64)
    left, right = (torch.linalg.qr(real(size, 8, seed=size, dtype=torch.float64)).Q for size in (20, 30))
    mean = (left * singular) @ right.T
    noise = real(20, 30, seed=5, dtype=torch.float64)
    trees = [{"w": mean + noise}, {"w": mean - noise}]  # no rank has the mean's singular vectors
    best = float(singular[3:].norm())
    sync, states, errors = pc.chain(pc.low_rank(3), RING), None, []
    for _ in range(12):
        run = pc.simulate(sync, trees, states)
        states = run.states
        errors.append(float((run.trees[0]["w"] - mean).norm()))
    assert all(error >= best * (1 - 1e-9) for error in errors)
    assert errors[0] > 1.05 * best  # a cold start is worse
    assert errors[-1] < 1.0001 * best
    assert errors[0] > errors[1] > errors[3] > errors[-1] * (1 - 1e-9)  # the warm start gains with each step


def test_it_is_a_projection_of_the_mean():
    # y = P P^T M for an orthonormal P: never larger than M, and orthogonal to what is left.
    trees = [{"w": real(9, 11, seed=r)} for r in range(3)]
    mean = sum(tree["w"].double() for tree in trees) / 3
    y = steps(pc.chain(pc.low_rank(2), RING), trees, 2).trees[0]["w"].double()
    assert float((y * (mean - y)).sum()) == pytest.approx(0, abs=1e-4)
    assert torch.linalg.matrix_rank(y, rtol=1e-5) == 2
    assert y.norm() < mean.norm()


def test_strides_and_dtypes_come_out_as_they_went_in():
    trees = [
        {
            "t": real(11, 9, seed=r).T,
            "c": real(4, 3, 5, 5, seed=r).contiguous(memory_format=torch.channels_last),
            "h": real(9, 9, seed=r, dtype=torch.bfloat16),
            "d": real(9, 9, seed=r, dtype=torch.float64),
            "i": torch.full((9, 9), 3 + 2 * r, dtype=torch.int32),
            "z": real(9, 9, seed=r).to(torch.complex64),
        }
        for r in range(2)
    ]
    run = pc.simulate(pc.chain(pc.error_feedback(), pc.low_rank(2), RING), trees)
    for path, leaf in run.trees[0].items():
        assert (leaf.stride(), leaf.dtype, leaf.shape) == (
            trees[0][path].stride(),
            trees[0][path].dtype,
            trees[0][path].shape,
        )
    assert torch.equal(run.trees[0]["i"], torch.full((9, 9), 4, dtype=torch.int32))
    assert torch.allclose(run.trees[0]["z"], (trees[0]["z"] + trees[1]["z"]) / 2)


def test_one_rank_is_the_identity():
    # horovod#578: compression that cannot help. Nothing would be sent, so nothing need be lost.
    grads = {"w": real(8, 8)}
    run = pc.simulate(pc.chain(pc.low_rank(1), RING), [grads])
    assert run.bytes == [0]
    assert torch.equal(run.trees[0]["w"], grads["w"])


# Matrices that break QR and powers ----------------------------------------------------------------------------------

CODECS = (None, "bf16", "int8", "int4", "fp8", "sign", "ternary", "topk")


def pipeline(codec: str | None, rank: int = 2) -> pc.Pipeline:
    return pc.chain(pc.error_feedback(), pc.low_rank(rank), *([pc.compress(codec)] if codec else []), RING)


def finite(run: pc.Simulation) -> bool:
    leaves = [leaf for tree in run.trees for leaf in tree.values()]
    states = [state[stage][part] for state in run.states for stage, part in PARTS]
    return all(bool(torch.isfinite(leaf).all()) for leaf in (*leaves, *(leaf for s in states for leaf in s.values())))


PARTS = (("error_feedback", "residual"), ("low_rank", "basis"))


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_stay_zeros(codec):
    trees = [{"w": torch.zeros(9, 12), "v": torch.zeros(3), "half": torch.zeros(9, 9, dtype=torch.bfloat16)}] * 2
    run = steps(pipeline(codec), trees, 3)
    assert finite(run)
    assert not any(leaf.any() for leaf in run.trees[0].values())
    assert not any(leaf.any() for leaf in run.states[0]["error_feedback"]["residual"].values())
    # And what comes after zeros gets through.
    later = pc.simulate(pipeline(codec), [{**trees[0], "w": torch.ones(9, 12)}] * 2, run.states)
    assert finite(later)
    assert later.trees[0]["w"].any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-10, 1e10, 1e30, 3e37])
def test_huge_and_tiny_numbers_stay_finite(size, codec):
    full = torch.full((6, 8), size)
    mixed = real(6, 8).clamp(-1, 1).double().mul(size).float()
    alone = torch.zeros(6, 8)
    alone[2, 3] = size
    for matrix in (full, mixed, alone):
        sync = pipeline(codec, 1)
        states = None
        for _ in range(3):
            run = pc.simulate(sync, [{"w": matrix}, {"w": matrix}], states)
            states = run.states
            assert finite(run)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, 3e37])
def test_numbers_of_any_size_are_approximated_alike(size):
    matrix = (real(6, 1) @ real(1, 8, seed=1)).clamp(-1, 1)
    run = pc.simulate(pc.chain(pc.low_rank(2), RING), [{"w": matrix * size}] * 2)
    plain = pc.simulate(pc.chain(pc.low_rank(2), RING), [{"w": matrix}] * 2)
    assert torch.allclose(run.trees[0]["w"].double() / size, plain.trees[0]["w"].double(), atol=1e-5)


def test_the_largest_numbers_stay_finite_once():
    # One step; error feedback may then add two of them up, which no float32 can hold.
    most = torch.finfo(torch.float32).max
    run = pc.simulate(pc.chain(pc.low_rank(1), RING), [{"w": torch.full((6, 6), most * 0.9)}] * 2)
    assert torch.isfinite(run.trees[0]["w"]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("shape", "rank"), [((3, 5), 4), ((3, 5), 1), ((40, 7), 5), ((7, 40), 5), ((2, 90), 8)])
def test_narrow_dtypes_and_more_columns_than_rows(shape, rank, dtype):
    # pytorch PR 72043: QR lacks bf16, and rank may exceed rows.
    trees = [{"w": real(*shape, seed=r, dtype=dtype)} for r in range(2)]
    run = steps(pc.chain(pc.error_feedback(), pc.low_rank(rank), RING), trees, 3)
    assert finite(run)
    assert run.trees[0]["w"].dtype == dtype


@pytest.mark.parametrize("codec", CODECS)
def test_matrices_that_lack_rank(codec):
    one = torch.zeros(9, 12)
    one[4] = 1.0
    for matrix in (torch.ones(9, 12), one, one.T.reshape(9, 12), real(9, 1) @ real(1, 12)):
        run = steps(pipeline(codec, 3), [{"w": matrix}] * 2, 4)
        assert finite(run)
        if codec is None:
            once = pc.simulate(pc.chain(pc.low_rank(3), RING), [{"w": matrix}] * 2)
            assert torch.allclose(once.trees[0]["w"], matrix, atol=1e-5)
        q = run.states[0]["low_rank"]["basis"]["w"].double()
        assert torch.allclose(q.T @ q, torch.eye(3, dtype=torch.float64), atol=1e-5)


# State --------------------------------------------------------------------------------------------------------------


def test_the_basis_is_the_same_on_all_ranks_and_in_every_process():
    sync = pc.chain(pc.low_rank(2), RING)
    params = {"a": torch.zeros(9, 12), "b": torch.ones(9, 12), "v": torch.zeros(3)}
    rng = torch.get_rng_state()
    one, other = sync.init(params), sync.init({path: leaf + 1 for path, leaf in params.items()})
    assert torch.equal(torch.get_rng_state(), rng)
    assert set(one["low_rank"]["basis"]) == {"a", "b"}
    assert all(torch.equal(one["low_rank"]["basis"][path], other["low_rank"]["basis"][path]) for path in "ab")
    assert not torch.equal(one["low_rank"]["basis"]["a"], one["low_rank"]["basis"]["b"])
    run = steps(sync, [{path: real(*leaf.shape, seed=r) for path, leaf in params.items()} for r in range(3)], 3)
    for state in run.states[1:]:
        assert all(torch.equal(state["low_rank"]["basis"][p], run.states[0]["low_rank"]["basis"][p]) for p in "ab")


def test_a_missing_matrix_keeps_its_basis():
    sync = pc.chain(pc.low_rank(2), RING)
    trees = [{"a": real(9, 9, seed=r), "b": real(9, 9, seed=5 + r)} for r in range(2)]
    before = pc.simulate(sync, trees)
    after = pc.simulate(sync, [{"a": None, "b": tree["b"]} for tree in trees], before.states)
    assert after.trees[0]["a"] is None
    bases = [run.states[0]["low_rank"]["basis"] for run in (before, after)]
    assert torch.equal(bases[0]["a"], bases[1]["a"])
    assert not torch.equal(bases[0]["b"], bases[1]["b"])


def test_inputs_and_states_are_left_alone():
    sync = pipeline("int8")
    trees = [{"w": real(9, 9, seed=r), "v": real(3, seed=r)} for r in range(2)]
    states = pc.simulate(sync, trees).states
    before = copy.deepcopy((trees, states))
    pc.simulate(sync, trees, states)
    assert same_data(before, (trees, states))


# What it refuses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: pc.chain(pc.low_rank(2), pc.gather_avg()), ("low_rank(2)", "gather_avg()", "consensus")),
        (lambda: pc.chain(pc.low_rank(2), pc.low_rank(1), RING), ("low_rank(1) inside low_rank(2)",)),
        (
            lambda: pc.chain(pc.low_rank(2), pc.error_feedback(), pc.compress("int8"), RING),
            ("error_feedback() inside low_rank(2)", "chain(error_feedback(), low_rank(2), ...)"),
        ),
        (lambda: pc.chain(pc.low_rank(2), pc.skip_nonfinite(), RING), ("skip_nonfinite() inside low_rank(2)",)),
        (lambda: pc.chain(pc.low_rank(2), pc.scale(2.0), RING), ("scale(2.0) inside low_rank(2)",)),
        (
            lambda: pc.chain(pc.bucketize(), pc.low_rank(2), RING),
            ("low_rank(2) inside bucketize()", "chain(low_rank(2), bucketize(), ring_reduce())"),
        ),
        (lambda: pc.chain(pc.low_rank(2)(RING), pc.low_rank(1)), ("no reducer after it",)),
        (lambda: pc.low_rank({"w": torch.ones(1)}), ("tree", "low_rank")),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_built(build, parts):
    with pytest.raises(pc.PipelineError, match="".join(f"(?=.*{re.escape(part)})" for part in parts)):
        build()


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "2"])
def test_bad_ranks(rank):
    with pytest.raises(ValueError, match=re.escape(f"low_rank(rank): expected a whole number from 1 on, got {rank!r}")):
        pc.low_rank(rank)


def test_a_state_for_other_parameters_is_refused():
    sync = pc.chain(pc.low_rank(2), RING)
    state = sync.init({"w": torch.zeros(9, 9)})
    for path, shape in (("v", (9, 9)), ("w", (9, 10))):
        message = rf"no basis for leaf '{path}' seen as \({shape[0]}, {shape[1]}\).*init\(params\)"
        with pytest.raises(pc.PipelineError, match=message):
            pc.simulate(sync, [{path: torch.ones(shape)}] * 2, [state] * 2)


def test_it_is_a_value():
    sync = pc.chain(pc.error_feedback(), pc.low_rank(), pc.bucketize(), pc.compress("int8"), RING)
    assert repr(sync) == 'chain(error_feedback(), low_rank(), bucketize(), compress("int8"), ring_reduce())'
    names = {name: getattr(pc, name) for name in pc.__all__}
    for other in (eval(repr(sync), names), pickle.loads(pickle.dumps(sync)), copy.deepcopy(sync)):
        assert other == sync
        assert hash(other) == hash(sync)
    assert pc.low_rank(4) == pc.low_rank()
    assert pc.low_rank(3) != pc.low_rank()
