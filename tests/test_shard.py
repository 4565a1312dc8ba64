"""What `shard` does beyond the laws of the table: which level sends what, integers, errors, codecs by level."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import oracle
import pytest
import torch
from tables import make
from torch import Tensor

import ptcollect as pc

C = pc.codecs
MESH = {"node": 2, "local": 3}
INSIDE = (pc.ring_reduce, pc.all_to_all_avg, pc.all_gather_avg, pc.all_reduce)
every_reducer = pytest.mark.parametrize("reducer", INSIDE, ids=lambda factory: factory.__name__)


def all_of(*parts: str) -> str:
    return "".join(rf"(?=[\s\S]*{re.escape(part)})" for part in parts)


def reduced(pipeline: pc.Pipeline, inputs: list[Any], axes: dict[str, int] = MESH, **options: Any) -> Any:
    """The result, the same bits on every rank of the mesh."""
    results = pc.simulate(pipeline, inputs, axes=axes, **options).trees
    assert all(oracle.same_bits(each, results[0]) for each in results)
    return results[0]


# The mean of the whole mesh -----------------------------------------------------------------------------------------


@every_reducer
def test_powers_of_ten_on_a_mesh(reducer):
    inputs = [torch.full((5,), 10.0**rank) for rank in range(6)]
    for axis, other in (("local", "node"), ("node", "local")):
        assert reduced(pc.chain(pc.shard(axis), reducer(axis=other)), inputs).tolist() == [111111 / 6] * 5


def test_sums():
    inputs = [torch.full((5,), 10.0**rank) for rank in range(6)]
    for reducer in (pc.ring_reduce, pc.all_reduce):
        assert reduced(pc.chain(pc.shard("local"), reducer(op="sum", axis="node")), inputs).tolist() == [111111] * 5
    whole = [torch.tensor([2**62 // 6 + rank, -rank]) for rank in range(6)]
    got = reduced(pc.chain(pc.shard("local"), pc.ring_reduce(op="sum", axis="node")), whole)
    assert got.tolist() == [6 * (2**62 // 6) + 15, -15]


def test_dims_that_nobody_names_are_not_mixed():
    inputs = [torch.full((3,), 10.0**rank) for rank in range(8)]
    sync = pc.chain(pc.shard("local"), pc.ring_reduce(axis="node"))
    results = pc.simulate(sync, inputs, axes={"pod": 2, "node": 2, "local": 2}).trees
    assert [leaf[0].item() for leaf in results] == [1111 / 4] * 4 + [11110000 / 4] * 4


@every_reducer
@pytest.mark.parametrize("axes", [{"node": 2, "local": 2}, MESH, {"node": 3, "local": 2}], ids=str)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(40000.0, torch.float16), (65504.0, torch.float16), (3e38, torch.float32), (-1.7e308, torch.float64)],
    ids=str,
)
def test_a_mean_that_fits_never_overflows_on_the_way(reducer, axes, value, dtype):
    inputs = [torch.full((7,), value, dtype=dtype)] * (axes["node"] * axes["local"])
    for sync in (pc.chain(pc.shard("local"), reducer(axis="node")), pc.chain(pc.shard("node"), reducer(axis="local"))):
        got = reduced(sync, inputs, axes)
        assert oracle.complaint(got, oracle.expected([oracle.mean()], inputs)[0][0]) is None
        if len(inputs) == 4:
            assert torch.equal(got, inputs[0])


# Integers -----------------------------------------------------------------------------------------------------------


@every_reducer
@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ((0, 1, 1, 1), torch.int8),  # means of means: 0 and 1, then 0 instead of 1
        ((127,) * 4, torch.int8),
        ((-128, -128, -128, 127), torch.int8),
        ((255, 255, 254, 255), torch.uint8),
        ((1, 2, 1, 2), torch.int32),  # 1.5 to the even one
        ((2, 3, 2, 3), torch.int32),  # 2.5 to the even one
        ((2**31 - 1, 2**31 - 1, 2**31 - 2, 2**31 - 1), torch.int32),
        ((2**53 + 1, 2**53 + 1, 2**53 + 1, 2**53 + 2), torch.int64),
    ],
    ids=str,
)
def test_integer_means_are_rounded_once(reducer, numbers, dtype):
    inputs = [torch.tensor([number] * 5, dtype=dtype) for number in numbers]
    right = [round(Fraction(sum(numbers), 4))] * 5
    for wrap in (pc.chain(), pc.bucketize(16), pc.compress("bf16")):
        if not (wrap == pc.compress("bf16") and reducer is pc.all_reduce):
            sync = pc.chain(wrap, pc.shard("local"), reducer(axis="node"))
            assert reduced(sync, inputs, {"node": 2, "local": 2}).tolist() == right


def test_integer_means_on_three_levels():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randint(-(2**31), 2**31, (40,), generator=generator).to(torch.int32) for _ in range(18)]
    sync = pc.chain(pc.shard("local"), pc.shard("node"), pc.ring_reduce(axis="rack"))
    got = reduced(sync, inputs, {"rack": 3, "node": 3, "local": 2})
    right = [round(Fraction(sum(column), 18)) for column in zip(*(each.tolist() for each in inputs), strict=True)]
    assert got.tolist() == right


# What travels -------------------------------------------------------------------------------------------------------


SEEN: list[Any] = []


@pc.reducer
async def looking(x, comm):
    SEEN.append((x.dtype, x.numel(), comm.encode(x).data.numel()))
    return x


@pytest.mark.parametrize(
    ("dtype", "held", "width"),
    [
        (torch.bfloat16, torch.float32, 2),
        (torch.float8_e5m2, torch.float32, 1),
        (torch.float32, torch.float32, 4),
        (torch.float64, torch.float64, 8),
        (torch.complex64, torch.float32, 4),
        (torch.int16, torch.int64, 8),
    ],
    ids=str,
)
def test_parts_are_held_wide_and_travel_in_the_leafs_own_dtype(dtype, held, width):
    for wrap in (pc.chain(), pc.bucketize(), pc.shard("local")):
        SEEN.clear()
        sync = pc.chain(wrap, pc.shard("rank"), looking(axis="node"))
        axes = {"node": 2, "local": 2, "rank": 3}
        pc.simulate(sync, [torch.zeros(24, dtype=dtype)] * 12, axes=axes)
        numbers = (48 if dtype.is_complex else 24) // (6 if wrap == pc.shard("local") else 3)
        assert [(held, numbers, numbers * width)] * 12 == SEEN


def test_narrow_leaves_are_rounded_once_where_nothing_travels_between():
    # Sums of bf16 numbers that bf16 does not hold: rounding them on the way would show.
    inputs = [torch.tensor([1.0, 1.0, 256.0], dtype=torch.bfloat16), torch.tensor([2.0**-9, 2.0**-7, 1.0]).bfloat16()]
    inputs.append(torch.tensor([2.0**-9, 2.0**-7, 1.0]).bfloat16())
    sync = pc.chain(pc.shard("local"), pc.ring_reduce(axis="node"))
    right = (sum(each.double() for each in inputs) / 3).bfloat16()
    assert reduced(sync, inputs, {"node": 1, "local": 3}).tolist() == right.tolist()


PLACES = {
    # wires: bytes per number within a node and between nodes
    "dense": (lambda inner: pc.chain(pc.shard("local"), inner), 4, 4),
    "between": (lambda inner: pc.chain(pc.shard("local"), pc.compress("bf16"), inner), 4, 2),
    "both": (lambda inner: pc.chain(pc.compress("fp16"), pc.shard("local"), inner), 2, 2),
    "each": (lambda inner: pc.chain(pc.compress("bf16"), pc.shard("local"), pc.compress("fp8"), inner), 2, 1),
}


@pytest.mark.parametrize("axes", [{"node": 2, "local": 2}, {"node": 2, "local": 4}, {"node": 4, "local": 2}], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_bytes_by_level(place, axes):
    numel, (nodes, ranks) = 64, axes.values()
    build, within, between = PLACES[place]
    trees = [torch.ones(numel)] * (nodes * ranks)
    extra = C.fp8().wire_bytes(8) - 8 if place == "each" else 0  # scales
    for reducer in (pc.ring_reduce, pc.all_to_all_avg):
        sent = pc.simulate(build(reducer(axis="node")), trees, axes=axes)
        inside = 2 * (ranks - 1) * numel // ranks * within
        across = 2 * (nodes - 1) * numel // ranks // nodes * between
        messages = 2 * (nodes - 1)
        assert sent.bytes == [inside + across + extra * messages] * len(trees)
        assert sent.messages == [2 * (ranks - 1) + messages] * len(trees)
        assert sent.rounds == [2 + (messages if reducer is pc.ring_reduce else 2)] * len(trees)


@pytest.mark.parametrize("numel", [1, 2, 3])
def test_small_leaves_are_filled_up(numel):
    inputs = [torch.arange(1.0, numel + 1) * 2**rank for rank in range(8)]
    axes = {"node": 2, "local": 4}
    sent = pc.simulate(pc.chain(pc.shard("local"), pc.all_gather_avg(axis="node")), inputs, axes=axes)
    assert sent.trees[5].tolist() == [i * 255 / 8 for i in range(1, numel + 1)]
    assert sent.bytes == [4 * (3 + 1 + 3)] * 8


def test_ranks_ask_alike_whatever_sizes_leaves_have():
    # Where a rank with an empty part asked for less, 2 x 4 ranks waited for each other, several leaves in flight.
    sizes = (1, 9, 2, 0, 31, 1, 1, 6, 3, 8, 2, 1, 7)
    inputs = [{str(i): torch.full((size,), 10.0**rank) for i, size in enumerate(sizes)} for rank in range(8)]
    for reducer in (pc.ring_reduce, pc.all_to_all_avg, pc.all_reduce):
        for axis, other in (("local", "node"), ("node", "local")):
            sync = pc.chain(pc.shard(axis), reducer(axis=other))
            sent = pc.simulate(sync, inputs, axes={"node": 2, "local": 4})
            assert len(set(sent.rounds)) == 1
            got = [leaf for leaf in sent.trees[3].values() if leaf.numel()]
            for leaf in got:
                assert torch.allclose(leaf, torch.full_like(leaf, 11111111 / 8), rtol=1e-6)


@pytest.mark.parametrize("codec", [None, "bf16", "fp16"])
@pytest.mark.parametrize("reducer", [pc.all_to_all_avg, pc.all_gather_avg], ids=lambda factory: factory.__name__)
def test_law_5_bits_do_not_depend_on_buckets(reducer, codec):
    inside = pc.chain(pc.compress(codec) if codec else pc.chain(), pc.shard("local"), reducer(axis="node"))
    for tree in ("mixed", "strided", "complex", "narrow"):
        inputs = [make(tree, rank) for rank in range(6)]
        alone = reduced(inside, inputs)
        for cap in (1, 10, 64, 500, "25MiB"):
            for order in ("reverse", "forward"):
                assert oracle.same_bits(alone, reduced(pc.chain(pc.bucketize(cap, order=order), inside), inputs))


@pytest.mark.parametrize("codec", [C.int8(stochastic=True), C.randk(0.3), C.topk(0.3), C.sign(), C.ternary()], ids=repr)
def test_all_ranks_decode_the_same(codec):
    for place in (
        pc.chain(pc.shard("local"), pc.compress(codec)),
        pc.chain(pc.compress(codec), pc.shard("local")),
        pc.chain(pc.compress(codec), pc.bucketize(), pc.shard("local"), pc.compress("bf16")),
    ):
        sync = pc.chain(place, pc.ring_reduce(axis="node"))
        assert sync.consensus
        reduced(sync, [{"w": make("bare", rank), "b": make("numel_7", rank)} for rank in range(6)])


def test_random_codecs_draw_apart_on_every_rank():
    kept = []

    def noting(x: Tensor, key: C.Key) -> Tensor:
        kept.append((key.path, key.rank, key.hop))
        return x.to(torch.float32).view(torch.uint8)

    class spy(pc.Codec):
        def wire_bytes(self, numel):
            return 4 * numel

        def encode(self, x, key):
            return noting(x, key)

        def decode(self, packet, numel, dtype):
            return packet.view(torch.float32).to(dtype)

    axes = {"node": 2, "local": 2}
    pc.simulate(
        pc.chain(pc.compress(spy()), pc.shard("local"), pc.ring_reduce(axis="node")), [torch.ones(8)] * 4, axes=axes
    )
    # 2 packets in the first round, 2 in the ring, on each rank; the last packet is the same on both nodes.
    assert len(kept) == 4 * 5
    assert len(set(kept)) == 4 * 4 + 2


# Sizes of one, weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [pc.chain(), pc.bucketize(64), pc.compress("bf16")], ids=repr)
@every_reducer
def test_a_dim_of_one_is_not_there(reducer, wrap):
    inputs = [make("mixed", rank) for rank in range(3)]
    one_per_node = pc.simulate(
        pc.chain(wrap, pc.shard("local"), reducer(axis="node")), inputs, axes={"node": 3, "local": 1}
    )
    alone = pc.simulate(pc.chain(wrap, reducer()), inputs)
    assert all(oracle.same_bits(a, b) for a, b in zip(one_per_node.trees, alone.trees, strict=True))
    assert (one_per_node.bytes, one_per_node.rounds) == (alone.bytes, alone.rounds)
    one_node = pc.simulate(
        pc.chain(wrap, pc.shard("local"), reducer(axis="node")), inputs, axes={"node": 1, "local": 3}
    )
    # Two exchanges along the dim that is there: what all_to_all_avg does, but for small leaves.
    direct = pc.simulate(pc.chain(wrap, pc.all_to_all_avg()), inputs)
    assert all(oracle.same_bits(a, b) for a, b in zip(one_node.trees, direct.trees, strict=True))
    single = pc.simulate(
        pc.chain(wrap, pc.shard("local"), reducer(axis="node")), inputs[:1], axes={"node": 1, "local": 1}
    )
    assert oracle.same_bits(single.trees[0], inputs[0])
    assert single.bytes == [0]


def test_weights_count_over_the_whole_mesh():
    inputs = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0]), torch.tensor([5.0, 6.0])]
    sync = pc.chain(pc.bucketize(), pc.shard("local"), pc.ring_reduce(axis="node"))
    assert reduced(sync, inputs, {"node": 2, "local": 2}, weights=[1, 1, 3, 3]).tolist() == [4.0, 5.0]
    sums = pc.chain(pc.shard("local"), pc.ring_reduce(op="sum", axis="node"))
    with pytest.raises(ValueError, match=all_of("weight", 'op="sum"', 'op="mean"')):
        pc.simulate(sums, inputs, axes={"node": 2, "local": 2}, weights=[1, 1, 1, 1])


# What is refused ----------------------------------------------------------------------------------------------------

SHARD, NODE = pc.shard("local"), pc.ring_reduce(axis="node")


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: pc.chain(SHARD), None),
        (lambda: pc.chain(SHARD, pc.scale(2.0)), ['shard("local")', "no reducer", "scale(2.0)"]),
        (lambda: pc.chain(pc.ring_reduce(), SHARD), ['shard("local")', "no reducer", "ring_reduce()"]),
        (lambda: pc.chain(NODE, SHARD), ['shard("local")', "no reducer", 'ring_reduce(axis="node")']),
        (lambda: SHARD(pc.scale(2.0)), ['shard("local")', "no reducer", "scale(2.0)"]),
        (lambda: pc.chain(SHARD, pc.ring_reduce()), ["ring_reduce()", 'shard("local")', "names no dim"]),
        (lambda: pc.chain(SHARD, pc.ring_reduce(axis="local")), ['shard("local")', "'local'", "another part"]),
        (lambda: pc.chain(SHARD, SHARD, NODE), ['shard("local")', "'local'", "another part"]),
        (lambda: pc.chain(SHARD, pc.bucketize(), NODE), ["bucketize()", 'shard("local")', "flat parts"]),
        (lambda: pc.chain(SHARD, pc.low_rank(2), NODE), ["low_rank(2)", 'shard("local")', "flat parts"]),
        (lambda: pc.chain(SHARD, pc.skip_nonfinite(), NODE), ["skip_nonfinite()", 'shard("local")', "flat parts"]),
        (lambda: pc.chain(SHARD, pc.clip_by_global_norm(1.0), NODE), ["clip_by_global_norm(1.0)", "flat parts"]),
        (lambda: SHARD(pc.chain(NODE, pc.clip_by_value(1.0))), ["clip_by_value(1.0)", "flat parts"]),
        (lambda: pc.chain(SHARD, pc.broadcast(axis="node")), ['broadcast(axis="node")', "no mean or sum"]),
        (lambda: pc.chain(SHARD, pc.gather_avg(axis="node")), ['gather_avg(axis="node")', "no mean or sum"]),
        (
            lambda: SHARD(pc.chain(NODE, pc.ring_reduce(op="sum", axis="rack"))),
            ['shard("local")', "a mean along one dim and a sum along another"],
        ),
        (
            lambda: pc.chain(SHARD, pc.error_feedback(), pc.compress("int8"), NODE),
            ["error_feedback()", 'shard("local")', "flat parts"],
        ),
        # Codecs: two with nothing sent between, and packets that are no numbers, summed natively.
        (lambda: pc.chain(pc.compress("bf16"), pc.compress("int8"), SHARD, NODE), ["only the inner one would travel"]),
        (
            lambda: pc.chain(SHARD, pc.compress("bf16"), pc.compress("int8"), NODE),
            ["only the inner one would travel"],
        ),
    ],
)
def test_what_cannot_work_fails_when_it_is_built_with_the_corrected_order(build, parts):
    if parts is None:
        assert build() == SHARD
        return
    with pytest.raises(pc.PipelineError, match=all_of(*parts)) as caught:
        build()
    advice = re.search(r"(?:write|keep one:) (chain\(.*\))", str(caught.value))
    assert advice, f"no corrected order in {caught.value}"
    names = {name: getattr(pc, name) for name in pc.__all__}
    assert isinstance(eval(advice[1], names), pc.Pipeline), f"the advice does not work: {advice[1]}"


def test_packets_that_are_no_numbers_into_a_native_sum():
    native = pc.all_reduce(axis="node")
    for refused in ((pc.compress("int8"), SHARD), (SHARD, pc.compress("int8"))):
        with pytest.raises(pc.PipelineError, match=all_of('compress("int8")', "native all-reduce")):
            pc.chain(*refused, native)
    pc.chain(pc.compress("int8"), SHARD, pc.compress("bf16"), native)  # only the inner one's are summed natively
    with pytest.raises(pc.PipelineError, match="cannot report what it lost"):
        pc.chain(pc.error_feedback(), pc.compress("int8"), SHARD, pc.compress("bf16"), native)


def test_pipelines_of_pipelines_are_refused_inside():
    for inner in (pc.partition({"*": NODE}), pc.piecewise({0: NODE})):
        with pytest.raises(pc.PipelineError, match=all_of("flat parts", 'give each pipeline in it a shard("local")')):
            SHARD(inner)
    inputs = [{"w": torch.full((3,), 10.0**rank), "b": torch.full((2,), 10.0**rank)} for rank in range(6)]
    sync = pc.partition({"w": pc.chain(SHARD, NODE), "*": pc.chain(pc.shard("node"), pc.ring_reduce(axis="local"))})
    assert {path: leaf.tolist() for path, leaf in reduced(sync, inputs).items()} == {
        "w": [111111 / 6] * 3,
        "b": [111111 / 6] * 2,
    }


@pytest.mark.parametrize("axis", [None, 0, ("node", "local"), True])
def test_an_axis_is_a_name(axis):
    with pytest.raises(TypeError, match=all_of("shard(axis)", "name of a mesh dim", repr(axis))):
        pc.shard(axis)


def test_a_tree_or_a_factory_where_the_axis_goes():
    with pytest.raises(pc.PipelineError, match=all_of("shard", "a tree")):
        pc.shard({"w": torch.ones(2)})
    with pytest.raises(pc.PipelineError, match=all_of("shard itself", "call it")):
        pc.chain(pc.shard, NODE)


def test_dims_that_are_not_there():
    inputs = [torch.ones(2)] * 4
    sync = pc.chain(SHARD, NODE)
    with pytest.raises(pc.PipelineError, match=all_of('shard("local")', "one dim;", "init_device_mesh")):
        pc.simulate(sync, inputs)
    with pytest.raises(pc.PipelineError, match=all_of('shard("local")', "one dim, 'local'", "init_device_mesh")):
        pc.simulate(sync, inputs, axes={"local": 4})
    with pytest.raises(pc.PipelineError, match=all_of("shard", "no dim 'local'", "'node', 'rank'")):
        pc.simulate(sync, inputs, axes={"node": 2, "rank": 2})
    with pytest.raises(pc.PipelineError, match=all_of("ring_reduce", "no dim 'node'", "'host', 'local'")):
        pc.simulate(sync, inputs, axes={"host": 2, "local": 2})


def test_a_dtype_that_has_no_mean_is_named_before_any_traffic():
    inputs = [{"fine": torch.ones(2), "flags": torch.zeros(2, dtype=torch.bool)}] * 4
    with pytest.raises(pc.PipelineError, match=all_of("'flags'", "torch.bool")):
        pc.simulate(pc.chain(SHARD, NODE), inputs, axes={"node": 2, "local": 2})


def test_what_is_known_before_anything_runs():
    sync = pc.chain(pc.bucketize(), SHARD, pc.compress("int8"), NODE)
    assert repr(sync) == 'chain(bucketize(), shard("local"), compress("int8"), ring_reduce(axis="node"))'
    assert (sync.communicates, sync.consensus, sync.stateful, sync.fresh) == (True, True, False, True)

    @pc.reducer(consensus=False)
    async def own(x, comm):
        return x

    assert not pc.chain(SHARD, own(axis="node")).consensus
