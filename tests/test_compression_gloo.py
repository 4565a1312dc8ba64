"""Compression on real ranks over gloo equals the simulator bit for bit: trees, states, bytes on the wire."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_table import gradients, one_thread, same_data  # noqa: F401  (one_thread is a fixture)
from compression_ranks import PIPELINES, ended, launch, one_spoilt, steps

import ptcollect as pc


@functools.cache
def outcomes(n: int) -> dict[str, list[Any]]:
    """Task -> what each rank left; one launch per world size."""
    tasks = ("table", "hook") if n == 4 else ("table",)
    with tempfile.TemporaryDirectory() as name:
        launch(n, Path(name), tasks, bound=100)
        return {task: ended(Path(name), task, n) for task in tasks}


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("row", range(len(PIPELINES)), ids=[repr(pipeline) for pipeline in PIPELINES])
def test_gloo_is_the_simulator(row, n):
    pipeline, states = PIPELINES[row], None
    for step in range(steps(pipeline)):
        run = pc.simulate(pipeline, [one_spoilt(pipeline, rank, n, step) for rank in range(n)], states)
        states = run.states if pipeline.stateful else None
        for rank in range(n):
            got = outcomes(n)["table"][rank][row][step]
            assert same_data(got["tree"], run.trees[rank]), (rank, step)
            assert same_data(got["state"] or {}, run.states[rank]), (rank, step)
            assert got["sent"] == [run.bytes[rank], run.messages[rank], run.rounds[rank]], (rank, step)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_one_rank_with_nan_makes_all_skip(n):
    rows = [row for row, pipeline in enumerate(PIPELINES) if "skip_nonfinite" in pipeline.state_names]
    assert len(rows) == 2
    for row in rows:
        for rank in range(n):
            before, skipped, after = outcomes(n)["table"][rank][row]
            assert not any(leaf.any() for leaf in skipped["tree"].values())
            assert skipped["sent"] == [0, 0, 0]  # one byte of agreement is no payload
            assert skipped["state"]["skip_nonfinite"] == {"skipped": 1, "in_a_row": 1}
            assert after["state"]["skip_nonfinite"] == {"skipped": 1, "in_a_row": 0}
            for key in before["state"].keys() - {"step", "skip_nonfinite"}:
                assert same_data(before["state"][key], skipped["state"][key]), key
            assert all(torch.isfinite(leaf).all() for leaf in after["tree"].values())


def test_low_rank_as_a_hook_on_4_ranks_and_4_buckets():
    # Where torch's own PowerSGD hook aborts: 20 steps end, and equal the same pipeline without DDP.
    ranks = outcomes(4)["hook"]
    for each in ranks:
        assert each["buckets"] >= 4
        assert same_data(each["hook"], each["loop"])
        assert same_data(each["hook"]["model"], ranks[0]["hook"]["model"])
        assert all(torch.isfinite(leaf).all() for leaf in each["hook"]["model"].values())
    owed = [each["hook"]["state"]["error_feedback"]["residual"] for each in ranks]
    assert any(leaf.any() for leaf in owed[0].values())
    assert not same_data(owed[0], owed[1])


def test_the_table_has_every_leaf_kind():
    leaves = gradients(0, 0).values()
    assert {leaf.dim() for leaf in leaves} == {0, 1, 2, 3}
    assert any(leaf.numel() == 0 for leaf in leaves)
    assert any(not leaf.is_contiguous() for leaf in leaves)
    assert len({leaf.dtype for leaf in leaves}) == 4
