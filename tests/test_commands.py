"""`python -m ptcollect doctor` and `bench`: on real ranks, on launches that are wrong, and what users type."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import ptcollect as pc
from ptcollect.commands import arguments
from ptcollect.commands.local_ranks import run_local_ranks
from ptcollect.doctor import agreement, network
from ptcollect.doctor.examine import examine
from ptcollect.doctor.facts import Facts, gather_facts
from ptcollect.doctor.finding import Finding, ranks
from ptcollect.doctor.launch import Launch, LaunchError, connect, read_launch
from ptcollect.measure.link import MeasuredLink
from ptcollect.measure.tournament import opponents

ROOT = Path(pc.__file__).parents[1]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")},
    "PYTHONPATH": str(ROOT),
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
}
TIMEOUT = 2.0
"""Seconds that a step of the doctor waits in the tests."""


def command(*arguments: str, bound: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "ptcollect", *arguments],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=bound,
        check=False,
    )


# Arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("4KiB", 4096), ("25MiB", 26214400), ("1.5 mb", 1500000), ("2GiB", 2147483648)]
)
def test_sizes(text: str, size: int):
    assert arguments.read_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "4 Kib s", "-4KiB", "0", "4TiBs", "nan"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ValueError, match=rf"size: expected .*size.*, got {re.escape(repr(text))}"):
        arguments.read_size(text)


@pytest.mark.parametrize(
    ("text", "pipeline"),
    [
        ("dense", pc.chain(pc.bucketize(), pc.ring_reduce())),
        (" bf16 ", pc.chain(pc.bucketize(), pc.compress("bf16"), pc.ring_reduce())),
        ("int8", pc.chain(pc.error_feedback(), pc.bucketize(), pc.compress("int8"), pc.ring_reduce())),
        ("low_rank", pc.chain(pc.error_feedback(), pc.low_rank(4), pc.bucketize(), pc.ring_reduce())),
        ("pc.chain(pc.scale(-2.0), pc.all_reduce(op='sum'))", pc.chain(pc.scale(-2.0), pc.all_reduce(op="sum"))),
        ("compress(codecs.topk(0.02))(all_to_all_avg())", pc.compress(pc.codecs.topk(0.02))(pc.all_to_all_avg())),
        ("partition({'*': ring_reduce()})", pc.partition({"*": pc.ring_reduce()})),
    ],
)
def test_pipelines(text: str, pipeline: pc.Pipeline):
    assert arguments.read_pipeline(text) == pipeline
    assert arguments.read_pipeline(repr(pipeline).replace("topk(", "codecs.topk(")) == pipeline  # what is printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dens", "'dens' is not a public name of ptcollect; short names are dense, bf16"),
        ("ring_reduce(", "not a Python expression"),
        ("ring_reduce", "expected a pipeline, got ReducerFactory; call it"),
        ("bucketize()", r"expected a pipeline, got Bucketize; add a reducer: chain\(..., ring_reduce\(\)\)"),
        ("chain(ring_reduce(), bucketize())", "has no reducer after it"),
        ("ring_reduce(ops='sum')", "ops"),
        ("ring_reduce().__class__", "not a public name"),
        ("__import__('os').getcwd()", "not a public name"),
        ("codecs._NAMED", "not a public name"),
        ("1 + 1", "'1 [+] 1' is not a call, a public name or a literal"),
        ("partition({**x})", "not a call, a public name or a literal"),
    ],
)
def test_what_is_no_pipeline_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        arguments.read_pipeline(text)


def test_lists_split_at_commas_outside_brackets_and_quotes():
    text = "dense, chain(bucketize(), ring_reduce()) ,partition({'a,(': ring_reduce(), '*': all_reduce()}),"
    assert arguments.split(text) == [
        "dense",
        "chain(bucketize(), ring_reduce())",
        "partition({'a,(': ring_reduce(), '*': all_reduce()})",
    ]


def test_shapes_are_read_from_json(tmp_path: Path):
    file = tmp_path / "shapes.json"
    file.write_text('{"fc.weight": [10, 256], "scale": []}')
    assert arguments.read_shapes(file) == {"fc.weight": (10, 256), "scale": ()}
    for content, message in (
        ("{}", "expected names and shapes"),
        ("[1", "cannot be read as JSON"),
        ('{"a": [2.5]}', r"'a': expected a list of whole numbers, got \[2.5\]"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            arguments.read_shapes(file)


# What every rank says, judged without a network ---------------------------------------------------------------------


def facts(rank: int, **changes: Any) -> Facts:
    """Of rank `rank` of two, each on a host of its own, all well."""
    well = Facts(
        rank=rank,
        world_size=2,
        host=f"host{rank}",
        machine=f"host{rank}",
        network=f"host{rank}",
        python="3.11.7",
        torch="2.13.0",
        ptcollect="0.1.0",
        backends=["gloo"],
        chosen="eth0",
        interfaces={"lo": "127.0.0.1", "eth0": f"10.0.0.{rank + 1}"},
        resolved="127.0.1.1",
        cores=8,
        threads=8,
        omp="8",
    )
    return dataclasses.replace(well, **changes)


CASES: dict[str, tuple[Callable[..., list[Finding]], list[Facts], str, str, str]] = {
    "all is well": (agreement.world, [facts(0), facts(1)], "ok", "2 of 2 came, on 2 hosts", ""),
    "one is missing": (agreement.world, [facts(1)], "failed", "rank 0 of 2 never came; rank 1 did", "not started"),
    "a number twice": (agreement.world, [facts(0), facts(1), facts(1)], "failed", "rank 1 came more than", "same RANK"),
    "other worlds": (
        agreement.world,
        [facts(0), facts(1, world_size=3), facts(2)],
        "failed",
        "ranks 0, 2 with WORLD_SIZE=2; rank 1 with WORLD_SIZE=3",
        "hosts x processes",
    ),
    "other torch": (
        agreement.versions,
        [facts(0), facts(1, torch="2.12.1")],
        "failed",
        "torch 2.13.0 on rank 0, 2.12.1 on rank 1",
        "one version of torch",
    ),
    "other python patch": (agreement.versions, [facts(0), facts(1, python="3.11.9")], "ok", "torch 2.13.0", ""),
    "other python": (
        agreement.versions,
        [facts(0), facts(1, python="3.12.0")],
        "failed",
        "python 3.11 on rank 0, 3.12 on rank 1",
        "python",
    ),
    "no gloo": (agreement.backends, [facts(0), facts(1, backends=["nccl"])], "failed", "no gloo on rank 1", "gloo"),
    "the chosen interface": (agreement.interfaces, [facts(0), facts(1)], "ok", "10.0.0.1, 10.0.0.2", ""),
    "a name like Debian's": (
        agreement.interfaces,
        [facts(0), facts(1, chosen="")],
        "failed",
        "rank 1 on host1: gloo would listen on 127.0.1.1, which other hosts cannot reach (the name host1 stands for",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    "loopback across hosts": (
        agreement.interfaces,
        [facts(0), facts(1, chosen="lo")],
        "failed",
        "(GLOO_SOCKET_IFNAME=lo)",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    "loopback on one host": (
        agreement.interfaces,
        [facts(0, chosen="lo", network="a"), facts(1, chosen="lo", network="a")],
        "ok",
        "share one network",
        "",
    ),
    "no such interface": (
        agreement.interfaces,
        [facts(0), facts(1, chosen="ib0")],
        "failed",
        "rank 1 on host1: GLOO_SOCKET_IFNAME=ib0, and there is no interface ib0",
        "the interfaces are lo, eth0; export GLOO_SOCKET_IFNAME=eth0",
    ),
    "an interface without address": (
        agreement.interfaces,
        [facts(0), facts(1, interfaces={"lo": "127.0.0.1", "eth0": ""})],
        "warning",
        "rank 1 on host1: interface eth0 has no IPv4 address",
        "down",
    ),
    "threads that fit": (agreement.threads, [facts(0), facts(1)], "ok", "at most 8 a rank", ""),
    "threads that do not": (
        agreement.threads,
        [facts(0, machine="a"), facts(1, machine="a")],
        "warning",
        "2 ranks with 16 threads on 8 cores",
        "OMP_NUM_THREADS=4",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_ranks_say(case: str):
    check, everyone, level, what, fix = CASES[case]
    (finding,) = check(everyone)
    assert (finding.level, what in finding.what, fix in finding.fix) == (level, True, True), finding
    assert bool(finding.fix) == (level != "ok")


def test_ranks_are_named_as_spans():
    assert ranks([5, 0, 1, 2]) == "ranks 0-2, 5"


@pytest.mark.parametrize("n", range(1, 10))
def test_in_a_tournament_every_two_ranks_meet_once(n: int):
    rounds = list(zip(*(opponents(rank, n) for rank in range(n)), strict=True))
    for peers in rounds:
        assert all(peer is None or peers[peer] == rank for rank, peer in enumerate(peers))
    met = sorted((rank, peer) for peers in rounds for rank, peer in enumerate(peers) if peer is not None)
    assert met == [(a, b) for a in range(n) for b in range(n) if a != b]


# Environments -------------------------------------------------------------------------------------------------------

WELL = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR not set, but RANK, WORLD_SIZE, MASTER_PORT"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2: ranks run from 0 to 1"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
    ],
)
def test_environments_that_cannot_be(changes: dict[str, str], message: str):
    with pytest.raises(LaunchError, match=message):
        read_launch({**WELL, **changes})


def test_a_store_that_nobody_hosts_is_named_in_bounded_time():
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"rank 1 reaches no store at MASTER_ADDR=127\.0\.0\.1 .*not started"):
        connect(read_launch({**WELL, "MASTER_PORT": str(free_port())}), 1.0)
    with pytest.raises(LaunchError, match=r"no[.]such[.]host[.]invalid is no name that this host can resolve"):
        connect(read_launch({**WELL, "MASTER_ADDR": "no.such.host.invalid"}), 1.0)
    assert time.monotonic() - start < 10


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# Launches: three processes go through all of them -------------------------------------------------------------------

LAUNCHES: dict[str, dict[str, Any]] = {
    "well": {},
    "an interface that is not there": {"changed": 1, "chosen": "eth77"},
    "another torch": {"changed": 1, "torch": "2.12.1"},
    "another world": {"changed": 2, "world_size": 4},
    "two that cannot talk": {"apart": (1, 2)},
    "a rank that dies": {"dies": 2},
    "without rank 2": {},
}


def go_through_launches(rank: int, port: int, out: str) -> None:
    """What each of the three processes does; rank 0 writes what it was told."""
    told = {}
    for name, launch in LAUNCHES.items():
        place = Launch(rank, 3, "127.0.0.1", port, attempt=name)
        mine = gather_facts(place, os.environ)
        if launch.get("changed") == rank:
            mine = dataclasses.replace(
                mine, **{field: launch[field] for field in ("chosen", "torch", "world_size") if field in launch}
            )
        if launch.get("dies") == rank:
            from ptcollect.doctor.meeting import Meeting

            meeting = Meeting(connect(place, TIMEOUT), place, TIMEOUT)
            meeting.arrive(mine)
            meeting.decision()
            os._exit(7)
        start = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if rank in launch.get("apart", ()):
                patch.setattr(network, "_try_pair", unless_apart(launch["apart"], network._try_pair))
            meeting, examination = examine(place, mine, TIMEOUT)
        seconds = time.monotonic() - start
        if examination is None:
            assert meeting.dismissed(10 * TIMEOUT) in (0, 1)
            continue
        meeting.dismiss(examination.code)
        findings = [dataclasses.asdict(finding) for finding in examination.findings]
        told[name] = {"code": examination.code, "seconds": seconds, "findings": findings}
        Path(out).write_text(json.dumps(told))


def unless_apart(apart: tuple[int, int], connected: Callable[..., Any]) -> Callable[..., Any]:
    """Sends between two ranks as before, unless it is these two."""

    def try_pair(meeting: Any, peer: int, pair: str, patience: float) -> Any:
        if {meeting.launch.rank, peer} == set(apart):
            raise network.PairError("no connection: refused")
        return connected(meeting, peer, pair, patience)

    return try_pair


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 was told in each of `LAUNCHES`."""
    out = tmp_path_factory.mktemp("doctor") / "told.json"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent hosts it
    code = "import sys, test_commands as t; t.go_through_launches(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(store.port), str(out)], env=environment)
        for rank in range(3)
    ]
    try:
        codes = [process.wait(90) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0, 7]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(
    ("name", "code", "failures"),
    [
        ("well", 0, []),
        ("without rank 2", 1, ["rank 2 of 3 never came; ranks 0-1 did"]),
        ("an interface that is not there", 1, ["GLOO_SOCKET_IFNAME=eth77, and there is no interface eth77"]),
        ("another torch", 1, [f"torch {torch.__version__} on ranks 0, 2, 2.12.1 on rank 1"]),
        ("another world", 1, ["ranks 0-1 with WORLD_SIZE=3; rank 2 with WORLD_SIZE=4", "rank 3 of 4 never came"]),
        ("two that cannot talk", 1, ["ranks 1 and 2 (127.0.0.1 and 127.0.0.1): no connection: refused"]),
        ("a rank that dies", 1, ["rank 2 never reported back"]),
    ],
)
def test_the_doctor_finds(told: dict[str, Any], name: str, code: int, failures: list[str]):
    found = told[name]
    failed = [f"{finding['what']}" for finding in found["findings"] if finding["level"] == "failed"]
    assert found["code"] == code
    if name != "a rank that dies":  # there the pairs with it fail too
        assert len(failed) == len(failures), failed
    for expected in failures:
        assert any(expected in what for what in failed), (expected, failed)
    assert found["seconds"] < 8 * TIMEOUT, "longer than it says it can last"
    checks = {finding["check"] for finding in found["findings"]}
    on_the_network = {"pairs", "group", "all_reduce", "ring_reduce"}
    assert on_the_network <= checks if name in ("well", "another torch") else not {"ring_reduce"} & checks


def test_the_doctor_alone_says_how_to_launch(tmp_path: Path):
    done = command("doctor", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    assert "torchrun --nproc-per-node 4 -m ptcollect doctor" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"]
    assert [finding["check"] for finding in found["findings"]][:2] == ["environment", "ranks"]


# bench --------------------------------------------------------------------------------------------------------------

MEASURED = ("dense", "int8", "chain(scale(1e39), ring_reduce())")
SHAPES = {"a": [300], "b": [5, 7]}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """One run on two local ranks, and what it wrote."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "shapes.json").write_text(json.dumps(SHAPES))
    options = ["--pipelines", ",".join(MEASURED), "--model-shapes", str(folder / "shapes.json"), "--repeats", "2"]
    options += ["--codecs", "int8", "--codec-size", "64KiB", "--json", str(folder / "out.json"), "--limit", "50"]
    done = command("bench", "--local", "2", *options)
    assert (folder / "out.json").exists(), done.stderr
    return done, json.loads((folder / "out.json").read_text())


def test_bench_counts_the_bytes_of_the_simulator(measured: tuple[Any, dict[str, Any]]):
    rows = {row["name"]: row for row in measured[1]["pipelines"]}
    assert list(rows) == ["dist.all_reduce", *MEASURED], "the order in which they were asked for"
    trees = [{name: torch.full(shape, rank + 1.0) for name, shape in SHAPES.items()} for rank in range(2)]
    for name in MEASURED:
        simulated = pc.simulate(arguments.read_pipeline(name.replace("1e39", "1.0")), trees)
        assert rows[name]["sent_bytes"] == simulated.bytes
        assert (rows[name]["messages"], rows[name]["rounds"]) == (simulated.messages[0], simulated.rounds[0])
    assert rows["dist.all_reduce"]["sent_bytes"] == [335 * 4] * 2  # a ring of two: half a vector out twice


def test_bench_relates_times_to_the_link(measured: tuple[Any, dict[str, Any]]):
    found = measured[1]
    assert found["world_size"] == 2
    (_, forth), (back, _) = found["bandwidth"]
    assert (found["bandwidth"][0][0], found["latency"][1][1]) == (None, None)
    assert min(forth, back) > 1e6
    assert 0 <= found["message_overhead"] < 0.1
    for row in found["pipelines"]:
        limit = max(row["sent_bytes"][0] / forth, row["sent_bytes"][1] / back)
        assert row["limit_seconds"] == pytest.approx(limit, rel=1e-12)
        if not row["failed"]:
            samples = row["seconds"]["samples"]
            assert len(samples) == 2
            assert row["seconds"]["median"] == pytest.approx(sum(samples) / 2)
            assert row["fraction"] == pytest.approx(limit / row["seconds"]["median"], rel=1e-12)
            baseline = found["pipelines"][0]["seconds"]["samples"]
            expected = sum(ours / theirs for ours, theirs in zip(samples, baseline, strict=True)) / 2
            assert row["ratio"]["median"] == pytest.approx(expected)


def test_bench_shows_what_failed_and_why(measured: tuple[Any, dict[str, Any]]):
    done, found = measured
    failed = found["pipelines"][-1]
    assert failed["failed"] == "rank 0: ValueError: the result of the first call is not finite"
    assert (failed["seconds"], failed["fraction"]) == (None, None)
    assert done.returncode == 1
    assert re.search(r"chain\(scale\(1e39\), ring_reduce\(\)\) +FAILED", done.stdout)
    assert "FAILED chain(scale(1e39), ring_reduce()): rank 0: ValueError: the result" in done.stdout


def test_bench_says_how_far_results_are_off(measured: tuple[Any, dict[str, Any]]):
    dense, int8 = measured[1]["pipelines"][1:3]
    assert 0 <= dense["off"] < 1e-6
    assert 1e-4 < int8["off"] < 5e-2  # 1/254 of a block's largest number, roughly


def test_bench_times_codecs(measured: tuple[Any, dict[str, Any]]):
    copy, encode, decode = measured[1]["codecs"]
    assert (copy["operation"], copy["bytes"]) == ("copy", 65536)
    for row in (encode, decode):
        assert row["wire_bytes"] == pc.codecs.int8().wire_bytes(16384)
        assert row["gigabytes_per_second"] == pytest.approx(65536 / row["seconds"]["median"] / 1e9)


def test_the_limit_is_that_of_the_slowest_rank():
    link = MeasuredLink([[None, 10.0, 40.0], [20.0, None, 5.0], [1.0, 2.0, None]], [], 0.0, one_pair_at_a_time=True)
    assert link.limit([80, 10, 1]) == 2.0  # rank 0: 80 bytes at 40 bytes per second
    assert link.limit([80, 100, 1]) == 5.0
    assert link.limit([80, 100, 20]) == 10.0
    assert link.slowest == 1.0


def test_local_ranks_that_hang_are_killed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    start = time.monotonic()
    assert run_local_ranks(2, ["bench"], 0.3) == 1  # they import torch for longer
    assert time.monotonic() - start < 10
    assert "killed after 0 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["bench"], "torchrun --nproc-per-node 4 -m ptcollect bench"),
        (["bench", "--local", "2", "--pipelines", "dens"], "'dens' is not a public name"),
        (["bench", "--local", "2", "--sizes", "25MB,x"], "expected bytes as an int or a size such as"),
        (["bench", "--local", "2", "--codecs", "int9"], "unknown codec 'int9'"),
    ],
)
def test_what_bench_refuses(options: list[str], message: str):
    done = run(options)
    assert done.exit_code == 2
    assert message in re.sub(r"[│\s]+", " ", done.output)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("doctor", ["before training", "--timeout", "--json"]),
        (
            "bench",
            ["--pipelines", "--sizes", "--params", "--model-shapes", "--codecs", "--repeats", "--json", "--local"],
        ),
    ],
)
def test_help(name: str, parts: list[str]):
    done = run([name, "--help"])
    assert done.exit_code == 0
    for part in parts:
        assert part in done.output


def run(options: list[str]) -> Any:
    """The command line in this process, with room for its messages and no launcher."""
    import typer

    from ptcollect.commands.bench import bench
    from ptcollect.commands.doctor import doctor

    app = typer.Typer()
    app.command("doctor")(doctor)
    app.command("bench")(bench)
    nobody = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return CliRunner().invoke(app, options, env={**nobody, "COLUMNS": "200", "NO_COLOR": "1"})
