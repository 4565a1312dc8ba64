"""`plan`: bytes, messages and rounds are those of `simulate`; times are those that paper and pencil give."""

from __future__ import annotations

import json
import math

import pytest
import tables
import torch
from typer.testing import CliRunner

import ptcollect as pc
from ptcollect import shapes
from ptcollect.commands import candidates
from ptcollect.commands.arguments import SHORT_NAMES

MILLI = pc.Link("1gbit", latency="1ms")
EF, BUCKETS, RING = pc.error_feedback(), pc.bucketize(), pc.ring_reduce()
STAGES = (  # what the table of lossless rows has not
    pc.chain(EF, BUCKETS, pc.compress("int8"), RING),
    pc.chain(EF, pc.bucketize(64), pc.compress("topk"), pc.all_gather_avg()),
    pc.chain(EF, pc.compress("sign"), pc.all_to_all_avg()),
    pc.chain(EF, pc.low_rank(1), BUCKETS, pc.compress("int4"), RING),
    pc.chain(pc.skip_nonfinite(), EF, pc.low_rank(2), pc.all_to_all_avg()),
    pc.chain(pc.clip_by_global_norm(1.0), BUCKETS, pc.compress(pc.codecs.ternary()), RING, pc.scale(2.0)),
    pc.partition({"*w": pc.chain(EF, pc.compress("randk"), pc.all_gather_avg()), "*": pc.all_reduce()}),
    pc.piecewise({0: RING, 5: pc.chain(EF, pc.compress("fp8"), RING)}),
)
TREES = ("mixed", "strided", "complex", "integers", "narrow", "empties", "bare_scalar", "all_missing")
ROTATING = (RING, pc.all_reduce(), pc.all_to_all_avg(), pc.all_gather_avg(), *STAGES[:4])


def counts(run):
    return run.bytes, run.messages, run.rounds, run.agreement_bytes


def tree_of(numbers: int) -> dict[str, torch.Tensor]:
    """Two matrices and some vectors, of about so many numbers in all."""
    return {
        "a.w": torch.ones(24, 16),
        "b.w": torch.ones(8, 32),
        **{f"v{i}": torch.ones(numbers // 3 + i) for i in range(3)},
    }


# Counts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", tables.PIPELINES, ids=lambda row: row.id)
def test_counts_are_those_of_simulate_for_every_pipeline_and_tree(row):
    for n in (3,) if row.mesh is None else (8,):
        world = row.mesh(n) if row.mesh else n
        for name in TREES:
            trees = tables.trees(name, n)
            run = row.simulate(trees)
            assert counts(pc.plan(row.pipeline, trees[0], world=world, link=MILLI, every_rank=True)) == counts(run), (
                name
            )


@pytest.mark.parametrize("pipeline", STAGES, ids=repr)
def test_counts_are_those_of_simulate_for_stages_with_state(pipeline):
    for n, step in ((2, 0), (5, 9), (8, 3)):
        trees = [tree_of(301)] * n
        states = [{**pipeline.init(trees[0]), **({"step": step} if pipeline.stateful else {})}] * n
        run = pc.simulate(pipeline, trees, states)
        for every_rank in (True, None):
            planned = pc.plan(pipeline, trees[0], world=n, link=MILLI, step=step, every_rank=every_rank)
            assert counts(planned) == counts(run)


def test_counts_by_hand():
    # 10 numbers on 4 ranks are chunks of 3, 3, 2, 2; rank r sends all but chunk r+1, then all but chunk r+2.
    cost = pc.plan(RING, {"w": (10,)}, world=4, link=MILLI, check="off")
    assert cost.bytes == [4 * (20 - 3 - 2), 4 * (20 - 2 - 2), 4 * (20 - 2 - 3), 4 * (20 - 3 - 3)]
    assert cost.messages == cost.rounds == [6] * 4
    assert pc.plan(RING, {"w": (2,)}, world=4, link=MILLI).messages == [3, 4, 3, 2]  # two chunks are empty


@pytest.mark.parametrize("pipeline", ROTATING, ids=repr)
def test_one_rank_stands_for_all(pipeline):
    to_all = any("all_to_all" in repr(stage) or "all_gather" in repr(stage) for stage in pipeline.walk())
    for n, numbers in ((2, 3), (7, 3), (7, 499), (12 if to_all else 33, 499)):
        tree = tree_of(numbers)
        all_ranks, one = (pc.plan(pipeline, tree, world=n, link=MILLI, every_rank=every) for every in (True, False))
        assert counts(one) == counts(all_ranks)
        # One number more per message, where n does not divide; an empty chunk counts as one number. And where all send
        # to all the ports of every rank are busy all the time, which not every order of messages allows.
        assert one.seconds == pytest.approx(all_ranks.seconds, rel=0.1 if numbers > 100 else 0.5)
        assert sum(one.stages.values()) == pytest.approx(one.seconds)
        assert sum(all_ranks.stages.values()) == pytest.approx(all_ranks.seconds)


@pytest.mark.parametrize("n", [4, 8, 16])
@pytest.mark.parametrize(
    "pipeline", [*ROTATING[:2], STAGES[0], pc.chain(pc.bucketize("20KB"), pc.all_reduce())], ids=repr
)
def test_where_ranks_are_alike_one_takes_exactly_as_long_as_all(pipeline, n):
    tree = {f"w{i}": (32, 16 * (i + 1)) for i in range(9)}
    speed = {"int8": (1e8, 2e8), "copy": 1e9, "float32": (1e15, 5e8)}
    for link in (MILLI, pc.Link(1e6, 0.0, 2e-3), pc.Link(1e9, 0.1)):
        arguments = {"world": n, "link": link, "codec_speed": speed}
        times = [pc.plan(pipeline, tree, **arguments, every_rank=every).seconds for every in (True, False)]
        assert times[1] == pytest.approx(times[0], rel=1e-9)


@pytest.mark.parametrize("shape", [{"node": 4, "local": 2}, {"node": 3, "local": 3}, {"node": 2, "local": 5}])
def test_one_rank_of_each_kind_on_a_mesh(shape):
    link = pc.two_level(pc.Link("10gbit", 1e-5), pc.Link("100mbit", 1e-3), ranks_per_node=shape["local"])
    for pipeline in (
        pc.chain(BUCKETS, pc.shard("local"), pc.ring_reduce(axis="node")),
        pc.chain(EF, pc.bucketize("4KB"), pc.shard("local"), pc.compress("int8"), pc.ring_reduce(axis="node")),
        pc.chain(BUCKETS, pc.shard("node"), pc.all_to_all_avg(axis="local")),
        pc.chain(pc.ring_reduce(axis="local"), pc.ring_reduce(axis="node")),
    ):
        tree = tree_of(4999)
        planned = [pc.plan(pipeline, tree, world=shape, link=link, every_rank=every) for every in (True, False)]
        n = math.prod(shape.values())
        states = [pipeline.init(tree)] * n
        assert counts(planned[0]) == counts(planned[1]) == counts(pc.simulate(pipeline, [tree] * n, states, axes=shape))
        assert planned[1].seconds == pytest.approx(planned[0].seconds, rel=0.15)


# Time ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every_rank", [True, False])
@pytest.mark.parametrize(("p", "seconds"), [(2, 0.083906), (4, 0.125889), (8, 0.146941), (16, 0.157586)])
def test_a_ring_takes_as_long_as_its_formula_says(p, seconds, every_rank):
    link = pc.Link(1.25e9, latency=1e-5)
    cost = pc.plan(RING, {"w": (100 << 18,)}, world=p, link=link, check="off", every_rank=every_rank)
    assert cost.seconds == pytest.approx(seconds, abs=5e-7)
    native = pc.plan(pc.all_reduce(), {"w": (100 << 18,)}, world=p, link=link, check="off", every_rank=every_rank)
    assert native.seconds == pytest.approx(seconds, abs=5e-7)


@pytest.mark.parametrize(
    ("pipeline", "messages", "latencies"),
    [
        (pc.all_gather_avg(), 5, 1),  # everybody sends and receives five
        (pc.gather_avg(), 5, 1),  # all into one port
        (pc.broadcast(), 3, 2),  # the root sends three, one after the other; the farthest ranks are two hops away
        (pc.all_to_all_avg(), 2 * 5 / 6, 2),
    ],
    ids=repr,
)
def test_other_reducers_by_hand(pipeline, messages, latencies):
    size, overhead = 6 * 1000, 1e-4
    tree = {"w": (size // 4,)}
    cost = pc.plan(pipeline, tree, world=6, link=pc.Link(1e6, latency=0.5), check="off")
    assert cost.seconds == pytest.approx(messages * size / 1e6 + latencies * 0.5)
    cost = pc.plan(pc.gather_avg(), tree, world=6, link=pc.Link(math.inf, 0.5, overhead), check="off")
    assert cost.seconds == pytest.approx(0.5 + 5 * overhead)


def test_agreement_is_part_of_the_time_and_told_apart():
    cost = pc.plan(RING, {"w": (4,)}, world=8, link=pc.Link(math.inf, 1.0))
    assert cost.stages == {"agreement": 3.0, "ring_reduce": 14.0}
    assert cost.seconds == 17.0


@pytest.mark.parametrize(("leaves", "turns"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_four_leaves_are_in_flight_at_a_time(leaves, turns):
    tree = {str(i): (4,) for i in range(leaves)}
    cost = pc.plan(RING, tree, world=2, link=pc.Link(math.inf, 1.0), check="off")
    assert cost.seconds == 2.0 * turns


def test_work_takes_time_between_messages():
    # Rank r encodes its half; adds what came; encodes the mean of its chunk and decodes it for itself; the other's
    # comes, and is decoded. 500 numbers each time.
    sync = pc.chain(pc.compress("bf16"), RING)
    speed = {"bf16": (1e3, 2e3)}
    cost = pc.plan(sync, {"w": (1000,)}, world=2, link=pc.Link(1e3, 0.0), codec_speed=speed, check="off")
    assert cost.stages == pytest.approx({"encode bf16()": 1.0, "decode bf16()": 0.75, "ring_reduce": 2.0})
    assert cost.seconds == pytest.approx(3.75)
    exact = pc.plan(sync, {"w": (1000,)}, world=2, link=pc.Link(1e3, 0.0), codec_speed={"int8": 1.0}, check="off")
    assert exact.seconds == pytest.approx(2.0)


def test_ranks_of_a_node_share_its_uplink():
    sharded = pc.chain(pc.shard("local"), pc.ring_reduce(axis="node"))
    for shared, between in ((True, 4.0), (False, 2.0)):
        link = pc.two_level(pc.Link(math.inf), pc.Link(1e3), ranks_per_node=2, shared_uplink=shared)
        # 4000 bytes: each of a node's two ranks sends half of its half in each of two rounds.
        for every_rank in (True, False):
            cost = pc.plan(
                sharded, {"w": (1000,)}, world={"node": 2, "local": 2}, link=link, check="off", every_rank=every_rank
            )
            assert cost.seconds == pytest.approx(between * 1.0, rel=0.01)


def test_a_slow_pair_holds_up_a_ring():
    fast = [[1e6] * 4 for _ in range(4)]
    fast[2][3] = 1e3
    ring = pc.plan(RING, {"w": (1000,)}, world=4, link=pc.Link(fast), check="off")
    assert ring.seconds == pytest.approx(6 * 1.0, rel=0.01)  # a chunk of 1000 bytes in each round
    assert pc.plan(pc.gather_avg(), {"w": (1000,)}, world=4, link=pc.Link(fast), check="off").seconds < 0.1


def test_simulate_with_a_link_gives_the_same_bits_and_the_planned_time():
    sync = STAGES[0]
    trees = [{"w": torch.randn(1000, generator=torch.Generator().manual_seed(r))} for r in range(5)]
    plain, timed = pc.simulate(sync, trees), pc.simulate(sync, trees, link=MILLI)
    assert all(torch.equal(a["w"], b["w"]) for a, b in zip(plain.trees, timed.trees, strict=True))
    assert counts(plain) == counts(timed)
    assert max(timed.seconds) == pc.plan(sync, trees[0], world=5, link=MILLI).seconds
    assert plain.seconds is plain.timeline is None


def test_a_deadlock_is_found_by_the_clock_too():
    @pc.reducer
    async def one_sided(x, comm):
        await comm.exchange(send={}, recv={1 - comm.rank: x.numel()})
        return x

    with pytest.raises(pc.PipelineError, match=r"deadlock.*\n.*rank 0 waits for rank 1"):
        pc.simulate(one_sided(), [torch.ones(2)] * 2, link=MILLI)


# Large worlds -------------------------------------------------------------------------------------------------------


def test_four_thousand_ranks_and_a_billion_parameters():
    link = pc.two_level(pc.Link("100gbit", 1e-5), pc.Link("10gbit", 1e-4), ranks_per_node=8)
    hierarchical = pc.chain(BUCKETS, pc.shard("local"), pc.ring_reduce(axis="node"))
    cost = pc.plan(hierarchical, "1B", world={"node": 512, "local": 8}, link=link)
    # Each rank sends 7/8 of it twice in its node, and of its eighth what a ring of 512 does.
    share = 4e9 * (2 * 7 / 8 + 2 * 511 / 512 / 8)
    assert cost.bytes == pytest.approx([share] * 4096, rel=1e-5)
    assert len(set(cost.messages)) == 1
    # An uplink carries what its eight ranks send between nodes.
    assert cost.seconds == pytest.approx(4e9 * 2 * 511 / 512 / 1.25e9, rel=0.25)


def test_a_reducer_of_the_users_is_planned_too():
    @pc.reducer
    async def with_opposite(x, comm):
        peer = (comm.rank + comm.size // 2) % comm.size
        received = await comm.exchange(send={peer: comm.encode(x)}, recv={peer: x.numel()})
        return (x + comm.decode(received[peer])) / 2

    @pc.reducer
    async def looks(x, comm):
        return x if float(x.sum()) > 0 else -x

    @pc.reducer
    async def down_the_line(x, comm):
        if comm.rank:
            received = await comm.exchange(send={}, recv={comm.rank - 1: x.numel()})
            x = comm.decode(received[comm.rank - 1])
        if comm.rank + 1 < comm.size:
            await comm.exchange(send={comm.rank + 1: comm.encode(x)}, recv={})
        return x

    link = pc.Link(4e3, 1.0)
    for every_rank in (True, False):
        cost = pc.plan(with_opposite(), {"w": (1000,)}, world=4, link=link, check="off", every_rank=every_rank)
        assert (cost.seconds, cost.bytes) == (2.0, [4000] * 4)
    line = pc.plan(down_the_line(), {"w": (1000,)}, world=5, link=link, check="off")
    assert (line.seconds, line.bytes, line.messages) == (8.0, [4000] * 4 + [0], [1, 1, 1, 1, 0])
    with pytest.raises(pc.PipelineError, match=r"looks\(\) looks at values, and a plan has none"):
        pc.plan(looks(), {"w": (10,)}, world=2, link=link)
    with pytest.raises(pc.PipelineError, match=r"down_the_line\(\) does something else on every rank.*smaller world"):
        pc.plan(down_the_line(), {"w": (10,)}, world=5, link=link, every_rank=False)


# What it is given ---------------------------------------------------------------------------------------------------


def test_parameters_in_every_form():
    module = torch.nn.Linear(3, 5)
    forms = (module, {"w": (5, 3), "b": torch.Size([5])}, [torch.zeros(5, 3), torch.zeros(5, device="meta")])
    for params in forms:
        assert sum(pc.plan(RING, params, world=2, link=MILLI).bytes) == 2 * 20 * 4
    for text in ("1K", "999999", "1M", "7.5M", "124M", "1B", "70B"):
        sizes = shapes.of_size(text).values()
        assert sum(math.prod(size) for size in sizes) == shapes.count(text)
    with pytest.raises(ValueError, match='such as 124_000_000, "124M" or "1B", got \'12 many\''):
        pc.plan(RING, "12 many", world=2, link=MILLI)
    with pytest.raises(TypeError, match=r"expected tensors or shapes such as \(768, 768\), got str"):
        pc.plan(RING, {"w": "big"}, world=2, link=MILLI)


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [("1gbit", 1.25e8), ("200mbit", 2.5e7), ("0.5 Gbit/s", 6.25e7), ("100kbps", 12500.0), (7.0, 7.0)],
)
def test_bandwidths(text, bandwidth):
    assert pc.Link(text).bandwidth == bandwidth


def test_links_say_what_is_wrong():
    for wrong in ("fast", "20ms", 0, -1.0, True, None):
        with pytest.raises(ValueError, match=r'bandwidth.*such as "1gbit", got'):
            pc.Link(wrong)
    for wrong in ("1gbit", -1, "later"):
        with pytest.raises(ValueError, match=r'latency.*such as "20ms", got'):
            pc.Link(1.0, wrong)
    with pytest.raises(ValueError, match=r"square matrix, got rows of \[2, 3\]"):
        pc.Link([[1, 1], [1, 1, 1]])
    with pytest.raises(ValueError, match="the matrix is for 2 ranks, and there are 3"):
        pc.plan(RING, {"w": (3,)}, world=3, link=pc.Link([[1, 1], [1, 1]]))
    with pytest.raises(ValueError, match="3 ranks do not fill nodes of 2"):
        pc.plan(RING, {"w": (3,)}, world=3, link=pc.two_level(MILLI, MILLI, 2))
    with pytest.raises(ValueError, match=r"ranks_per_node.*got 0"):
        pc.two_level(MILLI, MILLI, 0)
    with pytest.raises(ValueError, match=r"plan\(world\).*got 0"):
        pc.plan(RING, {"w": (3,)}, world=0, link=MILLI)
    with pytest.raises(ValueError, match="unknown codec 'int88'"):
        pc.plan(RING, {"w": (3,)}, world=2, link=MILLI, codec_speed={"int88": 1.0})
    with pytest.raises(ValueError, match=r"int8.*numbers encoded per second"):
        pc.plan(RING, {"w": (3,)}, world=2, link=MILLI, codec_speed={"int8": 0})
    with pytest.raises(ValueError, match="pass link=Link"):
        pc.simulate(RING, [torch.ones(1)] * 2, codec_speed={"int8": 1.0})


def test_links_are_kept_as_json(tmp_path):
    path = tmp_path / "link.json"
    matrix = pc.Link([[1.0, 2.0], [3.0, 4.0]], latency=[[0, "1ms"], ["2ms", 0]])
    for link in (MILLI, matrix, pc.two_level(pc.Link(5.0), MILLI, 2, shared_uplink=False)):
        link.save(path)
        assert pc.Link.load(path) == link
    path.write_text(json.dumps({"bandwidth": 1e6, "latency": 0.1, "measured_by": "somebody"}))
    assert pc.Link.load(path) == pc.Link(1e6, 0.1)
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r'link.json: expected {"bandwidth": bytes per second.*got \[1\]'):
        pc.Link.load(path)


def test_speeds_are_read_from_the_benchmark(tmp_path):
    path = tmp_path / "speed.json"
    rows = [("int8", "encode", 4e-6), ("int8", "decode", 8e-6), ("none", "a new row of zeros", 1.0)]
    keys = ("codec", "operation", "gigabytes_per_second")
    path.write_text(json.dumps({"rows": [dict(zip(keys, row, strict=True)) for row in rows]}))
    sync = pc.chain(pc.compress("int8"), RING)
    cost, same = (
        pc.plan(sync, {"w": (1024,)}, world=2, link=MILLI, codec_speed=speed) for speed in (path, {"int8": (1e3, 2e3)})
    )
    assert cost.stages == same.stages
    assert cost.stages["encode int8()"] == pytest.approx(1.024)


# The command --------------------------------------------------------------------------------------------------------


def run(*arguments: str):
    import typer

    from ptcollect.commands.plan import plan

    app = typer.Typer()
    app.command()(plan)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_the_command_compares_and_warns(tmp_path):
    out = tmp_path / "rows.json"
    options = ("--params", "2M", "--bandwidth", "1gbit", "--json", out)
    names = [option for name in ("dense", "int8", "topk", "diloco") for option in ("--pipelines", name)]
    done = run(*options, "--world", "16", "--latency", "20ms", *names)
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert list(rows) == [row["name"] for row in sorted(rows.values(), key=lambda row: row["seconds"])]
    assert rows["dense"]["bytes"] == pytest.approx(2 * 15 / 16 * 8e6, rel=1e-4)
    assert rows["int8"]["loses"] == "int8(): late, not lost"
    assert rows["diloco"]["seconds"] == pytest.approx(rows["dense"]["seconds"] / 500)
    assert any("latency decides" in warning for warning in rows["dense"]["warnings"])
    # 1 % of the numbers with 4 bytes of value and 4 of position: 0.64 bits each, which pay below 100 ranks.
    assert not any("times the bytes" in warning for warning in rows["topk"]["warnings"])
    wide = 'chain(compress("bf16"), all_gather_avg())'
    done = run(*options, "--world", "8", "--latency", "0s", "--pipelines", wide, "--pipelines", "dense")
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert rows[wide]["warnings"] == [
        "sends 2 times the bytes of a dense ring; by all-gather 16 bits a number pay below 4 ranks only"
    ]
    assert rows["dense"]["warnings"] == []
    assert "against dense" in done.output


def test_the_command_takes_a_measured_link_and_draws(tmp_path):
    link, picture = tmp_path / "link.json", tmp_path / "plot.svg"
    pc.Link("100mbit", "5ms").save(link)
    done = run(
        *("--params", "2M", "--world", "8", "--ranks-per-node", "2", "--link", link, "--plot", picture),
        *("--pipelines", "dense", "--pipelines", "hierarchical"),
    )
    assert done.exit_code == 0, done.output
    assert "hierarchical" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--params", "2X"), "expected how many there are"),
        (("--params", "2M", "--pipelines", "foo(3)"), "'foo' is not a public name"),
        (("--params", "2M", "--pipelines", "bucketize()"), "expected a pipeline, got"),
        (("--params", "2M", "--pipelines", "hierarchical"), "ranks-per-node"),
        (("--params", "2M", "--latency", "soon"), "20ms"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message):
    done = run(*arguments, "--world", "4")
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_short_names_are_pipelines():
    for name in SHORT_NAMES:
        assert candidates.candidate(name).pipeline.communicates
    assert candidates.candidate("diloco").every == 500
    assert candidates.candidate("dense").step == 1
