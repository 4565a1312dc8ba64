"""What happened when: traces that Perfetto opens, and pictures."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
import torch

import ptcollect as pc

LINK = pc.Link(1e6, latency=0.5, message_overhead=0.25)


def timeline(n=3, **options):
    sync = pc.chain(pc.compress("bf16"), pc.ring_reduce())
    return pc.simulate(sync, [torch.ones(1500)] * n, link=LINK, codec_speed={"bf16": 1e5}, **options).timeline


def test_messages_take_the_time_that_the_link_says():
    run = pc.simulate(pc.gather_avg(), [torch.ones(250_000)] * 3, link=LINK, check="off")
    first, second = run.timeline.messages
    assert (first.source, first.destination, first.size) == (1, 0, 1_000_000)
    assert (first.leaves, first.left, first.arrives, first.arrived) == (0.0, 1.25, 0.5, 1.75)
    assert (second.source, second.leaves, second.arrived) == (2, 1.25, 3.0)  # the port into rank 0 was busy
    assert run.seconds == [3.0, 1.25, 2.5]


def test_no_port_carries_two_messages_at_a_time():
    trees = [{str(i): torch.ones(1000 * (i + 1)) for i in range(7)}] * 5
    for pipeline in (pc.ring_reduce(), pc.all_to_all_avg(), pc.all_reduce(), pc.broadcast(root=1)):
        messages = pc.simulate(pipeline, trees, link=LINK).timeline.messages
        for ends in (
            lambda m: (m.source, "out", m.leaves, m.left),
            lambda m: (m.destination, "in", m.arrives, m.arrived),
        ):
            ports = {}
            for rank, _, start, end in sorted(map(ends, messages)):
                assert start >= ports.get(rank, 0.0) - 1e-9
                ports[rank] = end


def test_a_rank_does_one_thing_at_a_time():
    run = timeline()
    for rank in range(3):
        spans = sorted((span.start, span.end) for span in run.spans if span.rank == rank)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))
        assert sum(end - start for start, end in spans) == pytest.approx(run.seconds, rel=0.2)


def test_a_trace_is_one_that_perfetto_opens(tmp_path):
    path = tmp_path / "trace.json"
    run = timeline()
    run.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["name"]
    flows = {kind: {event["id"]: event for event in events if event["ph"] == kind} for kind in ("s", "f")}
    assert flows["s"].keys() == flows["f"].keys() == set(range(len(run.messages)))
    slices = [event for event in events if event["ph"] == "X"]
    for number, start in flows["s"].items():
        end = flows["f"][number]
        assert end["bp"] == "e"
        assert end["ts"] >= start["ts"]
        for flow in (start, end):  # each end is bound to the slice that begins there
            assert any(
                (each["pid"], each["tid"], each["ts"]) == (flow["pid"], flow["tid"], flow["ts"]) for each in slices
            )
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}


def test_pictures(tmp_path):
    for name in ("schedule.svg", "schedule.png"):
        timeline(check="off").draw(tmp_path / name, title="a ring of three")
        assert (tmp_path / name).stat().st_size > 5000
    text = (tmp_path / "schedule.svg").read_text()
    assert "a ring of three" in text
    assert "ring_reduce" in text


def test_pictures_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ptcollect\[plot\]'"):
        timeline().draw(tmp_path / "x.png")


def test_plans_of_small_worlds_have_one():
    cost = pc.plan(pc.ring_reduce(), {"w": (10,)}, world=3, link=LINK)
    assert cost.timeline.seconds == pytest.approx(cost.seconds)
    assert len(cost.timeline.messages) == sum(cost.messages) + 3 * 2
