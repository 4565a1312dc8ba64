"""The laws of docs/design.md, section 5, in the simulator, each over the whole table: pipelines x trees x world sizes.

Every combination runs once; what a law needs to know of a run is kept in a `Run`. `test_gloo.py` compares real
processes with the same table.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import codec_table
import numpy as np
import oracle
import pytest
import torch
from oracle import leaves
from tables import PIPELINES, TREES, WORLD_SIZES, Row, make
from torch import Tensor

import ptcollect as pc


@dataclass(frozen=True, repr=False)
class counting(pc.Transform):
    """Keeps nothing but a step count."""

    stateful = True

    def init(self, inner, params):
        return {"calls": 0, "inner": inner.begin(params)}

    async def update(self, inner, tree, state, comm):
        out, inner_state = await inner.apply(tree, state["inner"], comm)
        return out, {"calls": state["calls"] + 1, "inner": inner_state}


every_pipeline = pytest.mark.parametrize("row", PIPELINES, ids=lambda row: row.id)


@dataclass(frozen=True)
class Run:
    """One run of a pipeline on one tree."""

    tree: str
    n: int
    inputs: list[Any]
    result: pc.Simulation
    side_effects: list[str]

    def __str__(self) -> str:
        return f"tree {self.tree!r} on {self.n} ranks"


@functools.cache
def run(row: Row, tree: str, n: int) -> Run:
    inputs = [make(tree, rank) for rank in range(n)]
    before, globals_before = [storages(each) for each in inputs], process_state()
    result = row.simulate(inputs)
    side_effects = [f"{what} changed" for what, value in process_state().items() if value != globals_before[what]]
    for rank, each in enumerate(inputs):
        if storages(each) != before[rank]:
            side_effects.append(f"the input of rank {rank} changed")
    owners = {leaf.untyped_storage().data_ptr() for each in inputs for leaf in leaves(each) if leaf is not None}
    for rank, each in enumerate(result.trees):
        side_effects.extend(
            f"leaf {i} of rank {rank}'s result shares storage with an input"
            for i, leaf in enumerate(leaves(each))
            if leaf is not None and leaf.numel() and leaf.untyped_storage().data_ptr() in owners
        )
    return Run(tree, n, inputs, result, side_effects)


def runs(row: Row) -> Iterator[Run]:
    for n in WORLD_SIZES:
        if n >= row.ranks:
            for tree in TREES:
                yield run(row, tree, n)


def storages(tree: Any) -> list[bytes]:
    """All memory behind the leaves, gaps between strided elements included."""
    found = (leaf.untyped_storage() for leaf in leaves(tree) if leaf is not None)
    return [torch.tensor([], dtype=torch.uint8).set_(storage).numpy().tobytes() for storage in found]


def process_state() -> dict[str, Any]:
    """What a library may not touch."""
    return {
        "torch's RNG state": torch.get_rng_state().numpy().tobytes(),
        "numpy's RNG state": np.random.get_state()[1].tobytes(),  # noqa: NPY002  (the global one is the point)
        "Python's RNG state": random.getstate(),
        "the default dtype": torch.get_default_dtype(),
        "the thread count": torch.get_num_threads(),
        "the grad mode": torch.is_grad_enabled(),
        "the inference mode": torch.is_inference_mode_enabled(),
    }


def pairs(one: Run) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Each leaf of every rank before and after."""
    for rank in range(one.n):
        for i, (old, new) in enumerate(zip(leaves(one.inputs[rank]), leaves(one.result.trees[rank]), strict=True)):
            yield f"{one}: leaf {i} of rank {rank}", old, new


def all_of(*parts: str) -> str:
    """A pattern for `match=`: every part is somewhere in the message."""
    return "".join(rf"(?=[\s\S]*{re.escape(part)})" for part in parts)


def none_of(complaints: list[str]) -> None:
    assert not complaints, f"{len(complaints)} complaints, the first ones:\n" + "\n".join(complaints[:5])


# The table is complete ----------------------------------------------------------------------------------------------


def stages(module: types.ModuleType, kinds: tuple[type, ...]) -> list[str]:
    """Public names of `module` that make one of `kinds` (or are one)."""
    found = []
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type):
            made: tuple[Any, ...] = (value,) if value not in kinds else ()
        elif isinstance(value, type(pc.ring_reduce)):
            made = (pc.Pipeline,)
        elif callable(value):
            kind_names = re.split(r"\s*\|\s*", value.__annotations__.get("return", ""))
            made = tuple(vars(sys.modules[value.__module__]).get(kind) for kind in kind_names)
        else:
            continue
        if any(isinstance(kind, type) and issubclass(kind, kinds) for kind in made):
            found.append(name)
    return found


# Stages that depend on earlier steps are run over several, in test_conservation.py, test_partition_piecewise.py,
# test_gossip.py and test_local_sgd.py.
STATEFUL = {"error_feedback", "low_rank", "piecewise", "push_sum", "skip_nonfinite"}
STATEFUL |= {"diloco", "local_sgd", "post_local_sgd", "streaming_diloco"}


def test_every_public_stage_is_in_the_table():
    table = "\n".join(row.id for row in PIPELINES)
    names = stages(pc, (pc.Pipeline, pc.Transform))
    assert {"ring_reduce", "broadcast", "bucketize", "compress", "chain", "stateless", "scale"} <= set(names)
    missing = {name for name in names if not re.search(rf"\b{name}\(", table)}
    assert missing == STATEFUL, f"add rows with {missing - STATEFUL} to tables.PIPELINES"


def test_every_public_codec_is_in_the_table():
    table = "\n".join(row.id for row in PIPELINES)
    names = [name for name in stages(pc.codecs, (pc.Codec,)) if name not in ("by_name", "Cast")]
    assert {"bf16", "fp16"} <= set(names)
    table += repr(codec_table.CODECS)  # codecs that lose much have a table, and laws, of their own
    missing = [name for name in names if not re.search(rf'\b{name}\(|"{name}"', table)]
    assert not missing, f"add rows with {missing} to tables.PIPELINES or codec_table.CODECS"


# 1. Pure ------------------------------------------------------------------------------------------------------------


@every_pipeline
def test_law_1_pure(row: Row):
    none_of([f"{one}: {effect}" for one in runs(row) for effect in one.side_effects])


# 2. Same shape ------------------------------------------------------------------------------------------------------


@every_pipeline
def test_law_2_structure_shape_dtype_device_strides(row: Row):
    complaints = []
    for one in runs(row):
        for rank in range(one.n):
            if oracle.structure(one.result.trees[rank]) != oracle.structure(one.inputs[rank]):
                complaints.append(f"{one}: another structure on rank {rank}")
            if type(one.result.trees[rank]) is not type(one.inputs[rank]) and not isinstance(one.inputs[rank], Tensor):
                complaints.append(f"{one}: a {type(one.result.trees[rank]).__name__} on rank {rank}")
        complaints.extend(f"{where}: {odd}" for where, old, new in pairs(one) if (odd := difference(old, new)))
    none_of(complaints)


def difference(old: Tensor | None, new: Tensor | None) -> str | None:
    if old is None or new is None:
        return None if old is new else f"was {old}, is {new}"
    for what, a, b in (
        ("shape", old.shape, new.shape),
        ("dtype", old.dtype, new.dtype),
        ("device", old.device, new.device),
        ("strides", old.stride(), new.stride()),
    ):
        if a != b and not (what == "strides" and no_longer_repeats(old, new)):
            return f"{what} {a} became {b}"
    return None


def no_longer_repeats(old: Tensor, new: Tensor) -> bool:
    """An expanded leaf stays so where its elements agree after every stage; a ring sums them in different orders."""
    return 0 in old.stride() and new.is_contiguous()


@pytest.mark.parametrize(
    "mean", [pc.all_to_all_avg(), pc.all_gather_avg(), pc.chain(pc.bucketize(8), pc.all_to_all_avg())]
)
def test_an_expanded_leaf_stays_expanded_where_elements_are_summed_alike(mean):
    inputs = [torch.tensor([[1.5], [2.5 * rank]]).expand(2, 3) for rank in range(3)]
    for result in pc.simulate(mean, inputs).trees:
        assert result.stride() == (1, 0)
        assert result.tolist() == [[1.5] * 3, [2.5] * 3]


def test_strides_survive_a_function_that_does_not_keep_them():
    inputs = [{"w": torch.arange(12.0).reshape(3, 4).T + rank} for rank in range(2)]
    dense = pc.stateless(lambda tree: {"w": tree["w"].contiguous()})
    for pipeline in (dense, pc.chain(dense, pc.ring_reduce()), pc.chain(pc.ring_reduce(), dense)):
        for old, new in zip(inputs, pc.simulate(pipeline, inputs).trees, strict=True):
            assert difference(old["w"], new["w"]) is None, pipeline


# 3. Agreement -------------------------------------------------------------------------------------------------------


def test_the_table_knows_who_agrees():
    agree = {row.id: row.pipeline.consensus for row in PIPELINES}
    assert agree["ring_reduce()"]
    assert agree["chain(gather_avg(), broadcast())"]
    assert not agree["gather_avg()"]
    assert not agree["scale(2.0)"]


@pytest.mark.parametrize("row", [row for row in PIPELINES if row.pipeline.consensus], ids=lambda row: row.id)
def test_law_3_bit_identical_on_every_rank(row: Row):
    none_of(
        [
            f"{one}: rank {rank} differs from rank 0"
            for one in runs(row)
            for rank in range(1, one.n)
            if not oracle.same_bits(one.result.trees[0], one.result.trees[rank])
        ]
    )


# 4. Exact -----------------------------------------------------------------------------------------------------------


@every_pipeline
def test_law_4_within_the_bound_of_the_oracle(row: Row):
    complaints = []
    for one in runs(row):
        right = oracle.expected(row.steps, one.inputs)
        for rank in range(one.n):
            for i, (got, leaf) in enumerate(zip(leaves(one.result.trees[rank]), right[rank], strict=True)):
                if leaf is not None and got is not None and (wrong := oracle.complaint(got, leaf)):
                    complaints.append(f"{one}: leaf {i} of rank {rank}: {wrong}")
    none_of(complaints)


MEANS = (pc.ring_reduce(), pc.all_to_all_avg(), pc.all_gather_avg(), pc.all_reduce())
every_mean = pytest.mark.parametrize(
    "mean", [*MEANS, *(pc.chain(pc.bucketize(16), reducer) for reducer in MEANS)], ids=repr
)


def reduced(pipeline: pc.Pipeline, inputs: list[Tensor], **options: Any) -> Tensor:
    """The result of a consensus pipeline, the same on every rank."""
    results = pc.simulate(pipeline, inputs, **options).trees
    assert all(oracle.same_bits(each, results[0]) for each in results)
    return results[0]


@every_mean
def test_powers_of_ten_on_four_ranks(mean):
    # All-ones data hid a wrong ring, pytorch#31572.
    inputs = [torch.full((5,), 10.0**rank) for rank in range(4)]
    assert reduced(mean, inputs).tolist() == [1111 / 4] * 5


@every_mean
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (40000.0, torch.float16),
        (65504.0, torch.float16),
        (3e38, torch.float32),
        (3e38, torch.bfloat16),
        (-1.7e308, torch.float64),
        (448.0, torch.float8_e4m3fn),
        (57344.0, torch.float8_e5m2),
    ],
    ids=str,
)
def test_a_mean_that_fits_never_overflows_on_the_way(mean, n, value, dtype):
    inputs = [torch.full((n + 1,), value, dtype=dtype)] * n
    got, right = reduced(mean, inputs), oracle.expected([oracle.mean()], inputs)[0][0]
    assert oracle.complaint(got, right) is None
    if n == 2:
        assert torch.equal(got.double(), inputs[0].double()), "a sum of two halves is exact"


@every_mean
def test_small_numbers_survive_beside_large_ones(mean):
    # Dividing before the sum underflows, dividing after it overflows: pytorch#57410, #78774.
    inputs = [torch.tensor([4e4, 1e-7], dtype=torch.float16)] * 8
    got = reduced(mean, inputs)
    assert oracle.complaint(got, oracle.expected([oracle.mean()], inputs)[0][0]) is None
    assert got[1] > 0


@every_mean
@pytest.mark.parametrize(
    ("numbers", "dtype", "right"),
    [
        ((120, 100), torch.int8, 110),
        ((127, 127, 127), torch.int8, 127),
        ((-128, -128), torch.int8, -128),
        ((-128, 127), torch.int8, 0),  # -0.5
        ((200, 100), torch.uint8, 150),
        ((255, 255, 255, 255, 255), torch.uint8, 255),
        ((1, 2), torch.int32, 2),
        ((2, 3), torch.int32, 2),
        ((-1, -2), torch.int32, -2),
        ((-2, -3), torch.int32, -2),
        ((1, 1, 0), torch.int16, 1),
        ((-1, -1, 0), torch.int16, -1),
        ((2**31 - 1, 2**31 - 1, 2**31 - 2), torch.int32, 2**31 - 1),
        ((2**53 + 1, 2**53 + 1), torch.int64, 2**53 + 1),
        ((2**61, 2**61, 2**61), torch.int64, 2**61),  # the documented limit: the sum must fit int64
        ((2**63 - 1, -(2**63)), torch.int64, 0),  # -0.5
    ],
    ids=str,
)
def test_integer_means_are_exact_and_round_halves_to_even(mean, numbers, dtype, right):
    # int8 sums wrap in nccl#422, horovod#3661.
    assert reduced(mean, [torch.tensor([number] * 3, dtype=dtype) for number in numbers]).tolist() == [right] * 3


@every_mean
def test_numbers_that_are_not_finite_come_through(mean):
    inputs = [torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([float("nan"), float("inf"), float("-inf"), 3.0])] * 2
    got = reduced(mean, inputs)
    assert got[0].isnan()
    assert got[1:].tolist() == [float("inf"), float("-inf"), 2.0]


@every_mean
@pytest.mark.parametrize(("numel", "n"), [(7, 2), (8, 3), (1, 5), (1, 8), (9, 8), (1000, 3), (10007, 4)])
def test_sizes_that_do_not_divide(mean, numel, n):
    # DeepSpeed PR 5056, #4386.
    inputs = [torch.linspace(rank, rank + 1, numel) for rank in range(n)]
    assert oracle.complaint(reduced(mean, inputs), oracle.expected([oracle.mean()], inputs)[0][0]) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint64])
def test_a_dtype_that_has_no_mean_is_named_before_any_traffic(dtype):
    inputs = [{"fine": torch.ones(2), "flags": torch.zeros(2, dtype=dtype)}] * 2
    for pipeline in (*MEANS, pc.chain(pc.bucketize(), pc.ring_reduce()), pc.gather_avg()):
        with pytest.raises(pc.PipelineError, match=all_of("'flags'", str(dtype))):
            pc.simulate(pipeline, inputs)


def test_ranks_other_than_the_root_get_their_own_tree_back():
    inputs = [make("mixed", rank) for rank in range(4)]
    for pipeline in (pc.gather_avg(root=2), pc.chain(pc.bucketize(64), pc.compress("bf16"), pc.gather_avg(root=2))):
        results = pc.simulate(pipeline, inputs).trees
        assert [oracle.same_bits(a, b) for a, b in zip(inputs, results, strict=True)] == [True, True, False, True]


# 5. Packaging does not matter ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("codec", [None, "bf16", "fp16"])
@pytest.mark.parametrize("reducer", [pc.all_to_all_avg(), pc.all_gather_avg()], ids=repr)
def test_law_5_bits_do_not_depend_on_buckets(reducer, codec, n):
    inside = reducer if codec is None else pc.chain(pc.compress(codec), reducer)
    buckets = [
        pc.bucketize(cap, order=order) for cap in (1, 10, 64, 500, "4KB", "25MiB") for order in ("reverse", "forward")
    ]
    around = [pc.chain(bucket, inside) for bucket in buckets]
    around.append(reducer if codec is None else pc.chain(pc.compress(codec), pc.bucketize(100), reducer))
    complaints = []
    for tree in ("mixed", "strided", "complex", "narrow"):
        inputs = [make(tree, rank) for rank in range(n)]
        alone = pc.simulate(inside, inputs).trees[0]
        complaints.extend(
            f"{pipeline!r} differs on tree {tree!r}"
            for pipeline in around
            if not oracle.same_bits(alone, pc.simulate(pipeline, inputs).trees[0])
        )
    none_of(complaints)


# 8. Honest bytes ----------------------------------------------------------------------------------------------------

SIZES = pytest.mark.parametrize("numel", [1, 7, 8, 40])
SEVERAL = pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
WIRES = pytest.mark.parametrize(
    ("codec", "dtype", "width"),
    [
        (None, torch.float32, 4),
        (None, torch.float64, 8),
        (None, torch.float16, 2),
        (None, torch.float8_e5m2, 1),
        (None, torch.complex64, 8),
        ("bf16", torch.float32, 2),
        ("fp16", torch.float64, 2),
        ("bf16", torch.complex64, 4),
    ],
    ids=str,
)


def simulated(reducer: pc.Pipeline, codec: str | None, numel: int, n: int, dtype: torch.dtype) -> pc.Simulation:
    pipeline = reducer if codec is None else pc.chain(pc.compress(codec), reducer)
    return pc.simulate(pipeline, [torch.ones(numel, dtype=dtype)] * n)


@WIRES
@SIZES
@SEVERAL
def test_law_8_ring_bytes(codec, dtype, width, numel, n):
    sent = simulated(pc.ring_reduce(), codec, numel, n, dtype)
    # Complex numbers are pairs, which a chunk may cut.
    parts = numel * 2 if dtype.is_complex else numel
    width = width // 2 if dtype.is_complex else width
    smallest, largest = parts // n, -(-parts // n)
    assert sum(sent.bytes) == 2 * (n - 1) * parts * width
    assert all(2 * (parts - largest) * width <= each <= 2 * (parts - smallest) * width for each in sent.bytes)
    assert sent.rounds == [2 * (n - 1)] * n
    # Empty chunks are not sent.
    assert sum(sent.messages) == 2 * (n - 1) * min(parts, n)
    if parts % n == 0:
        assert sent.bytes == [2 * (n - 1) * parts // n * width] * n
        assert sent.messages == [2 * (n - 1)] * n


@WIRES
@SIZES
@SEVERAL
def test_law_8_all_to_all_bytes(codec, dtype, width, numel, n):
    sent = simulated(pc.all_to_all_avg(), codec, numel, n, dtype)
    assert sum(sent.bytes) == 2 * (n - 1) * numel * width
    assert sent.rounds == [2] * n
    if numel % n == 0:
        assert sent.bytes == [2 * (n - 1) * numel // n * width] * n
        assert sent.messages == [2 * (n - 1)] * n


@WIRES
@SIZES
@SEVERAL
def test_law_8_bytes_of_whole_tensors(codec, dtype, width, numel, n):
    size = numel * width
    gathered = simulated(pc.all_gather_avg(), codec, numel, n, dtype)
    assert (gathered.bytes, gathered.messages, gathered.rounds) == ([(n - 1) * size] * n, [n - 1] * n, [1] * n)
    at_root = simulated(pc.gather_avg(root=1), codec, numel, n, dtype)
    assert at_root.bytes == [0 if rank == 1 else size for rank in range(n)]
    assert at_root.messages == [0 if rank == 1 else 1 for rank in range(n)]
    spread = simulated(pc.broadcast(root=1), codec, numel, n, dtype)
    assert sum(spread.bytes) == (n - 1) * size
    assert sum(spread.messages) == n - 1
    assert spread.rounds == [(n - 1).bit_length()] * n


@SIZES
@SEVERAL
def test_law_8_native_all_reduce_is_counted_as_a_ring(numel, n):
    sent = simulated(pc.all_reduce(), None, numel, n, torch.float32)
    assert sum(sent.bytes) == 2 * (n - 1) * numel * 4
    half = simulated(pc.all_reduce(), "bf16", numel, n, torch.float32)
    assert [2 * each for each in half.bytes] == sent.bytes


def test_law_8_one_element_of_bf16_is_two_bytes():
    # numpy doubled it in hivemind PR 524.
    assert simulated(pc.all_gather_avg(), "bf16", 1, 2, torch.float32).bytes == [2, 2]


def test_law_8_buckets_send_the_same_bytes_in_fewer_messages():
    inputs = [[torch.ones(8) for _ in range(10)]] * 4
    leaf_by_leaf = pc.simulate(pc.ring_reduce(), inputs)
    for cap, buckets in ((1, 10), (32, 10), (64, 5), (128, 3), ("1MiB", 1)):
        bucketed = pc.simulate(pc.chain(pc.bucketize(cap), pc.ring_reduce()), inputs)
        assert bucketed.bytes == leaf_by_leaf.bytes
        assert bucketed.messages == [6 * buckets] * 4
        assert bucketed.rounds == [6 * buckets] * 4


@every_pipeline
def test_law_8_maps_and_single_ranks_send_nothing(row: Row):
    for one in runs(row):
        sent = one.result
        if one.n == 1 or not row.pipeline.communicates:
            nothing = [0] * one.n
            assert (sent.bytes, sent.messages, sent.rounds) == (nothing, nothing, nothing), f"{one}"
            assert sent.agreement_bytes == nothing, f"{one}"
        else:
            assert sent.agreement_bytes[0] > 0, f"{one}"


@pytest.mark.parametrize(
    "pipeline",
    [
        *MEANS,
        pc.gather_avg(),
        pc.broadcast(),
        pc.chain(pc.bucketize(64), pc.compress("bf16"), pc.ring_reduce()),
        pc.chain(pc.compress("fp16"), pc.all_gather_avg()),
    ],
    ids=repr,
)
@pytest.mark.parametrize("tree", TREES)
def test_one_rank_gets_its_own_tree_back(pipeline, tree):
    # A rank that sends to itself crashes in pytorch#106164; compression that cannot help, horovod#578.
    inputs = [make(tree, 0)]
    assert oracle.same_bits(pc.simulate(pipeline, inputs).trees[0], inputs[0])


# 10. Same again -----------------------------------------------------------------------------------------------------


@every_pipeline
def test_law_10_twice_the_same_bits(row: Row):
    complaints = []
    for one in runs(row):
        if one.n not in (3, 5):
            continue
        again = row.simulate(one.inputs)
        if not all(oracle.same_bits(a, b) for a, b in zip(one.result.trees, again.trees, strict=True)):
            complaints.append(f"{one}: other bits")
        complaints.extend(
            f"{one}: other {count}"
            for count in ("bytes", "messages", "rounds", "agreement_bytes")
            if getattr(one.result, count) != getattr(again, count)
        )
    none_of(complaints)


# 11. No hang: what ranks bring must fit together --------------------------------------------------------------------

RING = pc.chain(pc.bucketize(), pc.ring_reduce())
every_reducer = pytest.mark.parametrize("pipeline", [*MEANS, pc.gather_avg(), pc.broadcast(), RING], ids=repr)


@every_reducer
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        # Longer than the posted receive aborts gloo, nccl#1394; shorter leaves a stale tail, pytorch#113376.
        (torch.ones(100), torch.ones(200), ("(100,)", "(200,)")),
        (torch.ones(5), torch.ones(3), ("(5,)", "(3,)")),
        (torch.ones(2, 3), torch.ones(3, 2), ("(2, 3)", "(3, 2)")),
        (torch.ones(1), torch.ones(()), ("(1,)", "()")),
        (torch.ones(0), torch.ones(4), ("(0,)", "(4,)")),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), ("float32", "float64")),
        (torch.ones(3), torch.ones(3, dtype=torch.int32), ("float32", "int32")),
    ],
    ids=str,
)
def test_law_11_shapes_and_dtypes(pipeline, n, one, other, shown):
    inputs = [{"a": torch.ones(1), "b": {"w": one}} for _ in range(n - 1)] + [{"a": torch.ones(1), "b": {"w": other}}]
    message = all_of("'b.w'", "rank 0", f"rank {n - 1}", *shown, "every rank must pass the same")
    with pytest.raises(pc.TreeMismatchError, match=message):
        pc.simulate(pipeline, inputs)


@every_reducer
def test_law_11_structures(pipeline):
    # Only some ranks raise, or it hangs: pytorch#76449.
    with pytest.raises(pc.TreeMismatchError, match=all_of("'extra'", "rank 0", "rank 1", "(2,)", "no such leaf")):
        pc.simulate(pipeline, [{"w": torch.ones(1)}, {"w": torch.ones(1), "extra": torch.ones(2)}])
    with pytest.raises(pc.TreeMismatchError, match=all_of("'extra'", "rank 0", "rank 1", "(2,)", "no such leaf")):
        pc.simulate(pipeline, [{"w": torch.ones(1), "extra": torch.ones(2)}, {"w": torch.ones(1)}])
    with pytest.raises(pc.TreeMismatchError, match=all_of("'1'", "rank 2", "no such leaf")):
        pc.simulate(pipeline, [[torch.ones(1), torch.ones(1)]] * 2 + [[torch.ones(1)]])
    with pytest.raises(ValueError, match="the tree is empty"):
        pc.simulate(pipeline, [{}, {"w": torch.ones(1)}])


@every_reducer
def test_the_order_of_insertion_does_not_matter(pipeline):
    one, other = (
        {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])},
        {"b": torch.tensor([4.0]), "a": torch.tensor([3.0])},
    )
    for inputs in ([one, other], [OrderedDict(one), OrderedDict(other)]):
        right = {
            "broadcast": ({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}),
            "gather_avg": ({"a": 2.0, "b": 3.0}, {"a": 3.0, "b": 4.0}),
        }
        results = pc.simulate(pipeline, inputs).trees
        for rank, result in enumerate(results):
            want = right.get(repr(pipeline).split("(")[0], ({"a": 2.0, "b": 3.0},) * 2)[rank]
            assert {key: leaf.item() for key, leaf in result.items()} == want
            assert list(result) == list(inputs[rank]), "a result keeps its own rank's order"


def test_law_11_steps():
    pipeline = pc.chain(counting(), pc.ring_reduce())
    tree = {"w": torch.ones(2)}
    once = pc.simulate(pipeline, [tree] * 2).states
    twice = pc.simulate(pipeline, [tree] * 2, once).states
    with pytest.raises(pc.TreeMismatchError, match=all_of("steps", "rank 0 has 1", "rank 1 has 2")):
        pc.simulate(pipeline, [tree] * 2, [once[0], twice[1]])


def test_law_11_a_rank_that_raises_is_heard_everywhere():
    def refuses_negative(tree: Any) -> Any:
        if tree["w"].min() < 0:
            raise ZeroDivisionError("negative gradient")
        return tree

    pipeline = pc.chain(pc.stateless(refuses_negative), pc.ring_reduce())
    for culprit in range(3):
        inputs = [{"w": torch.full((4,), -1.0 if rank == culprit else 1.0)} for rank in range(3)]
        with pytest.raises(ZeroDivisionError, match="negative gradient"):
            pc.simulate(pipeline, inputs)


def test_law_11_a_leaf_that_is_no_tensor_is_named():
    with pytest.raises(TypeError, match=all_of("'w'", "float", "torch.tensor(x)")):
        pc.simulate(pc.ring_reduce(), [{"w": torch.ones(1)}, {"w": 1.0}])
    with pytest.raises(TypeError, match=all_of("'w'", "sparse", "to_dense")):
        pc.simulate(pc.ring_reduce(), [{"w": torch.ones(2).to_sparse()}] * 2)


def test_two_leaves_with_one_path_are_refused():
    with pytest.raises(ValueError, match=all_of("same path", "'a.b'")):
        pc.simulate(pc.ring_reduce(), [{"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}] * 2)


# None leaves --------------------------------------------------------------------------------------------------------


@every_reducer
def test_missing_on_every_rank_stays_missing(pipeline):
    results = pc.simulate(pipeline, [{"w": torch.ones(1), "unused": None}] * 3).trees
    assert all(each["unused"] is None for each in results)


@every_reducer
def test_missing_on_some_ranks_is_an_error(pipeline):
    inputs = [
        {"w": torch.ones(1), "x": torch.ones(3)},
        {"w": torch.ones(1), "x": None},
        {"w": torch.ones(1), "x": None},
    ]
    with pytest.raises(
        pc.TreeMismatchError, match=all_of("'x'", "None", "rank 1", "rank 0", "(3,)", 'missing="zeros"')
    ):
        pc.simulate(pipeline, inputs)


@every_mean
def test_missing_as_zeros(mean):
    # Used on one rank only: zeros counted; used on none: left as it was. pytorch#28294.
    three = torch.tensor([3.0, 6.0, 9.0])
    inputs = [
        {"a": None, "b": three, "c": None, "d": three},
        {"a": None, "b": None, "c": three, "d": three},
        {"a": None, "b": None, "c": three, "d": three},
    ]
    for result in pc.simulate(mean, inputs, missing="zeros").trees:
        assert result["a"] is None
        assert {name: result[name].tolist() for name in "bcd"} == {"b": [1, 2, 3], "c": [2, 4, 6], "d": [3, 6, 9]}


def test_missing_zeros_still_compares_shapes():
    inputs = [{"x": None, "y": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(3)}]
    with pytest.raises(pc.TreeMismatchError, match=all_of("'y'", "(2,)", "(3,)")):
        pc.simulate(pc.ring_reduce(), inputs, missing="zeros")


# Weights ------------------------------------------------------------------------------------------------------------


@every_mean
def test_weights_are_numbers_of_samples(mean):
    assert reduced(mean, [torch.tensor([1.0]), torch.tensor([5.0])], weights=[1, 3]).tolist() == [4.0]
    inputs = [torch.tensor([3.0]), torch.tensor([7.0]), torch.tensor([100.0])]
    assert reduced(mean, inputs, weights=[2, 2, 0]).tolist() == [5.0]
    assert reduced(mean, inputs[:2], weights=[0.25, 0.75]).tolist() == [6.0]
    assert reduced(mean, inputs[:1], weights=[7]).tolist() == [3.0]


def test_weights_under_a_codec_and_around_maps():
    inputs = [torch.tensor([1.0]), torch.tensor([5.0])]
    sync = pc.chain(pc.bucketize(), pc.compress("bf16"), pc.ring_reduce())
    assert reduced(sync, inputs, weights=[1, 3]).tolist() == [4.0]
    # Leading maps run on the gradient as it is, trailing ones on the weighted mean.
    before = pc.chain(pc.clip_by_value(2.0), pc.all_to_all_avg())
    assert reduced(before, inputs, weights=[1, 3]).tolist() == [(1 + 3 * 2) / 4]
    after = pc.chain(pc.all_to_all_avg(), pc.clip_by_value(2.0))
    assert reduced(after, inputs, weights=[1, 3]).tolist() == [2.0]


def test_weights_that_differ_leave_inputs_alone():
    inputs = [{"w": torch.ones(3)}, {"w": torch.ones(3)}]
    pc.simulate(pc.ring_reduce(), inputs, weights=[1, 3])
    assert inputs[0]["w"].tolist() == inputs[1]["w"].tolist() == [1.0] * 3


def test_weights_are_refused_where_not_every_rank_gets_a_mean():
    # What the root has is copied, not averaged: scaling it by the root's weight would be silent garbage.
    for pipeline in (pc.broadcast(), pc.gather_avg(), pc.chain(pc.bucketize(), pc.broadcast(root=1))):
        with pytest.raises(
            ValueError, match=all_of("weight", "broadcast" if "broadcast" in repr(pipeline) else "gather")
        ):
            pc.simulate(pipeline, [torch.ones(1), torch.ones(1)], weights=[1, 3])


@every_mean
def test_a_weighted_mean_that_fits_never_overflows_on_the_way(mean):
    inputs = [torch.full((2,), 40000.0, dtype=torch.float16)] * 2
    assert reduced(mean, inputs, weights=[1, 9]).tolist() == pytest.approx(
        [40000.0] * 2, rel=4 * oracle.eps(torch.float16)
    )


def test_weights_that_give_no_mean():
    inputs = [torch.ones(1)] * 2
    for pipeline in (*MEANS, RING):
        with pytest.raises(ValueError, match=all_of("weight", "zero")):
            pc.simulate(pipeline, inputs, weights=[0, 0])
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=all_of("weight", "finite and not negative", str(weight))):
            pc.simulate(pc.ring_reduce(), inputs, weights=[1.0, weight])
    for pipeline in (pc.ring_reduce(op="sum"), pc.chain(pc.bucketize(), pc.all_reduce(op="sum"))):
        with pytest.raises(ValueError, match=all_of("weight", 'op="sum"', 'op="mean"')):
            pc.simulate(pipeline, inputs, weights=[1, 1])


# Axes of a mesh -----------------------------------------------------------------------------------------------------

FACTORIES = (pc.ring_reduce, pc.all_to_all_avg, pc.all_gather_avg, pc.all_reduce)


@pytest.mark.parametrize("wrap", [pc.chain(), pc.bucketize(8), pc.chain(pc.bucketize(), pc.compress("bf16"))], ids=repr)
@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)
def test_each_axis_of_a_mesh(factory, wrap):
    inputs = [{"w": torch.tensor([1.0, 3.0, 5.0]) * 10**rank, "b": torch.tensor(float(rank))} for rank in range(6)]
    rows, columns = ((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5))
    for axis, groups in (("local", rows), ("node", columns)):
        pipeline = pc.chain(wrap, factory(axis=axis))
        results = pc.simulate(pipeline, inputs, axes={"node": 2, "local": 3}).trees
        for group in groups:
            alone = pc.simulate(pc.chain(wrap, factory()), [inputs[rank] for rank in group]).trees
            assert all(oracle.same_bits(results[rank], alone[i]) for i, rank in enumerate(group))


def test_axes_one_after_the_other():
    inputs = [torch.tensor([float(10**rank)]) for rank in range(4)]
    axes = {"node": 2, "local": 2}
    for one, other in (("node", "local"), ("local", "node")):
        both = pc.chain(pc.bucketize(), pc.ring_reduce(axis=one), pc.all_to_all_avg(axis=other))
        assert reduced(both, inputs, axes=axes).tolist() == [1111 / 4]


def test_a_root_is_a_rank_of_its_axis():
    inputs = [torch.tensor([float(rank)]) for rank in range(6)]
    axes = {"node": 3, "local": 2}
    spread = pc.simulate(pc.broadcast(root=2, axis="node"), inputs, axes=axes).trees
    assert [leaf.item() for leaf in spread] == [4, 5, 4, 5, 4, 5]
    gathered = pc.simulate(pc.gather_avg(root=1, axis="local"), inputs, axes=axes).trees
    assert [leaf.item() for leaf in gathered] == [0, 0.5, 2, 2.5, 4, 4.5]


def test_a_mesh_wants_an_axis():
    inputs = [torch.ones(2)] * 4
    axes = {"node": 2, "local": 2}
    for factory in (*FACTORIES, pc.gather_avg, pc.broadcast):
        with pytest.raises(pc.PipelineError, match=all_of(factory.__name__, "'node', 'local'", "axis='node'")):
            pc.simulate(factory(), inputs, axes=axes)
        with pytest.raises(pc.PipelineError, match=all_of(factory.__name__, "'lokal'", "'node', 'local'")):
            pc.simulate(factory(axis="lokal"), inputs, axes=axes)
        with pytest.raises(pc.PipelineError, match=all_of(factory.__name__, "'node'", "leave axis out")):
            pc.simulate(factory(axis="node"), inputs)
    with pytest.raises(ValueError, match=all_of("make 4 ranks", "got 3 trees")):
        pc.simulate(pc.ring_reduce(axis="node"), inputs[:3], axes=axes)


def test_weights_count_over_the_whole_mesh():
    inputs = [torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([5.0]), torch.tensor([5.0])]
    both = pc.chain(pc.ring_reduce(axis="node"), pc.ring_reduce(axis="local"))
    assert reduced(both, inputs, axes={"node": 2, "local": 2}, weights=[1, 1, 3, 3]).tolist() == [4.0]


def test_a_mismatch_on_a_mesh_is_told_to_all():
    inputs = [{"w": torch.ones(3)}] * 3 + [{"w": torch.ones(4)}]
    both = pc.chain(pc.ring_reduce(axis="node"), pc.ring_reduce(axis="local"))
    for pipeline in (both, pc.ring_reduce(axis="node"), pc.ring_reduce(axis="local")):
        with pytest.raises(pc.TreeMismatchError, match=all_of("'w'", "rank 0", "rank 3", "(3,)", "(4,)")):
            pc.simulate(pipeline, inputs, axes={"node": 2, "local": 2})
