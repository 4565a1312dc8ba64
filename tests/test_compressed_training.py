"""Compressed training on digits: as accurate as dense within one point with error feedback, and not without.

One point is 3.57 of the 357 test images. Measured with these seeds: dense and all trainings with error feedback
recognise 345, without it sign and low_rank(2) 337, topk(1 %) 308.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_examples import EXAMPLES, run

sys.path.append(str(EXAMPLES))
import compressed_digits
from compressed_digits import LOSSY, PIPELINES, Digits, Simulated, Training, train

STEPS = 300
ONE_POINT = 0.01
FAILING = ["sign", "topk(1 %)", "low_rank(2)"]  # without error feedback; int8 and int4 lose too little to see


@pytest.fixture(scope="module")
def trained() -> dict[str, Training]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    try:
        digits = Digits.load()
        names = ["dense", *(f"{name} + EF" for name in LOSSY), *FAILING]
        return {name: train(PIPELINES[name], digits, STEPS, Simulated) for name in names}
    finally:
        torch.set_num_threads(threads)


def test_dense_learns(trained: dict[str, Training]):
    assert trained["dense"].accuracy > 0.95


@pytest.mark.parametrize("name", LOSSY)
def test_with_error_feedback_it_is_as_accurate_as_dense(trained: dict[str, Training], name: str):
    assert trained[f"{name} + EF"].accuracy >= trained["dense"].accuracy - ONE_POINT
    assert trained[f"{name} + EF"].curve[-1] <= 1.1 * trained["dense"].curve[-1]


@pytest.mark.parametrize("name", FAILING)
def test_without_error_feedback_it_is_not(trained: dict[str, Training], name: str):
    assert trained[name].accuracy < trained["dense"].accuracy - ONE_POINT
    assert trained[name].curve[-1] > 1.5 * trained["dense"].curve[-1]


def test_topk_without_error_feedback_fails_visibly(trained: dict[str, Training]):
    assert trained["topk(1 %)"].accuracy < trained["dense"].accuracy - 5 * ONE_POINT
    assert trained["topk(1 %)"].curve[-1] > 5 * trained["dense"].curve[-1]


@pytest.mark.parametrize(
    ("name", "share"), [("int8", 0.26), ("int4", 0.15), ("sign", 0.04), ("topk(1 %)", 0.02), ("low_rank(2)", 0.11)]
)
def test_it_sends_less(trained: dict[str, Training], name: str, share: float):
    assert 0 < trained[f"{name} + EF"].bytes_per_step <= share * trained["dense"].bytes_per_step


def test_processes_print_the_table_that_the_simulation_prints():
    options = ("--steps", "12", "--only", "sign + EF", "low_rank(2) + EF")
    one, four = (run(EXAMPLES / "compressed_digits.py", *options, *more) for more in ((), ("--gloo",)))
    assert "12 steps of 96 images on 4 simulated ranks" in one
    assert "12 steps of 96 images on 4 processes over gloo" in four
    assert one.splitlines()[1:] == four.splitlines()[1:]
    assert len(one.splitlines()) == 6


def test_it_draws_the_picture_of_the_documentation(tmp_path: Path):
    output = run(EXAMPLES / "compressed_digits.py", "--steps", "6", "--output", tmp_path / "curves.png")
    assert f"Picture: {tmp_path / 'curves.png'}" in output
    drawn = (tmp_path / "curves.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--steps", "0"), "--steps: at least 1"),
        (("--output", "/nowhere/curves.png"), "--output: no folder /nowhere"),
        (("--output", "curves.png", "--only", "sign"), "--output: needs all trainings"),
    ],
)
def test_it_refuses_what_cannot_work_before_it_starts(options, reason, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compressed_digits.py", *options])
    with pytest.raises(SystemExit, match="2"):
        compressed_digits.main()
    assert reason in capsys.readouterr().err
