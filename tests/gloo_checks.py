"""What `test_gloo.py` has every rank do; each check is a function of (rank, n) that raises where something is wrong."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import gossip_ranks
import local_sgd_ranks
import oracle
import torch
import torch.distributed as dist
from tables import PIPELINES, TREES, make
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ptcollect as pc


@dataclass(frozen=True)
class Check:
    """A check, the world sizes it is for, and whether ranks end in it."""

    function: Callable[[int, int], None]
    sizes: tuple[int, ...]
    fatal: bool


CHECKS: dict[str, Check] = {}
"""In the order in which a launch runs them."""


def check(*sizes: int, fatal: bool = False) -> Callable[[Callable[[int, int], None]], Callable[[int, int], None]]:
    def made(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
        CHECKS[function.__name__] = Check(function, sizes or (2, 3, 4), fatal)
        return function

    return made


SYNC = pc.chain(pc.bucketize(64), pc.compress("bf16"), pc.ring_reduce(), pc.scale(2.0))
RING = pc.ring_reduce()
SOON = 2.0  # seconds: a failure is heard of at once, not at the group's timeout; loaded machines need some


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


@contextlib.contextmanager
def raising(kind: type[Exception], *parts: str, within: float | None = None) -> Iterator[None]:
    """The block raises `kind` with every one of `parts` in its message, within so many seconds."""
    start = time.monotonic()
    try:
        yield
    except Exception as error:
        took = time.monotonic() - start
        expect(type(error) is kind, f"expected {kind.__name__}, got {type(error).__name__}: {error}")
        for part in parts:
            expect(part in str(error), f"{part!r} is not in {str(error)!r}")
        expect(within is None or took < within, f"raised after {took:.2f} s, expected within {within} s: {error}")
    else:
        raise AssertionError(f"expected {kind.__name__}, nothing was raised in {time.monotonic() - start:.2f} s")


@contextlib.contextmanager
def complaining(complaints: list[str]) -> Iterator[None]:
    """Write down what the block complains of, and go on: a rank that stops in a table leaves the others waiting."""
    try:
        yield
    except AssertionError as error:
        complaints.append(str(error))


def fresh(seconds: float = 10) -> dist.ProcessGroup:
    """A group of all ranks that no other check uses, so that what a failure leaves behind stays in its check."""
    return dist.new_group(timeout=timedelta(seconds=seconds))


def works(n: int, group: Any = None, rank: int | None = None) -> None:
    """A call on the group gives the right mean."""
    rank = dist.get_rank(group) if rank is None else rank
    got = RING({"w": torch.full((3,), 10.0**rank)}, group=group)["w"]
    right = sum(10.0**r for r in range(n)) / n
    expect(bool((got - right).abs().max() <= n * oracle.eps(torch.float32) * 10.0**n), f"{got} is not {right}")


def equal(got: Any, want: Any, what: str) -> None:
    expect(oracle.same_bits(got, want), f"{what}: got {got}, expected {want}")


def strides(tree: Any) -> list[Any]:
    return [None if leaf is None else leaf.stride() for leaf in oracle.leaves(tree)]


@functools.cache
def simulated(row: int, tree: str, n: int) -> pc.Simulation:
    return PIPELINES[row].simulate([make(tree, rank) for rank in range(n)])


def table(n: int) -> Iterator[tuple[int, str]]:
    for row, each in enumerate(PIPELINES):
        if each.ranks <= n:
            for tree in TREES:
                yield row, tree


def agrees(got: Any, row: int, tree: str, rank: int, n: int) -> None:
    """Bit-equal to the simulator; where the backend's own sum is in it, right to rounding."""
    where = f"{PIPELINES[row].id} on tree {tree!r}"
    want = simulated(row, tree, n).trees[rank]
    if "all_reduce" in PIPELINES[row].id:
        right = oracle.expected(PIPELINES[row].steps, [make(tree, each) for each in range(n)])[rank]
        expect(oracle.structure(got) == oracle.structure(want), f"{where}: another structure")
        for i, (leaf, bound) in enumerate(zip(oracle.leaves(got), right, strict=True)):
            wrong = oracle.complaint(leaf, bound) if leaf is not None and bound is not None else None
            expect(wrong is None, f"{where}, leaf {i}: {wrong}")
        if tree == "expanded":
            return  # whether elements that were summed apart still repeat is up to the backend
    else:
        equal(got, want, where)
    expect(strides(got) == strides(want), f"{where}: strides {strides(got)}, simulated {strides(want)}")


# 7 and 8: the same everywhere ---------------------------------------------------------------------------------------


@check()
def the_table_equals_the_simulator(rank: int, n: int) -> None:
    threads, rng = torch.get_num_threads(), torch.get_rng_state()
    complaints: list[str] = []
    for row, tree in table(n):
        mine = make(tree, rank)
        before = [None if leaf is None else oracle.bits(leaf) for leaf in oracle.leaves(mine)]
        with pc.traffic() as sent:
            got = PIPELINES[row].pipeline(mine, group=PIPELINES[row].group(n))
        with complaining(complaints):
            agrees(got, row, tree, rank, n)
        where = f"{PIPELINES[row].id} on tree {tree!r}"
        for count in ("bytes", "messages", "rounds", "agreement_bytes"):
            want = getattr(simulated(row, tree, n), count)[rank]
            with complaining(complaints):
                expect(getattr(sent, count) == want, f"{where}: {getattr(sent, count)} {count}, simulated {want}")
        after = [None if leaf is None else oracle.bits(leaf) for leaf in oracle.leaves(mine)]
        owners = {leaf.untyped_storage().data_ptr() for leaf in oracle.leaves(mine) if leaf is not None}
        with complaining(complaints):
            expect(before == after, f"{where}: the input changed")
            for leaf in oracle.leaves(got):
                own = leaf is None or not leaf.numel() or leaf.untyped_storage().data_ptr() not in owners
                expect(own, f"{where}: the result shares storage with the input")
    expect(not complaints, f"{len(complaints)} complaints, the first ones:\n" + "\n".join(complaints[:5]))
    expect(torch.get_num_threads() == threads, "the thread count changed")
    expect(torch.equal(torch.get_rng_state(), rng), "the RNG state changed")
    expect(torch.is_grad_enabled(), "the grad mode changed")


@check()
def donated_trees_give_the_same(rank: int, n: int) -> None:
    complaints: list[str] = []
    for row, tree in table(n):
        if tree not in ("mixed", "strided", "expanded", "complex", "integers", "narrow", "dataclass"):
            continue
        got = PIPELINES[row].pipeline(make(tree, rank), donate=True, group=PIPELINES[row].group(n))
        with complaining(complaints):
            agrees(got, row, tree, rank, n)
    expect(not complaints, f"{len(complaints)} complaints, the first ones:\n" + "\n".join(complaints[:5]))


@check()
def several_in_flight_give_the_same(rank: int, n: int) -> None:
    work = [(row, tree) for row, tree in table(n) if tree in ("mixed", "complex", "numel_7")]
    for backwards in (False, True):
        for first in range(backwards, len(work), 32):
            batch = work[first : first + 16]
            with pc.traffic() as sent:
                pending = [
                    PIPELINES[row].pipeline.start(make(tree, rank), group=PIPELINES[row].group(n))
                    for row, tree in batch
                ]
                works(n)  # a plain call takes its turn after those started
                order = list(zip(pending, batch, strict=True))
                for each, (row, tree) in reversed(order) if backwards else order:
                    got, state = each.wait()
                    expect(each.done(), "done() after wait()")
                    expect(state == {}, f"state {state}")
                    agrees(got, row, tree, rank, n)
            own = pc.simulate(RING, [{"w": torch.ones(3)}] * n).bytes[rank]
            want = own + sum(simulated(row, tree, n).bytes[rank] for row, tree in batch)
            expect(sent.bytes == want, f"{sent.bytes} bytes, simulated {want}")


@check()
def exchanges_survive_gc_pressure(rank: int, n: int) -> None:
    # Work handles that were garbage-collected hung: gloo#308.
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            gc.collect()
            time.sleep(0.001)

    gc.freeze()  # what is there already, or collections take most of the time
    thread, thresholds = threading.Thread(target=collect), gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    thread.start()
    try:
        trees = [[torch.full((50,), float(r + i)) for i in range(60)] for r in range(n)]
        for pipeline in (pc.ring_reduce(), pc.chain(pc.bucketize(400), pc.all_to_all_avg())):
            want = pc.simulate(pipeline, trees).trees[rank]
            pending = [pipeline.start(trees[rank]) for _ in range(3)]
            for each in pending:
                equal(each.wait()[0], want, repr(pipeline))
    finally:
        stop.set()
        thread.join()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@check()
def results_do_not_depend_on_timing(rank: int, n: int) -> None:
    chance = random.Random(rank)

    def dawdle(tree: Any) -> Any:
        time.sleep(chance.random() * 0.01)
        return tree

    pipeline = pc.chain(
        pc.stateless(dawdle), pc.bucketize(32), pc.ring_reduce(), pc.stateless(dawdle), pc.all_to_all_avg()
    )
    trees = [make("mixed", r) for r in range(n)]
    want = pc.simulate(pipeline, trees).trees[rank]
    for _ in range(5):
        pending = [pipeline.start(trees[rank]) for _ in range(3)]
        for each in pending:
            equal(each.wait()[0], want, "with delays")


@check()
def the_users_group_can_be_used_beside_it(rank: int, n: int) -> None:
    for _ in range(5):
        pending = SYNC.start(make("mixed", rank))
        mine = torch.tensor([float(rank)])
        dist.all_reduce(mine)
        expect(mine.item() == n * (n - 1) / 2, f"the user's all_reduce gave {mine}")
        equal(pending.wait()[0], pc.simulate(SYNC, [make("mixed", r) for r in range(n)]).trees[rank], "beside it")


@check()
def states_equal_the_simulators(rank: int, n: int) -> None:
    pipeline = pc.chain(momentum(0.5), pc.bucketize(64), pc.compress("bf16"), pc.ring_reduce(), pc.scale(2.0))
    trees = [make("one_leaf", r) for r in range(n)]
    simulation = pc.simulate(pipeline, trees)
    state = pipeline.init(trees[rank])
    for step in (1, 2, 3):
        before = state
        tree, state = pipeline.update(trees[rank], state)
        equal(tree, simulation.trees[rank], f"step {step}")
        equal(state["momentum"], simulation.states[rank]["momentum"], f"state of step {step}")
        expect(state["step"] == step, f"step {state['step']}")
        expect(before["step"] == step - 1, "the old state changed")
        simulation = pc.simulate(pipeline, trees, simulation.states)


@dataclass(frozen=True, repr=False)
class momentum(pc.Transform):
    decay: float = 0.9
    stateful = True

    def init(self, inner: pc.Pipeline, params: Any) -> Any:
        return {"m": {path: torch.zeros_like(p) for path, p in params.items()}, "inner": inner.begin(params)}

    async def update(self, inner: pc.Pipeline, tree: Any, state: Any, comm: pc.Comm) -> Any:
        m = {path: self.decay * state["m"][path] + g for path, g in tree.items()}
        out, inner_state = await inner.apply(m, state["inner"], comm)
        return out, {"m": m, "inner": inner_state}


@check()
def weights_and_missing_leaves_equal_the_simulators(rank: int, n: int) -> None:
    trees = [make("mixed", r) for r in range(n)]
    for tree in trees:
        del tree["steps"]  # integers have no weighted mean
    weights = [float(r + 1) for r in range(n)]
    want = pc.simulate(SYNC, trees, weights=weights).trees[rank]
    equal(SYNC(trees[rank], weight=weights[rank]), want, "weights")
    equal(SYNC(trees[rank], weight=weights[rank], donate=True), want, "weights, donated")
    trees = [{"w": make("numel_7", r) if r == 1 else None, "x": None, "y": make("numel_8", r)} for r in range(n)]
    equal(SYNC(trees[rank], missing="zeros"), pc.simulate(SYNC, trees, missing="zeros").trees[rank], "missing leaves")
    with raising(pc.TreeMismatchError, "'w'", "None", "rank 0", "rank 1", 'missing="zeros"'):
        SYNC(trees[rank])
    with raising(ValueError, "weight", "zero"):
        SYNC({"w": torch.ones(1)}, weight=0.0)
    works(n)


# Groups -------------------------------------------------------------------------------------------------------------


@check()
def subgroups_are_called_by_their_members_only(rank: int, n: int) -> None:
    # Members only made some, others came first: pytorch#76446.
    members = [n - 1, 0]
    group = dist.new_group(members)
    if rank in members:
        inputs = [torch.full((5,), float(r + 1)) for r in sorted(members)]
        mine = inputs[sorted(members).index(rank)]
        for pipeline in (pc.ring_reduce(), pc.gather_avg(root=1), pc.broadcast(root=1), pc.all_reduce()):
            want = pc.simulate(pipeline, inputs).trees[sorted(members).index(rank)]
            equal(pipeline(mine, group=group), want, f"{pipeline!r} on {members}")
    else:
        with raising(ValueError, "not in the group", "members only"):
            RING(torch.ones(1), group=group)
    works(n)


@check(3, 4)
def subgroups_work_whatever_groups_were_used_before(rank: int, n: int) -> None:
    pairs = [[left, left + 1] for left in range(n - 1)]
    groups = [dist.new_group(pair) for pair in pairs]
    for turn in (pairs, pairs[::-1]):
        for pair in turn:
            if rank in pair:
                works(2, groups[pairs.index(pair)], pair.index(rank))
    works(n)


@check()
def a_group_of_one_sends_nothing(rank: int, n: int) -> None:
    groups = [dist.new_group([each]) for each in range(n)]
    with pc.traffic() as sent:
        equal(SYNC({"w": torch.ones(3)}, group=groups[rank]), {"w": torch.full((3,), 2.0)}, "alone")
    expect((sent.bytes, sent.messages, sent.rounds, sent.agreement_bytes) == (0, 0, 0, 0), f"sent {sent}")


@check()
def a_mesh_with_one_dim_is_a_group(rank: int, n: int) -> None:
    trees = [make("mixed", r) for r in range(n)]
    for names in (("data",), None):
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=names)
        equal(SYNC(trees[rank], group=mesh), pc.simulate(SYNC, trees).trees[rank], f"dims {names}")
        equal(SYNC(trees[rank], group=mesh.get_group()), pc.simulate(SYNC, trees).trees[rank], f"dims {names}")
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("data",))
    named = pc.chain(pc.bucketize(), pc.ring_reduce(axis="data"))
    equal(named(trees[rank], group=mesh), pc.simulate(named, trees, axes={"data": n}).trees[rank], "by name")


@check(4)
def both_dims_of_a_mesh(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    trees = [make("mixed", r) for r in range(n)]
    for pipeline in (
        pc.ring_reduce(axis="node"),
        pc.all_to_all_avg(axis="local"),
        pc.all_gather_avg(axis="node"),
        pc.gather_avg(root=1, axis="local"),
        pc.broadcast(root=1, axis="node"),
        pc.chain(pc.bucketize(64), pc.ring_reduce(axis="local"), pc.compress("bf16"), pc.ring_reduce(axis="node")),
    ):
        simulation = pc.simulate(pipeline, trees, axes={"node": 2, "local": 2})
        with pc.traffic() as sent:
            got = pipeline(trees[rank], group=mesh)
        equal(got, simulation.trees[rank], repr(pipeline))
        expect(sent.bytes == simulation.bytes[rank], f"{sent.bytes} bytes, simulated {simulation.bytes[rank]}")
        expect(sent.agreement_bytes == simulation.agreement_bytes[rank], "agreement bytes")
    by_row = pc.all_reduce(axis="local")(torch.tensor([10.0**rank]), group=mesh)
    expect(by_row.item() == (5.5 if rank < 2 else 550.0), f"row mean {by_row}")
    with raising(pc.TreeMismatchError, "'w'", "(1,)", "(2,)", "global rank 3"):
        pc.ring_reduce(axis="local")({"w": torch.ones(2 if rank == 3 else 1)}, group=mesh)
    equal(pc.ring_reduce(axis="node")(torch.ones(2), group=mesh), torch.ones(2), "after the error")


@check(4)
def compression_between_the_parts_of_a_mesh(rank: int, n: int) -> None:
    axes = {"node": 2, "local": 2}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    stochastic, feedback = pc.codecs.int8(stochastic=True), pc.error_feedback()
    for pipeline in (
        pc.chain(feedback, pc.bucketize(64), pc.shard("local"), pc.compress("int8"), pc.ring_reduce(axis="node")),
        pc.chain(feedback, pc.compress(stochastic), pc.shard("node"), pc.all_to_all_avg(axis="local")),
        pc.chain(feedback, pc.compress("bf16"), pc.shard("local"), pc.compress("sign"), pc.ring_reduce(axis="node")),
    ):
        state, states = pipeline.init(make("mixed", rank)), None
        for step in range(3):
            trees = [make("mixed", r + n * step) for r in range(n)]
            simulation = pc.simulate(pipeline, trees, states, axes=axes)
            with pc.traffic() as sent:
                tree, state = pipeline.update(trees[rank], state, group=mesh)
            states = simulation.states
            equal(tree, simulation.trees[rank], f"{pipeline!r}, step {step}")
            equal(state["error_feedback"], states[rank]["error_feedback"], f"{pipeline!r}, state of step {step}")
            for count in ("bytes", "messages", "rounds", "agreement_bytes"):
                want = getattr(simulation, count)[rank]
                expect(getattr(sent, count) == want, f"{pipeline!r}: {getattr(sent, count)} {count}, simulated {want}")
    with raising(pc.PipelineError, "shard", "'lokal'", "'node', 'local'"):
        pc.chain(pc.shard("lokal"), pc.ring_reduce(axis="node"))(torch.ones(2), group=mesh)
    with raising(pc.PipelineError, 'shard("local")', "one dim", "init_device_mesh"):
        pc.chain(pc.shard("local"), pc.ring_reduce(axis="node"))(torch.ones(2))
    works(n)


@check(4)
def a_mesh_wants_an_axis(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    for _ in range(3):
        with raising(pc.PipelineError, "ring_reduce", "'node', 'local'", "axis='node'"):
            RING(torch.ones(1), group=mesh)
        with raising(pc.PipelineError, "ring_reduce", "'lokal'", "'node', 'local'"):
            pc.ring_reduce(axis="lokal")(torch.ones(1), group=mesh)
    equal(pc.ring_reduce(axis="node")(torch.ones(2), group=mesh), torch.ones(2), "after the errors")


# Agreement ----------------------------------------------------------------------------------------------------------


@check()
def agreement_happens_as_often_as_asked(rank: int, n: int) -> None:
    tree = {"w": torch.full((4,), float(rank))}
    pipeline = pc.chain(pc.ring_reduce(), pc.scale(3.0))
    want = pc.simulate(pipeline, [{"w": torch.full((4,), float(r))} for r in range(n)]).trees[rank]

    group = fresh()

    def agreed(**options: Any) -> bool:
        with pc.traffic() as sent:
            equal(pipeline(tree, group=group, **options), want, f"{options}")
        return sent.agreement_bytes > 0

    expect([agreed(check="first") for _ in range(3)] == [True, False, False], 'check="first"')
    expect([agreed(check="off") for _ in range(2)] == [False, False], 'check="off"')
    expect([agreed() for _ in range(2)] == [True, True], "by default")


@check()
def mismatches_are_told_to_all_ranks_and_harm_nothing(rank: int, n: int) -> None:
    group, last = fresh(), n - 1
    odd = rank == last
    told = ("rank 0", f"rank {last}")

    def tree(w: Tensor, **more: Tensor) -> dict[str, Any]:
        return {"a": torch.ones(2), "b": {"w": w}, **more}

    for pipeline in (RING, SYNC, pc.all_gather_avg(), pc.gather_avg(), pc.broadcast()):
        for one, other, shown in (
            (torch.ones(100), torch.ones(200), ("(100,)", "(200,)")),
            (torch.ones(5), torch.ones(3), ("(5,)", "(3,)")),
            (torch.ones(2, 3), torch.ones(3, 2), ("(2, 3)", "(3, 2)")),
            (torch.ones(3), torch.ones(3).double(), ("float32", "float64")),
        ):
            with raising(pc.TreeMismatchError, "'b.w'", *told, *shown, within=2):
                pipeline(tree(other if odd else one), group=group)
        works(n, group)
    with raising(pc.TreeMismatchError, "'extra'", *told, "no such leaf", "(7,)"):
        RING(tree(torch.ones(1), **({"extra": torch.ones(7)} if odd else {})), group=group)
    with raising(pc.TreeMismatchError, "different pipelines", *told, repr(RING), repr(SYNC)):
        (SYNC if odd else RING)(tree(torch.ones(1)), group=group)
    with raising(pc.TreeMismatchError, "different pipelines", *told, "ring_reduce()", 'ring_reduce(op="sum")'):
        pc.ring_reduce(op="sum" if odd else "mean")(tree(torch.ones(1)), group=group)
    with raising(pc.TreeMismatchError, "missing", *told, "zeros", "error"):
        RING(tree(torch.ones(1)), missing="zeros" if odd else "error", group=group)
    with raising(pc.TreeMismatchError, "weight", *told):
        RING(tree(torch.ones(1)), weight=1.0 if odd else None, group=group)
    with raising(pc.TreeMismatchError, "check", *told, "first", "every_step"):
        RING(tree(torch.ones(1)), check="first" if odd else "every_step", group=group)
    expect(RING(tree(torch.ones(1)), donate=odd, group=group)["a"].tolist() == [1.0, 1.0], "donate may differ")
    swapped = {"b": torch.ones(1), "a": torch.ones(2)} if odd else {"a": torch.ones(2), "b": torch.ones(1)}
    expect(RING(swapped, group=group)["a"].tolist() == [1.0, 1.0], "keys in another order")
    pending = RING.start(tree(torch.ones(5 if odd else 3)), group=group)
    with raising(pc.TreeMismatchError, "'b.w'", *told, "(5,)", "(3,)"):
        pending.wait()
    works(n, group)


@check()
def a_mismatch_at_step_3_is_an_error_at_step_3(rank: int, n: int) -> None:
    # It corrupted the next collective: pytorch#174844.
    group = fresh()
    pipeline = pc.chain(momentum(), pc.ring_reduce())
    state = pipeline.init({"w": torch.ones(3)})
    for _ in range(3):
        tree, state = pipeline.update({"w": torch.ones(3)}, state, group=group)
    with raising(pc.TreeMismatchError, "'w'", "(3,)", "(4,)"):
        pipeline.update({"w": torch.ones(4 if rank == 0 else 3)}, state, group=group)
    tree, state = pipeline.update({"w": torch.ones(3)}, state, group=group)
    expect(state["step"] == 4, f"step {state['step']}")
    expect(bool(tree["w"].isfinite().all()), f"{tree}")
    with raising(pc.TreeMismatchError, "different steps", "rank 0 has 4", "rank 1 has 5"):
        pipeline.update({"w": torch.ones(3)}, {**state, "step": 4 if rank != 1 else 5}, group=group)
    works(n, group)


@check()
def a_dtype_without_a_mean_is_an_error_before_traffic(rank: int, n: int) -> None:
    group, complaints = fresh(), list[str]()
    for pipeline in (RING, SYNC, pc.all_reduce(), pc.gather_avg(), pc.broadcast()):
        with complaining(complaints):
            with pc.traffic() as sent, raising(pc.PipelineError, "'flags'", "torch.bool"):
                pipeline({"flags": torch.ones(2).bool(), "w": torch.ones(20)}, group=group)
            expect(sent.bytes == 0, f"{pipeline!r} sent {sent.bytes} bytes")
    expect(not complaints, "\n".join(complaints))
    works(n, group)


# Failures -----------------------------------------------------------------------------------------------------------


@check()
def a_leaf_that_is_no_tensor_on_one_rank(rank: int, n: int) -> None:
    group = fresh()
    for kind, leaf, word in ((TypeError, 1.0, "float"), (TypeError, torch.ones(2).to_sparse(), "sparse")):
        if rank == 1:
            with raising(kind, "'w'", word, within=SOON):
                RING({"w": leaf}, group=group)
        else:
            with raising(pc.PeerLostError, "rank 1", "'w'", word, within=SOON):
                RING({"w": torch.ones(2)}, group=group)
        works(n, group)


@check()
def an_error_that_every_rank_makes_by_itself_harms_nothing(rank: int, n: int) -> None:
    # Ranks are not equally fast: one drops its connections while another still agrees or connects.
    group = fresh(5)
    for turn in range(12):
        with raising(pc.PipelineError, "'flags'"):
            RING({"flags": torch.ones(2).bool()}, group=group)
        with raising(ValueError, "root=9", "0 to"):
            pc.broadcast(root=9)({"w": torch.ones(2)}, group=group)
        if turn % 3 == 0:
            works(n, group)


@check()
def a_rank_that_raises_ends_the_call_on_all(rank: int, n: int) -> None:
    # The others would wait for the group's timeout.
    group = fresh()
    for culprit in range(n):

        def fails(tree: Any, culprit: int = culprit) -> Any:
            if dist.get_rank() == culprit:
                raise ZeroDivisionError(f"rank {culprit} cannot")
            return tree

        fail = pc.stateless(fails)
        pipelines = [
            pc.chain(fail, pc.ring_reduce()),
            pc.chain(fail, pc.bucketize(8), pc.all_to_all_avg()),
            pc.chain(pc.ring_reduce(), fail, pc.all_gather_avg()),
            pc.chain(fail, pc.all_reduce()),
            pc.chain(pc.all_reduce(), fail, pc.all_reduce()),
        ]
        for pipeline in pipelines:
            for started in (False, True):
                tree = [torch.ones(5) * i for i in range(4)]
                call = (lambda p, t: p.start(t, group=group).wait()) if started else (lambda p, t: p(t, group=group))
                if rank == culprit:
                    with raising(ZeroDivisionError, f"rank {culprit} cannot", within=SOON):
                        call(pipeline, tree)
                else:
                    with raising(pc.PeerLostError, f"rank {culprit}", "ZeroDivisionError", "cannot", within=SOON):
                        call(pipeline, tree)
                works(n, group)


@pc.reducer
async def stumbles(x: Tensor, comm: pc.Comm, *, culprit: int = 0) -> Tensor:
    """Passes x round, and fails on one rank between the rounds."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for hop in range(4):
        if hop == 2 and comm.rank == culprit:
            raise KeyError("stumbled")
        await comm.exchange(send={right: comm.encode(x)}, recv={left: x.numel()})
    return x


@check()
def a_reducer_that_raises_between_rounds(rank: int, n: int) -> None:
    group = fresh()
    for culprit in (0, n - 1):
        tree = {name: torch.ones(1000) for name in "abcdefgh"}
        if rank == culprit:
            with raising(KeyError, "stumbled", within=SOON):
                stumbles(culprit)(tree, group=group)
        else:
            with raising(pc.PeerLostError, f"rank {culprit}", "KeyError", within=SOON):
                stumbles(culprit)(tree, group=group)
        works(n, group)


@check()
def calls_in_flight_when_one_fails(rank: int, n: int) -> None:
    def fails(tree: Any) -> Any:
        if dist.get_rank() == 0:
            raise ZeroDivisionError("cannot")
        return tree

    group = fresh()
    bad = pc.chain(pc.stateless(fails), RING)
    for _ in range(3):
        pending = [each.start([torch.full((4,), 2.0)], group=group) for each in (RING, bad, RING)]
        equal(pending[0].wait()[0], [torch.full((4,), 2.0)], "before")
        with raising(ZeroDivisionError if rank == 0 else pc.PeerLostError, "cannot", within=2):
            pending[1].wait()
        equal(pending[2].wait()[0], [torch.full((4,), 2.0)], "after")


@check()
def a_failure_after_others_had_finished_is_told_at_the_next_call(rank: int, n: int) -> None:
    def fails(tree: Any) -> Any:
        if dist.get_rank() == 0:
            raise ZeroDivisionError("too late")
        return tree

    group = fresh()
    pipeline = pc.chain(pc.gather_avg(), pc.stateless(fails))  # the others are done when they have sent
    for _ in range(3):
        heard = False
        try:
            pipeline([torch.ones(1)], group=group)
        except ZeroDivisionError:
            heard = True
        except pc.PeerLostError as error:
            heard = True
            expect("too late" in str(error), str(error))
        # Every rank hears of it at the next call, unless every rank did before.
        everyone: list[Any] = [None] * n
        dist.all_gather_object(everyone, heard)
        if all(everyone):
            works(n, group)
        else:
            with raising(pc.PeerLostError, "the previous call failed on rank", within=2):
                RING([torch.ones(1)], group=group)
        works(n, group)


@check(2, 3)
def a_first_call_that_one_rank_makes_alone(rank: int, n: int) -> None:
    group = fresh(2)
    if rank == 0:
        with raising(pc.PeerLostError, "rank 0", "did every rank make this call?", within=4):
            RING([torch.ones(1)], group=group)
    dist.barrier()
    works(n, group)


@check(2, 4)
def a_silent_peer_is_named_after_the_groups_timeout(rank: int, n: int) -> None:
    # The group's timeout was ignored: pytorch#165422.
    group, sleeper = fresh(2), n - 1
    works(n, group)
    if rank == sleeper:
        time.sleep(3)
        with raising(pc.PeerLostError, within=3):
            RING({"w": torch.ones(4)}, group=group)
    else:
        start = time.monotonic()
        with raising(pc.PeerLostError, f"rank {sleeper}", "round ", within=3.5):
            RING({"w": torch.ones(4)}, group=group)
        expect(time.monotonic() - start > 1.5, f"gave up after {time.monotonic() - start:.2f} s")
    dist.barrier()
    works(n, group)


@check(3)
def a_peer_that_falls_silent_in_a_call_is_named_with_round_and_leaf(rank: int, n: int) -> None:
    def sleeps(tree: Any) -> Any:
        if dist.get_rank() == n - 1:
            time.sleep(3)
        return tree

    group = fresh(2)
    works(n, group)
    # Between two reducers: before the first one a rank that sleeps has not agreed yet, and there is no leaf to name.
    pipeline = pc.chain(pc.ring_reduce(), pc.stateless(sleeps), pc.all_to_all_avg())
    if rank == n - 1:
        with raising(pc.PeerLostError, within=6):
            pipeline({"b": {"w": torch.ones(8)}}, group=group)
    else:
        with raising(pc.PeerLostError, f"rank {n - 1}", "round ", "'b.w'", "all_to_all_avg", within=3.5):
            pipeline({"b": {"w": torch.ones(8)}}, group=group)
    dist.barrier()
    works(n, group)  # on a new private group


# What goes over the wire --------------------------------------------------------------------------------------------


@check()
def batches_pair_up(rank: int, n: int) -> None:
    # Batch order differed between ranks: pytorch#161324.
    from ptcollect import transfers

    batches: list[list[tuple[str, int, int, int]]] = []
    gloo, post = dist.ProcessGroupGloo, transfers.Transfer.post
    send, receive = gloo.send, gloo.recv

    def recorded(transfer: Any) -> None:
        batches.append([])
        post(transfer)

    def sent(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        batches[-1].append(("send", peer, tag, tensors[0].nbytes))
        return send(self, tensors, peer, tag)

    def received(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        batches[-1].append(("recv", peer, tag, tensors[0].nbytes))
        return receive(self, tensors, peer, tag)

    transfers.Transfer.post, gloo.send, gloo.recv = recorded, sent, received
    try:
        records = []
        for _ in range(2):
            for row, tree in table(n):
                if tree in ("mixed", "numel_1", "integers") and not PIPELINES[row].mesh:  # peers by their number
                    time.sleep(0.002 * random.Random(rank).random())
                    PIPELINES[row].pipeline(make(tree, rank))
            records.append(batches)
            batches = []
    finally:
        transfers.Transfer.post, gloo.send, gloo.recv = post, send, receive
    expect(records[0] == records[1], "the order of operations depends on timing")
    expect(len(records[0]) > 500, f"only {len(records[0])} batches were recorded")
    for batch in records[0]:
        for kind in ("send", "recv"):
            peers = [peer for what, peer, _, _ in batch if what == kind]
            expect(len(peers) == len(set(peers)), f"two {kind}s with one peer in one batch: {batch}")
        expect(all(size > 0 for *_, size in batch), f"an empty transfer in {batch}")
        expect(all(peer != rank for _, peer, _, _ in batch), f"a transfer to itself in {batch}")
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, [operation for batch in records[0] for operation in batch])
    for peer in range(n):
        tags = {tag for operation in everyone[peer] for tag in operation[2:3]}
        for tag in tags | {operation[2] for operation in everyone[rank]}:
            mine = [size for kind, to, t, size in everyone[rank] if (kind, to, t) == ("send", peer, tag)]
            theirs = [size for kind, source, t, size in everyone[peer] if (kind, source, t) == ("recv", rank, tag)]
            expect(
                mine == theirs, f"rank {rank} sends {mine[:9]} to rank {peer} on tag {tag}, which expects {theirs[:9]}"
            )


@check(4)
def slices_of_a_mesh_beside_the_mesh(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    inputs = [torch.full((3,), 10.0**r) for r in range(n)]
    for axis in ("node", "local"):
        want = pc.simulate(pc.ring_reduce(axis=axis), inputs, axes={"node": 2, "local": 2}).trees[rank]
        for _ in range(2):
            equal(pc.ring_reduce(axis=axis)(inputs[rank], group=mesh), want, f"axis={axis!r}")
            equal(RING(inputs[rank], group=mesh[axis]), want, f"mesh[{axis!r}]")
            equal(RING(inputs[rank], group=mesh.get_group(axis)), want, f"mesh.get_group({axis!r})")


@check()
def native_mismatches_are_told_to_all_ranks(rank: int, n: int) -> None:
    # gloo's own all_reduce aborts the process where sizes differ.
    group = fresh()
    for pipeline in (pc.all_reduce(), pc.chain(pc.bucketize(), pc.compress("bf16"), pc.all_reduce())):
        for one, other in ((100, 200), (5, 3)):
            with raising(pc.TreeMismatchError, "'w'", "rank 0", f"rank {n - 1}", f"({one},)", f"({other},)", within=2):
                pipeline({"w": torch.ones(other if rank == n - 1 else one)}, group=group)
            works(n, group)


# Ends ---------------------------------------------------------------------------------------------------------------


@check()
def a_group_can_be_destroyed_and_made_again(rank: int, n: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for turn in range(2):
        dist.destroy_process_group()
        with raising(pc.PipelineError, "init_process_group"):
            RING([torch.ones(1)])
        again = dist.PrefixStore(f"again{turn}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=n, timeout=timedelta(seconds=20))
        works(n)
        equal(SYNC([torch.ones(4)]), [torch.full((4,), 2.0)], "again")


check()(gossip_ranks.every_topology_equals_the_simulator)
check(3)(gossip_ranks.parameters_are_gossiped_in_place)
check()(local_sgd_ranks.averaging_equals_the_simulator)
check(3)(local_sgd_ranks.quiet_steps_wait_for_nobody_and_ranks_out_of_step_are_told)


@check(3, fatal=True)
def a_rank_that_dies_before_its_call(rank: int, n: int) -> None:
    used, unused = fresh(3), fresh(3)
    works(n, used)
    if rank == 1:
        os._exit(0)
    with raising(pc.PeerLostError, within=2):
        RING({"w": torch.ones(4)}, group=used)
    with raising(pc.PeerLostError, "rank", within=6):
        RING({"w": torch.ones(4)}, group=unused)


@check(4, fatal=True)
def a_rank_that_is_killed_in_its_call(rank: int, n: int) -> None:
    def killed(tree: Any) -> Any:
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return tree

    group = fresh()
    works(n, group)
    with raising(pc.PeerLostError, "rank", within=2):
        pc.chain(pc.stateless(killed), pc.ring_reduce())({"w": torch.ones(4)}, group=group)


@check(2, fatal=True)
def a_rank_that_leaves_right_after_its_call(rank: int, n: int) -> None:
    # The peer saw "Connection closed": pytorch#75512.
    tree = {"w": torch.full((500_000,), float(rank))}
    pipeline = pc.gather_avg(root=1)
    if rank == 0:
        pipeline(tree)
        return  # and exit
    got = pipeline(tree)
    expect(bool((got["w"] == 0.5).all()), f"{got}")
