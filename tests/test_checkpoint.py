"""State is data: saved, loaded in other processes, moved to another number of ranks, and printed."""

from __future__ import annotations

import copy
import functools
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from codec_table import CODECS, Books, gradients, one_thread, residuals, run, same_data  # noqa: F401  (a fixture)
from compression_ranks import SAVED_AT, TRAINED, ended, feedback, launch

import ptcollect as pc

C = pc.codecs


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


KEPT = (
    TRAINED,
    *(feedback(pc.compress(codec), pc.all_to_all_avg()) for codec in CODECS),
    pc.partition(
        {"m*": feedback(pc.low_rank(1), pc.ring_reduce()), "*": feedback(pc.compress("int4"), pc.ring_reduce())}
    ),
    pc.piecewise({0: pc.ring_reduce(), 2: feedback(pc.compress("sign"), pc.ring_reduce())}),
)


@pytest.mark.parametrize("sync", KEPT, ids=repr)
def test_saved_and_loaded_the_next_step_is_the_same(sync):
    states, _ = run(sync, 3, 3)
    loaded = [through_a_file(state) for state in states]
    assert same_data(loaded, states)
    trees = [gradients(rank, 3) for rank in range(3)]
    one, other = pc.simulate(sync, trees, states), pc.simulate(sync, trees, loaded)
    assert same_data(one.trees, other.trees)
    assert same_data(one.states, other.states)


def test_state_holds_nothing_but_data():
    def check(value: Any, where: str) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                assert type(key) is str, where
                check(each, f"{where}.{key}")
        else:
            assert type(value) in (int, torch.Tensor), f"{where}: {type(value)}"

    for sync in KEPT:
        check(run(sync, 2, 1)[0][0], repr(sync))


# New processes ------------------------------------------------------------------------------------------------------


@functools.cache
def trained() -> tuple[dict[str, list[Any]], list[Any]]:
    """Seven steps and a save on 4 ranks, the eighth in 4 new processes; and the checkpoint as one process finds it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launch(4, folder, ["seven_steps"])
        launch(4, folder, ["eighth_step"])
        found = []
        for rank in range(4):
            wanted = {"sync": pc.rank_local(TRAINED.init(gradients(rank, 0)), rank=rank)}
            with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
                dcp.load(wanted, checkpoint_id=folder / "checkpoint", no_dist=True)
            found.append(pc.from_rank_local(wanted["sync"], rank=rank))
        return {task: ended(folder, task, 4) for task in ("seven_steps", "eighth_step")}, found


@pytest.mark.parametrize("way", ["torch", "distributed"])
def test_new_processes_go_on_where_the_old_ones_were(way):
    tasks, _ = trained()
    for uninterrupted, resumed in zip(tasks["seven_steps"], tasks["eighth_step"], strict=True):
        assert same_data(resumed[way]["state"], uninterrupted["state"])
        assert same_data(resumed[way]["tree"], uninterrupted["tree"])
        assert same_data(resumed[way]["after"], uninterrupted["after"])
        assert resumed[way]["state"]["step"] == SAVED_AT


def test_every_rank_gets_its_own_residual_back():
    tasks, found = trained()
    saved = [each["state"] for each in tasks["seven_steps"]]
    owed = [dict(residuals(state)) for state in saved]
    assert all(not same_data(owed[r], owed[s]) for r in range(4) for s in range(r))
    assert same_data(found, saved)  # one process, without a group, can read all of them


def test_four_ranks_become_two_and_training_goes_on():
    tasks, _ = trained()
    saved = [each["state"] for each in tasks["seven_steps"]]
    before = copy.deepcopy(saved)
    fewer = pc.reshard(saved, 2)
    assert same_data(saved, before)
    books = Books(2, rank=2)
    for path, _ in residuals(saved[0]):
        # What four ranks owed is what the two owe: put in, and not yet arrived.
        books.given[path] = sum(dict(residuals(state))[path].double() for state in saved)
        books.arrived[path] = torch.zeros_like(books.given[path])
        owed = sum(dict(residuals(state))[path].double() for state in fewer)
        assert torch.allclose(owed, books.given[path], rtol=0, atol=1e-6)
    assert [state["step"] for state in fewer] == [SAVED_AT] * 2
    states, books = run(TRAINED, 2, 4, books, fewer, first=SAVED_AT)
    books.check(states, gradients(0, 0))


# reshard by hand ----------------------------------------------------------------------------------------------------


def numbered(ranks: int) -> list[Any]:
    basis = torch.eye(2)
    return [
        {
            "step": 5,
            "error_feedback": {"residual": {"w": torch.tensor([float(10**r), -1.0]), "s": torch.tensor(2.0 * r)}},
            "low_rank": {"basis": {"w": basis}, "p": {}, "q": {}},
            "skip_nonfinite": {"skipped": 3, "in_a_row": 0},
        }
        for r in range(ranks)
    ]


@pytest.mark.parametrize("before", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 8])
def test_the_sum_of_residuals_stays(before, after):
    states = numbered(before)
    moved = pc.reshard(states, after)
    assert len(moved) == after
    w = sum(state["error_feedback"]["residual"]["w"] for state in moved)
    assert w.tolist() == [float(sum(10**r for r in range(before))), -float(before)]
    assert sum(float(state["error_feedback"]["residual"]["s"]) for state in moved) == before * (before - 1)
    for state in moved:
        assert list(state) == list(states[0])
        assert state["step"] == 5
        assert same_data(state["low_rank"], states[0]["low_rank"])
        assert state["skip_nonfinite"] == {"skipped": 3, "in_a_row": 0}
    pointers = [state["error_feedback"]["residual"]["w"].data_ptr() for state in (*states, *moved)]
    assert len(set(pointers)) == before + after  # nothing is shared


def test_as_many_ranks_as_before_change_nothing():
    assert same_data(pc.reshard(numbered(3), 3), numbered(3))


def test_what_cannot_be_resharded():
    for ranks in (0, -1, 1.5, True):
        with pytest.raises(
            ValueError, match=re.escape(f"reshard(ranks): expected a whole number from 1 on, got {ranks}")
        ):
            pc.reshard(numbered(2), ranks)
    with pytest.raises(ValueError, match="expected the states of all ranks, got none"):
        pc.reshard([], 2)
    for after in (1, 2, 3):
        with pytest.raises(ValueError, match="reshard: the states differ"):
            pc.reshard([*numbered(2), {"step": 5}], after)
        other = numbered(3)
        del other[1]["error_feedback"]["residual"]["s"]
        with pytest.raises(ValueError, match="reshard: the states differ"):
            pc.reshard(other, after)


def test_states_of_different_steps_are_not_put_together():
    states = numbered(2)
    states[1]["step"] = 6
    with pytest.raises(ValueError, match=r"reshard: the states differ.*step"):
        pc.reshard(states, 1)


# rank_local ---------------------------------------------------------------------------------------------------------


def test_rank_local_there_and_back():
    for state in (*numbered(2), run(KEPT[-2], 2, 2)[0][1], run(KEPT[-1], 2, 3)[0][0], {}):
        before = copy.deepcopy(state)
        local = pc.rank_local(state, rank=7)
        assert same_data(pc.from_rank_local(local, rank=7), state)
        assert same_data(state, before)
    local = pc.rank_local(numbered(1)[0], rank=11)
    assert set(local["error_feedback"]["residual"]) == {"rank11/w", "rank11/s"}
    assert set(local["low_rank"]["basis"]) == {"w"}


def test_another_ranks_entries_are_refused():
    local = pc.rank_local(numbered(1)[0], rank=1)
    for rank in (0, 11):
        with pytest.raises(ValueError, match=rf"expected entries of rank{rank}/\*, got 'rank1/.'.*reshard"):
            pc.from_rank_local(local, rank=rank)
    with pytest.raises(ValueError, match=r"expected entries of rank1/\*, got 'w'.*rank_local"):
        pc.from_rank_local(numbered(1)[0], rank=1)


# state_summary ------------------------------------------------------------------------------------------------------


def test_a_summary_shows_step_and_norms_largest_first():
    state = {
        "step": 12,
        "skip_nonfinite": {"skipped": 3, "in_a_row": 0},
        "error_feedback": {
            "residual": {
                "small": torch.tensor([0.3, -0.4]),
                "large": torch.tensor([[3.0], [-4.0]]),
                "empty": torch.zeros(0, 3),
                "scalar": torch.tensor(-2.0, dtype=torch.float64),
            }
        },
    }
    text = pc.state_summary(state)
    lines = text.splitlines()
    assert re.search(r"(?m)^step\s+12$", text)
    assert re.search(r"(?m)^skip_nonfinite.skipped\s+3$", text)
    assert [line.split()[0] for line in lines[-4:]] == ["large", "scalar", "small", "empty"]
    assert re.search(r"large\s+norm 5\s+largest 4", text)
    assert re.search(r"scalar\s+norm 2\s+largest 2", text)
    assert re.search(r"small\s+norm 0.5\s+largest 0.4", text)
    assert re.search(r"empty\s+norm 0\s+largest 0", text)
    # sqrt(25 + 4 + 0.25); 2 x 4 + 2 x 4 + 8 bytes
    assert re.search(r"error_feedback.residual\s+norm 5.41 in 4 tensors, 24 bytes", text)


@pytest.mark.parametrize("sync", KEPT, ids=repr)
def test_every_state_has_a_summary(sync):
    states, _ = run(sync, 2, 1)
    text = pc.state_summary(states[0])
    for path, _ in residuals(states[0]):
        assert re.search(rf"(?m)^  {re.escape(path)}\s+norm", text)
    assert pc.state_summary({}) == ""
