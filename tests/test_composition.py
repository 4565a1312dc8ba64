"""How stages compose, what is refused and in which words, and the points where users extend the library."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import inspect
import io
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import oracle
import pytest
import torch
from tables import PIPELINES, make, unchanged
from torch import Tensor

import ptcollect as pc

RING = pc.ring_reduce()
GRADS = {"w": torch.ones(2)}


def all_of(*parts: str) -> str:
    """A pattern for `match=`: every part is somewhere in the message."""
    return "".join(rf"(?=[\s\S]*{re.escape(part)})" for part in parts)


def lines_of(function: Callable[..., Any]) -> str:
    """A pattern for `match=`: this file and one of the function's lines."""
    lines, first = inspect.getsourcelines(function)
    return re.escape(__file__) + ":(" + "|".join(str(first + i) for i in range(len(lines))) + r")\b"


@dataclass(frozen=True, repr=False)
class momentum(pc.Transform):
    """Average m = decay * m + g instead of g."""

    decay: float = 0.9
    stateful = True

    def init(self, inner, params):
        return {"m": {path: torch.zeros_like(p) for path, p in params.items()}, "inner": inner.begin(params)}

    async def update(self, inner, tree, state, comm):
        m = {path: self.decay * state["m"][path] + g for path, g in tree.items()}
        out, inner_state = await inner.apply(m, state["inner"], comm)
        return out, {"m": m, "inner": inner_state}


@dataclass(frozen=True, repr=False)
class quarters(pc.Codec):
    """One byte per number: multiples of a step from -128 to 127 of them."""

    step: float = 0.25

    def wire_bytes(self, numel):
        return numel

    def encode(self, x, key):
        return (x / self.step).round().clamp(-128, 127).to(torch.int8).view(torch.uint8)

    def decode(self, packet, numel, dtype):
        return packet.view(torch.int8).to(dtype) * self.step


SOURCES = {name: getattr(pc, name) for name in pc.__all__} | {
    "unchanged": unchanged,
    "momentum": momentum,
    "quarters": quarters,
    **{name: getattr(pc.codecs, name) for name in pc.codecs.__all__},
}
VALUES = [
    *(row.pipeline for row in PIPELINES),
    pc.bucketize(),
    pc.bucketize("1MiB", order="forward"),
    pc.bucketize(order="forward"),
    pc.compress("fp16"),
    pc.chain(pc.bucketize(), pc.compress("bf16")),
    pc.ring_reduce(axis="node"),
    pc.ring_reduce(op="sum", axis="node"),
    pc.broadcast(root=3, axis="local"),
    pc.codecs.bf16(),
    momentum(),
    momentum(0.5),
    pc.chain(momentum(), pc.compress(quarters()), RING),
    pc.chain(pc.compress(quarters(0.5)), pc.all_gather_avg()),
]
every_value = pytest.mark.parametrize("value", VALUES, ids=repr)


# Values -------------------------------------------------------------------------------------------------------------


@every_value
def test_repr_is_the_code_that_builds_it(value):
    again = eval(repr(value), dict(SOURCES))
    assert again == value
    assert repr(again) == repr(value)


@every_value
def test_values_compare_hash_pickle_and_copy(value):
    again = eval(repr(value), dict(SOURCES))
    for other in (again, copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value
        assert hash(other) == hash(value)
        assert {value: 1}[other] == 1
        assert repr(other) == repr(value)


def test_values_that_differ_are_not_equal():
    for i, one in enumerate(VALUES):
        for other in VALUES[i + 1 :]:
            assert (one == other) == (repr(one) == repr(other)), (one, other)
    assert RING != "ring_reduce()"


@every_value
def test_values_are_frozen(value):
    field = next(iter(dataclasses.fields(value)), None)
    if field is not None:
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{field.name}'"):
            setattr(value, field.name, None)


def test_a_pickled_pipeline_runs():
    inputs = [make("mixed", rank) for rank in range(3)]
    for row in PIPELINES:
        if row.ranks <= 3:
            again = pickle.loads(pickle.dumps(row.pipeline))
            assert oracle.same_bits(replace(row, pipeline=again).simulate(inputs).trees, row.simulate(inputs).trees)


# Chains -------------------------------------------------------------------------------------------------------------


def test_chain_flattens():
    bucketize, compress, scale = pc.bucketize(64), pc.compress("bf16"), pc.scale(2.0)
    flat = pc.chain(bucketize, compress, RING, scale)
    assert flat == pc.chain(pc.chain(bucketize, compress), pc.chain(RING, scale))
    assert flat == pc.chain(bucketize, pc.chain(compress, RING), scale)
    assert flat == pc.chain(pc.chain(pc.chain(flat)))
    assert flat == pc.chain(pc.chain(), flat, pc.chain())
    assert repr(flat) == 'chain(bucketize(64), compress("bf16"), ring_reduce(), scale(2.0))'


def test_chain_of_one_is_that_one():
    assert pc.chain(RING) is RING
    assert pc.chain(pc.chain(), RING) is RING
    bucketize = pc.bucketize()
    assert pc.chain(bucketize) is bucketize


def test_chain_of_none_is_the_identity():
    assert repr(pc.chain()) == "chain()"
    assert not pc.chain().communicates
    results = pc.simulate(pc.chain(), [GRADS, {"w": torch.zeros(2)}]).trees
    assert results[0]["w"].tolist() == [1, 1]
    assert results[1]["w"].tolist() == [0, 0]


def test_chain_of_transforms_is_a_transform():
    prefix = pc.chain(pc.bucketize(64), pc.compress("bf16"))
    assert isinstance(prefix, pc.Transform)
    assert repr(prefix) == 'chain(bucketize(64), compress("bf16"))'
    inputs = [make("mixed", rank) for rank in range(3)]
    by_chain, by_call = pc.simulate(pc.chain(prefix, RING), inputs), pc.simulate(prefix(RING), inputs)
    assert oracle.same_bits(by_chain.trees, by_call.trees)
    assert by_chain.bytes == by_call.bytes


def test_applied_to_a_chain_a_transform_wraps_all_of_it():
    first, second = pc.ring_reduce(), pc.broadcast()
    wraps_both = pc.compress("bf16")(pc.chain(first, second))
    assert repr(wraps_both) == 'compress("bf16")(chain(ring_reduce(), broadcast()))'
    wraps_one = pc.chain(pc.compress("bf16"), first, second)
    assert wraps_both != wraps_one
    inputs = [torch.ones(8)] * 2
    assert sum(pc.simulate(wraps_one, inputs).bytes) == 2 * 8 * 2 + 8 * 4
    assert sum(pc.simulate(wraps_both, inputs).bytes) == 2 * 8 * 2 + 8 * 2


NOTES: list[str] = []


@dataclass(frozen=True, repr=False)
class noting(pc.Transform):
    """Writes down when it goes in and out."""

    what: str

    async def update(self, inner, tree, state, comm):
        NOTES.append(f"{self.what} in")
        out, inner_state = await inner.apply(tree, state["inner"], comm)
        NOTES.append(f"{self.what} out")
        return out, {"inner": inner_state}


def note(what: str) -> pc.Pipeline:
    def map_(tree: Any) -> Any:
        NOTES.append(what)
        return tree

    return pc.stateless(map_)


def test_a_transform_wraps_up_to_the_next_reducer_and_is_undone_after_it():
    def run(pipeline: pc.Pipeline) -> str:
        NOTES.clear()
        pc.simulate(pipeline, [torch.ones(1)])
        return ", ".join(NOTES)

    a, b, x, y, z = noting("a"), noting("b"), note("x"), note("y"), note("z")
    assert run(pc.chain(x, a, b, RING, y)) == "x, a in, b in, b out, a out, y"
    assert run(pc.chain(a, x, b, RING, y)) == "a in, x, b in, b out, a out, y"
    assert run(pc.chain(a, pc.chain(RING, x))) == "a in, a out, x"
    assert run(a(pc.chain(RING, x))) == "a in, x, a out"
    assert run(pc.chain(a, RING, x, b, RING, y)) == "a in, a out, x, b in, b out, y"
    assert run(pc.chain(a, b(pc.chain(x, RING, y)), z)) == "a in, b in, x, y, b out, a out, z"


def test_what_follows_a_bucketized_reducer_sees_the_whole_tree():
    seen = []

    def look(tree: Any) -> Any:
        seen.append(tree)
        return tree

    inputs = [make("mixed", rank) for rank in range(2)]
    pipeline = pc.chain(pc.bucketize(16), pc.compress("bf16"), RING, pc.stateless(look))
    pc.simulate(pipeline, inputs)
    assert [oracle.structure(tree) for tree in seen] == [oracle.structure(tree) for tree in inputs]


def test_what_is_known_before_anything_runs():
    assert (RING.communicates, RING.consensus, RING.stateful) == (True, True, False)
    assert (pc.scale(2.0).communicates, pc.scale(2.0).consensus) == (False, False)
    assert not pc.chain(RING, pc.gather_avg()).consensus
    assert pc.chain(pc.gather_avg(), pc.broadcast()).consensus
    assert pc.chain(momentum(), RING).stateful


# What is refused when it is built -----------------------------------------------------------------------------------


def corrected(error: BaseException) -> str:
    """The corrected order that the message ends with."""
    found = re.search(r"(?:write|keep one:) (chain\(.*\))", str(error))
    assert found, f"no corrected order in {error}"
    return found[1].split(" or chain")[0]


REFUSED = [
    # A transform with no reducer after it.
    (lambda: pc.chain(pc.scale(2.0), pc.bucketize()), ["bucketize()", "no reducer", "scale(2.0)"]),
    (lambda: pc.chain(RING, pc.compress("bf16")), ['compress("bf16")', "no reducer", "ring_reduce()"]),
    (lambda: pc.chain(RING, pc.bucketize(), pc.scale(2.0)), ["bucketize()", "no reducer", "ring_reduce()"]),
    (lambda: pc.chain(pc.bucketize(), pc.compress("bf16"), pc.scale(2.0)), ["bucketize()", "no reducer", "scale(2.0)"]),
    (lambda: pc.chain(RING, pc.bucketize(), pc.compress("bf16")), ["bucketize()", "no reducer", "ring_reduce()"]),
    (lambda: pc.bucketize()(pc.clip_by_value(1.0)), ["bucketize()", "no reducer", "clip_by_value(1.0)"]),
    (lambda: pc.chain(pc.bucketize(), pc.compress("bf16"))(pc.chain()), ["no reducer", "chain()"]),
    # Two codecs for one message.
    (lambda: pc.chain(pc.compress("bf16"), pc.compress("fp16"), RING), ['compress("bf16")', 'compress("fp16")']),
    (
        lambda: pc.chain(pc.compress("bf16"), pc.bucketize(), pc.compress("fp16"), RING),
        ['compress("bf16")', 'compress("fp16")'],
    ),
    (lambda: pc.compress("bf16")(pc.compress("bf16")(RING)), ['compress("bf16")', "only the inner one"]),
    # Packets that are no numbers, summed natively.
    (lambda: pc.chain(pc.compress(quarters()), pc.all_reduce()), ["compress(quarters())", "all_reduce()"]),
    (
        lambda: pc.chain(pc.compress(quarters()), pc.bucketize(), pc.all_reduce(op="sum")),
        ["compress(quarters())", 'all_reduce(op="sum")'],
    ),
    # Inside buckets there are no paths.
    (lambda: pc.chain(pc.bucketize(), pc.clip_by_global_norm(1.0), RING), ["clip_by_global_norm(1.0)", "bucketize()"]),
    (lambda: pc.chain(pc.bucketize(), pc.compress("bf16"), pc.scale(2.0), RING), ["scale(2.0)", "bucketize()"]),
    (lambda: pc.chain(pc.bucketize(), pc.stateless(unchanged), RING), ["stateless(unchanged)", "bucketize()"]),
    (lambda: pc.chain(pc.bucketize(), momentum(), RING), ["momentum()", "bucketize()"]),
    (lambda: pc.chain(pc.bucketize(64), pc.bucketize(), RING), ["bucketize()", "bucketize(64)"]),
    (lambda: pc.bucketize()(pc.compress("bf16")(momentum()(RING))), ["momentum()", "bucketize()"]),
    (lambda: pc.bucketize()(pc.chain(RING, pc.clip_by_value(1.0))), ["clip_by_value(1.0)", "bucketize()"]),
]


@pytest.mark.parametrize(("build", "parts"), REFUSED, ids=[", ".join(parts) for _, parts in REFUSED])
def test_what_cannot_work_fails_when_it_is_built_with_the_corrected_order(build, parts):
    with pytest.raises(pc.PipelineError, match=all_of(*parts)) as caught:
        build()
    advice = corrected(caught.value)
    assert isinstance(eval(advice, dict(SOURCES)), pc.Pipeline), f"the advice does not work: {advice}"


def test_the_corrected_order_keeps_what_comes_after_the_reducer_after_it():
    with pytest.raises(pc.PipelineError, match="inside bucketize") as caught:
        pc.bucketize()(pc.chain(RING, pc.clip_by_value(1.0)))
    assert corrected(caught.value) == "chain(bucketize(), ring_reduce(), clip_by_value(1.0))"


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: pc.ring_reduce(GRADS), ["ring_reduce", "a tree", "ring_reduce()(grads)"]),
        (lambda: pc.ring_reduce([torch.ones(1)]), ["ring_reduce", "a tree", "ring_reduce()(grads)"]),
        (lambda: pc.all_reduce(torch.ones(1)), ["all_reduce", "a tree", "all_reduce()(grads)"]),
        (lambda: pc.all_to_all_avg(GRADS), ["all_to_all_avg", "a tree", "all_to_all_avg()(grads)"]),
        (lambda: pc.broadcast(root=GRADS), ["broadcast", "a tree", "'root'"]),
        (lambda: pc.bucketize(GRADS), ["bucketize", "a tree", "chain(bucketize(), ring_reduce())(grads)"]),
        (lambda: pc.bucketize()(GRADS), ["bucketize", "a tree", "chain(bucketize(), ring_reduce())(grads)"]),
        (lambda: pc.chain(pc.bucketize(), pc.compress("bf16"))(GRADS), ["bucketize()", "a tree", "ring_reduce()"]),
        (lambda: pc.compress(torch.ones(1)), ["compress", "a tree"]),
        (lambda: pc.chain(RING, GRADS), ["chain", "a tree"]),
        (lambda: pc.scale(GRADS), ["scale", "a tree"]),
        (lambda: pc.clip_by_value(GRADS), ["clip_by_value", "a tree"]),
        (lambda: pc.clip_by_global_norm(GRADS), ["clip_by_global_norm", "a tree"]),
        (lambda: pc.ring_reduce(unchanged), ["ring_reduce", "function unchanged", "stateless(f)"]),
        (lambda: pc.bucketize(unchanged), ["bucketize", "function unchanged", "stateless(f)"]),
        (lambda: pc.bucketize()(unchanged), ["bucketize", "function unchanged", "stateless(f)"]),
        (lambda: pc.chain(RING, unchanged), ["chain", "function unchanged", "stateless(f)"]),
        (lambda: pc.chain(pc.ring_reduce), ["ring_reduce itself", "call it: ring_reduce()"]),
        (lambda: pc.chain(pc.bucketize, RING), ["bucketize itself", "call it: bucketize()"]),
        (lambda: pc.bucketize()(pc.ring_reduce), ["ring_reduce itself", "call it: ring_reduce()"]),
        (lambda: pc.chain("ring"), ["chain", "pipelines and transforms", "str", "'ring'"]),
        (lambda: pc.bucketize()(pc.compress("bf16")), ["bucketize()", "wraps a pipeline", 'compress("bf16")']),
    ],
)
def test_trees_functions_and_factories_where_options_or_stages_go(build, parts):
    with pytest.raises(pc.PipelineError, match=all_of(*parts)):
        build()


@pytest.mark.parametrize(
    ("build", "kind", "parts"),
    [
        (lambda: pc.compress("int9"), ValueError, ["unknown codec 'int9'", "'bf16'", "'fp16'"]),
        (lambda: pc.compress(3), TypeError, ["compress(codec)", '"bf16"', "int"]),
        (lambda: pc.bucketize("25 zebras"), ValueError, ["bucketize(cap)", "'25 zebras'", '"25MiB"']),
        (lambda: pc.bucketize(""), ValueError, ["bucketize(cap)", "''"]),
        (lambda: pc.bucketize(0), ValueError, ["bucketize(cap)", "positive", "0"]),
        (lambda: pc.bucketize(-5), ValueError, ["bucketize(cap)", "positive", "-5"]),
        (lambda: pc.bucketize("0MB"), ValueError, ["bucketize(cap)", "positive", "'0MB'"]),
        (lambda: pc.bucketize(True), ValueError, ["bucketize(cap)", "True"]),
        (lambda: pc.bucketize(order="up"), ValueError, ["order", '"reverse"', '"forward"', "'up'"]),
        (lambda: pc.bucketize("1MB", "forward"), TypeError, ["bucketize", "positional"]),
        (lambda: pc.ring_reduce("avg"), ValueError, ["op", '"mean"', '"sum"', "'avg'"]),
        (lambda: pc.all_reduce(op=None), ValueError, ["op", '"mean"', '"sum"', "None"]),
        (lambda: pc.ring_reduce("sum", "node"), TypeError, ["ring_reduce", "positional"]),
        (lambda: pc.ring_reduce(roof=1), TypeError, ["ring_reduce", "roof"]),
        (lambda: pc.ring_reduce(axis=0), TypeError, ["ring_reduce", "axis", "name of a mesh dim", "0"]),
        (lambda: pc.all_to_all_avg(op="sum"), TypeError, ["all_to_all_avg", "op"]),
        (lambda: pc.broadcast(root=-1), ValueError, ["root", "from 0", "-1"]),
        (lambda: pc.gather_avg(root=1.0), ValueError, ["root", "int", "1.0"]),
        (lambda: pc.scale(float("nan")), ValueError, ["scale(factor)", "finite", "nan"]),
        (lambda: pc.scale("2"), ValueError, ["scale(factor)", "number", "'2'"]),
        (lambda: pc.clip_by_value(0), ValueError, ["clip_by_value(limit)", "positive", "0"]),
        (lambda: pc.clip_by_global_norm(-1.0), ValueError, ["clip_by_global_norm(max_norm)", "positive", "-1.0"]),
        (lambda: pc.stateless(3), TypeError, ["stateless(function)", "int"]),
        (lambda: pc.stateless(RING), TypeError, ["stateless(function)"]),
    ],
)
def test_options_that_cannot_be(build, kind, parts):
    with pytest.raises(kind, match=all_of(*parts)):
        build()


# What is refused when it is called ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "parts"),
    [
        (lambda: RING(GRADS), pc.PipelineError, ["no process group", "init_process_group", "simulate"]),
        (lambda: RING.start(GRADS), pc.PipelineError, ["no process group", "init_process_group"]),
        (lambda: RING(GRADS, group="world"), TypeError, ["group", "ProcessGroup", "DeviceMesh", "str"]),
        (lambda: RING(GRADS, gruop=None), TypeError, ["'gruop'", "group, weight, missing, check, donate"]),
        (lambda: RING(GRADS, missing="zero"), ValueError, ["missing", '"error"', '"zeros"', "'zero'"]),
        (lambda: RING(GRADS, check="never"), ValueError, ["check", '"every_step"', '"first"', '"off"', "'never'"]),
        (lambda: RING(GRADS, donate=1), TypeError, ["donate", "True or False", "1"]),
        (lambda: pc.scale(2.0)({}), ValueError, ["the tree is empty"]),
        (lambda: pc.scale(2.0)({"a": {"b": 1.0}}), TypeError, ["'a.b'", "torch.Tensor", "float", "torch.tensor(x)"]),
        (lambda: pc.scale(2.0)("grads"), TypeError, ["torch.Tensor", "str"]),
        (lambda: pc.scale(2.0)({"e": torch.ones(2).to_sparse()}), TypeError, ["'e'", "sparse", "to_dense"]),
        (lambda: pc.scale(0.5)({"n": torch.ones(2, dtype=torch.int32)}), pc.PipelineError, ["'n'", "int32", "0.5"]),
        (
            lambda: pc.chain(momentum(), RING)(GRADS),
            pc.PipelineError,
            ["keeps state", "momentum", ".init(", ".update("],
        ),
        (
            lambda: pc.simulate(pc.chain(momentum(), RING), [GRADS] * 2, [{"step": 0}] * 2),
            pc.PipelineError,
            ["state is not that of", "momentum", "pipeline.init(params)"],
        ),
        (
            lambda: pc.simulate(RING, [GRADS] * 2, [{"step": 1}] * 2),
            pc.PipelineError,
            ["state is not that of", "ring_reduce()", "step"],
        ),
        (lambda: pc.simulate(RING, []), ValueError, ["one tree per rank"]),
        (lambda: pc.simulate(RING, [GRADS], weights=[1, 2]), ValueError, ["1 weights", "got 2"]),
        (lambda: pc.simulate(RING, [GRADS] * 2, [{}]), ValueError, ["2 states", "got 1"]),
        (lambda: pc.simulate(RING, [{}, {}]), ValueError, ["the tree is empty"]),
        (lambda: pc.simulate(pc.broadcast(root=2), [GRADS] * 2), ValueError, ["root=2", "0 to 1"]),
        (lambda: pc.simulate(pc.gather_avg(root=7), [GRADS] * 5), ValueError, ["root=7", "0 to 4"]),
    ],
)
def test_calls_that_cannot_be(call, kind, parts):
    with pytest.raises(kind, match=all_of(*parts)):
        call()


def test_simulated_options_are_checked_before_anything_is_started():
    with pytest.raises(ValueError, match="weight"):
        pc.simulate(RING, [GRADS] * 2, weights=[1.0, -1.0])  # a coroutine that was never run would warn


def test_a_map_that_changes_the_tree_is_named_with_its_line():
    def cut(tree):
        return {"w": tree["w"][:1]}

    def widen(tree):
        return {"w": tree["w"].double()}

    def rename(tree):
        return {"v": tree["w"]}

    def drop(tree):
        return None

    for function, parts in (
        (cut, ["'w'", "(2,)", "(1,)"]),
        (widen, ["'w'", "float32", "float64"]),
        (rename, ["'w'", "'v'"]),
        (drop, ["'w'"]),
    ):
        for pipeline in (pc.stateless(function), pc.chain(RING, pc.stateless(function))):
            with pytest.raises(pc.PipelineError, match=all_of(function.__name__, *parts) + f".*{lines_of(function)}"):
                pc.simulate(pipeline, [GRADS] * 2)


# State --------------------------------------------------------------------------------------------------------------


def test_state_is_plain_data_by_stage_and_path():
    pipeline = pc.chain(momentum(0.5), RING, momentum(0.25), pc.all_gather_avg())
    state = pipeline.init({"fc": {"weight": torch.ones(2)}})
    assert state["step"] == 0
    assert set(state) == {"step", "momentum", "momentum_1"}
    assert list(state["momentum"]["m"]) == ["fc.weight"]
    assert RING.init(GRADS) == {}


def test_states_are_left_unchanged_and_count_steps():
    pipeline = pc.chain(momentum(0.5), RING)
    states = [pipeline.init(GRADS) for _ in range(2)]
    kept = copy.deepcopy(states)
    run = pc.simulate(pipeline, [GRADS] * 2, states)
    assert [state["step"] for state in run.states] == [1, 1]
    assert all(oracle.same_bits(a["momentum"], b["momentum"]) for a, b in zip(states, kept, strict=True))


def test_law_9_saved_and_loaded_it_goes_on_bit_for_bit():
    pipeline = pc.chain(momentum(0.5), pc.bucketize(64), pc.compress("bf16"), RING, momentum(0.25), pc.all_to_all_avg())
    inputs = [[make("one_leaf", 10 * step + rank) for rank in range(3)] for step in range(4)]
    whole = broken = None
    for step in range(4):
        whole = pc.simulate(pipeline, inputs[step], whole and whole.states)
    for step in range(4):
        states = None
        if broken is not None:
            file = io.BytesIO()
            torch.save(broken.states, file)
            file.seek(0)
            states = torch.load(file, weights_only=True)
        broken = pc.simulate(pipeline, inputs[step], states)
    assert oracle.same_bits(whole.trees, broken.trees)
    assert [state["step"] for state in broken.states] == [4, 4, 4]


# Extension: reducers ------------------------------------------------------------------------------------------------


async def neighbour_avg(x: Tensor, comm: pc.Comm, *, hops: int = 1) -> Tensor:
    left, right = (comm.rank - hops) % comm.size, (comm.rank + hops) % comm.size
    received = await comm.exchange(send={right: comm.encode(x)}, recv={left: x.numel()})
    return (x + comm.decode(received[left])) / 2


def test_a_users_reducer_is_a_pipeline_like_any_other():
    reducer = pc.reducer(consensus=False)(neighbour_avg)
    assert repr(reducer()) == "neighbour_avg()"
    assert repr(reducer(2, axis="node")) == 'neighbour_avg(hops=2, axis="node")'
    assert reducer(hops=2) == reducer(2) != reducer()
    assert not reducer().consensus
    inputs = [torch.full((3,), float(2 * rank)) for rank in range(4)]
    assert [tree[0].item() for tree in pc.simulate(reducer(), inputs).trees] == [3.0, 1.0, 3.0, 5.0]
    run = pc.simulate(pc.chain(pc.bucketize(), pc.compress("bf16"), reducer(2), pc.scale(2.0)), inputs)
    assert [tree[0].item() for tree in run.trees] == [4.0, 8.0, 4.0, 8.0]
    assert run.bytes == [6] * 4
    assert pc.simulate(reducer(), inputs[:1]).trees[0].tolist() == [0.0] * 3


def test_what_reducer_refuses():
    def plain(x, comm):
        return x

    async def without_default(x, comm, *, k):
        return x

    async def without_comm(x):
        return x

    with pytest.raises(pc.PipelineError, match=all_of("async def", "plain")):
        pc.reducer(plain)
    for function in (without_default, without_comm):
        with pytest.raises(pc.PipelineError, match=all_of(function.__name__, "(x, comm, *, option=default")):
            pc.reducer(function)


def ring_of(size: int, rank: int) -> tuple[int, int]:
    return (rank - 1) % size, (rank + 1) % size


async def forgets_await(x, comm):
    left, right = ring_of(comm.size, comm.rank)
    comm.exchange(send={right: comm.encode(x)}, recv={left: x.numel()})
    return x


async def forgets_the_first_await(x, comm):
    left, right = ring_of(comm.size, comm.rank)
    comm.exchange(send={right: comm.encode(x)}, recv={left: x.numel()})
    await comm.exchange(send={left: comm.encode(x)}, recv={right: x.numel()})
    return x


async def sleeps(x, comm):
    await asyncio.sleep(0)
    return x


class Bare:
    def __await__(self):
        yield self


async def waits_for_a_future(x, comm):
    await asyncio.Future(loop=LOOP)
    return x


async def waits_for_anything(x, comm):
    await Bare()
    return x


async def too_short(x, comm):
    return x[:-1]


async def two_dimensional(x, comm):
    return x[None]


async def other_dtype(x, comm):
    return x.double()


async def nothing(x, comm):
    pass


async def sends_to_itself(x, comm):
    await comm.exchange(send={comm.rank: comm.encode(x)}, recv={})
    return x


async def sends_to_nobody(x, comm):
    await comm.exchange(send={comm.size: comm.encode(x)}, recv={})
    return x


class _Loop(asyncio.AbstractEventLoop):
    """Enough of a loop to make a Future."""

    def get_debug(self):
        return False


LOOP = _Loop()


@pytest.mark.parametrize("around", [pc.chain(), pc.bucketize()], ids=repr)
@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (forgets_await, ["forgets_await", "never awaited", "Exchange"]),
        (forgets_the_first_await, ["forgets_the_first_await", "never awaited"]),
        (sleeps, ["await"]),
        (waits_for_a_future, ["await", "Future"]),
        (waits_for_anything, ["await", "Bare"]),
        (too_short, ["too_short", "'a'", "(3,)", "(2,)"]),
        (two_dimensional, ["two_dimensional", "(3,)", "(1, 3)"]),
        (other_dtype, ["other_dtype", "float32", "float64"]),
        (nothing, ["nothing", "NoneType"]),
        (sends_to_itself, ["exchange with itself", "rank 0"]),
        (sends_to_nobody, ["rank 2, which does not exist", "0 to 1"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_reducer_that_breaks_the_rules_is_shown_with_file_and_line(function, parts, around):
    pipeline = pc.chain(around, pc.reducer(function)())
    with pytest.raises(pc.PipelineError, match=all_of(*parts) + rf"[\s\S]*{lines_of(function)}"):
        pc.simulate(pipeline, [{"a": torch.ones(3)}] * 2)


async def deadlocks(x, comm):
    left, right = ring_of(comm.size, comm.rank)
    await comm.exchange(send={right: comm.encode(x)}, recv={left: x.numel()})
    received = await comm.exchange(send={}, recv={left: x.numel()})
    return comm.decode(received[left])


async def misses_one(x, comm):
    await comm.all_reduce(x)
    if comm.rank:
        await comm.all_reduce(x)
    return x


def test_a_deadlock_is_reported_with_each_ranks_waiting_line():
    with pytest.raises(pc.PipelineError, match="deadlock") as caught:
        pc.simulate(pc.reducer(deadlocks)(), [{"a": torch.ones(3)}] * 3)
    for rank, peer in enumerate((2, 0, 1)):
        pattern = rf"rank {rank} waits for rank {peer}\b.*'a'.*{lines_of(deadlocks)}"
        assert re.search(pattern, str(caught.value)), f"{pattern} not in {caught.value}"
    with pytest.raises(pc.PipelineError, match="deadlock") as caught:
        pc.simulate(pc.reducer(misses_one)(), [torch.ones(3)] * 2)
    assert "rank 0 has ended" in str(caught.value)
    assert re.search(rf"rank 1 waits for .*rank 0.*{lines_of(misses_one)}", str(caught.value))


async def sends_too_little(x, comm):
    left, right = ring_of(comm.size, comm.rank)
    await comm.exchange(send={right: comm.encode(x[1:])}, recv={left: x.numel()})
    return x


def test_sizes_that_do_not_fit_are_an_error_in_the_simulator():
    with pytest.raises(
        pc.PipelineError, match=all_of("8 bytes", "12 bytes", "'a'") + rf"[\s\S]*{lines_of(sends_too_little)}"
    ):
        pc.simulate(pc.reducer(sends_too_little)(), [{"a": torch.ones(3)}] * 2)


async def asks_for_forks(x, comm):
    async def one(part):
        left, right = ring_of(comm.size, comm.rank)
        received = await comm.exchange(send={right: comm.encode(part)}, recv={left: part.numel()})
        return comm.decode(received[left]).clone()

    return torch.cat(await comm.fork([one(part) for part in x.split(2)]))


def test_a_reducer_may_fork():
    inputs = [torch.arange(7.0) + 10 * rank for rank in range(3)]
    results = pc.simulate(pc.reducer(asks_for_forks)(), inputs).trees
    assert all(torch.equal(results[rank], inputs[rank - 1]) for rank in range(3))


# Extension: transforms and codecs -----------------------------------------------------------------------------------


def test_a_users_transform_keeps_state_and_composes():
    pipeline = pc.chain(momentum(0.5), pc.bucketize(8), RING)
    inputs = [
        {"w": torch.tensor([4.0, 8.0]), "b": torch.tensor([1.0])},
        {"w": torch.zeros(2), "b": torch.tensor([3.0])},
    ]
    once = pc.simulate(pipeline, inputs)
    twice = pc.simulate(pipeline, inputs, once.states)
    assert once.trees[0]["w"].tolist() == [2.0, 4.0]
    assert twice.trees[0]["w"].tolist() == twice.trees[1]["w"].tolist() == [3.0, 6.0]
    assert twice.trees[0]["b"].tolist() == [3.0]
    assert inputs[0]["w"].tolist() == [4.0, 8.0]


def test_a_users_codec_travels_packed():
    inputs = [torch.tensor([1.0, 2.1, -3.0]), torch.tensor([2.0, 2.1, 1.0])]
    run = pc.simulate(pc.chain(pc.compress(quarters()), pc.all_to_all_avg()), inputs)
    assert run.trees[0].tolist() == run.trees[1].tolist() == [1.5, 2.0, -1.0]
    assert sum(run.bytes) == 2 * 3
    run = pc.simulate(pc.chain(pc.compress(quarters(0.5)), pc.all_gather_avg()), inputs)
    assert run.trees[0].tolist() == run.trees[1].tolist() == [1.5, 2.0, -1.0]
    assert run.bytes == [3, 3]


@dataclass(frozen=True, repr=False)
class too_long(quarters):
    def encode(self, x, key):
        return torch.zeros(x.numel() + 1, dtype=torch.uint8)


@dataclass(frozen=True, repr=False)
class not_bytes(quarters):
    def encode(self, x, key):
        return x


def test_a_codec_that_breaks_its_promise_is_named():
    for codec, parts in ((too_long(), ["too_long()", "'a'", "promises"]), (not_bytes(), ["not_bytes()", "float32"])):
        with pytest.raises(pc.PipelineError, match=all_of(*parts)):
            pc.simulate(pc.chain(pc.compress(codec), pc.all_gather_avg()), [{"a": torch.ones(3)}] * 2)


@dataclass(frozen=True, repr=False)
class broken(pc.Transform):
    """Breaks one rule, by number."""

    rule: int

    async def update(self, inner, tree, state, comm):
        out, inner_state = await inner.apply(tree, state["inner"], comm)
        return {
            1: lambda: out,
            2: lambda: ({path: leaf[:1] for path, leaf in out.items()}, {"inner": inner_state}),
            3: lambda: ({path: leaf.double() for path, leaf in out.items()}, {"inner": inner_state}),
            4: lambda: ({}, {"inner": inner_state}),
            5: lambda: ({**out, "more": torch.ones(1)}, {"inner": inner_state}),
            6: lambda: (out, {}),
            7: lambda: (out, {"mine": 1, "inner": inner_state}),
        }[self.rule]()


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        (1, ["(tree, state)", "dict"]),
        (2, ["'w'", "(2,)", "(1,)"]),
        (3, ["'w'", "float32", "float64"]),
        (4, ["'w'", "nothing"]),
        (5, ["'more'", "nothing"]),
        (6, ["inner", "missing"]),
        (7, ["mine", "stateful = True"]),
    ],
)
def test_a_transform_that_breaks_the_rules_is_shown_with_file_and_line(rule, parts):
    pattern = all_of(f"broken({rule})", *parts) + rf"[\s\S]*{lines_of(broken.update)}"
    with pytest.raises(pc.PipelineError, match=pattern):
        pc.simulate(pc.chain(broken(rule), RING), [GRADS] * 2)


@dataclass(frozen=True, repr=False)
class forgets_inner(pc.Transform):
    async def update(self, inner, tree, state, comm):
        return inner.apply(tree, state["inner"], comm)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_transform_that_forgets_await():
    with pytest.raises(
        pc.PipelineError, match=all_of("forgets_inner()", "coroutine") + rf"[\s\S]*{lines_of(forgets_inner.update)}"
    ):
        pc.simulate(pc.chain(forgets_inner(), RING), [GRADS] * 2)
    gc.collect()  # the warnings belong to this test


def test_bucketize_packs_and_unpacks_without_communication():
    tree = make("mixed", 0)
    for cap in (1, 16, 64, "25MiB"):
        buckets, undo = pc.bucketize(cap).pack(tree)
        assert all(bucket.ndim == 1 for bucket in buckets.values())
        assert oracle.same_bits(undo(buckets), tree)
        doubled = undo({name: 2 * bucket for name, bucket in buckets.items()})
        assert oracle.same_bits(doubled, pc.scale(2.0)(tree))
    with pytest.raises(ValueError, match="not the buckets"):
        undo({name: bucket[1:] for name, bucket in buckets.items()})


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [([3, 3], 4, [3, 3]), ([10], 4, [10]), ([5, 5, 5], 8, [5, 5, 5]), ([8, 1], 4, [1, 8]), ([1, 1, 1, 1], 2, [2, 2])],
)
def test_every_leaf_is_in_exactly_one_bucket(sizes, cap, expected):
    # A tensor that did not fit the remaining room was never reduced, silently (torchft).
    tree = [torch.full((size,), float(i)) for i, size in enumerate(sizes)]
    buckets, undo = pc.bucketize(4 * cap).pack(tree)
    assert sorted(bucket.numel() for bucket in buckets.values()) == sorted(expected)
    assert oracle.same_bits(undo(buckets), tree)
    mixed = [*tree, torch.ones(3, dtype=torch.float64), torch.ones(5, dtype=torch.bfloat16)]
    buckets, undo = pc.bucketize(4 * cap).pack(mixed)
    assert sum(bucket.numel() for bucket in buckets.values()) == sum(sizes) + 8
    assert oracle.same_bits(undo(buckets), mixed)
