"""docs/performance.md is what benchmarks/report.py makes of the committed results, and what that makes is right."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # last: it has a ranks.py of its own

import report
from figures import Results, Row, in_unit, ratio, table
from goals import GOALS, judge
from trend import growth, slope

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PAGE = ROOT / "docs" / "performance.md"
AGAIN = "python benchmarks/report.py benchmarks/results/*.json --write docs/performance.md"


# The page in the repository -----------------------------------------------------------------------------------------


def test_the_page_is_made_from_the_results():
    assert RESULTS
    assert PAGE.read_text() == report.page(*report.load(RESULTS)), f"run {AGAIN}"


def test_the_plots_are_made_from_the_results():
    results, _ = report.load(RESULTS)
    shown = re.findall(r"\(images/(performance-\w+\.svg)\)", PAGE.read_text())
    assert shown
    for name in shown:
        plot = (PAGE.parent / "images" / name).read_text()
        assert f"from data {report.digest(results)}" in plot, f"{name}: run {AGAIN}"
        assert len(plot) < 100_000


def test_a_result_names_its_machine():
    machines = report.load(RESULTS)[0].machine
    for name, machine in machines.items():
        missing = {"cpu", "cores", "kernel", "torch", "tcp_loopback", "tcp_shaped", "date", "revision"} - set(machine)
        assert not missing, f"{name} does not say {missing}"
        assert machine["date"] in PAGE.read_text()


# What makes it ------------------------------------------------------------------------------------------------------


def row(key: str, samples: list[float], **more: object) -> Row:
    about: dict[str, object] = {"scenario": "training", "link": "200mbit", "world": 4, "size": 8, "unit": "s"}
    return Row(key=key, title=f"the {key}", samples=samples, baseline="ddp", **{**about, **more})  # type: ignore[arg-type]


def results(*rows: Row) -> Results:
    return Results({"a.json": {"date": "then", "revision": "abc", "load_before": 0.0}}, list(rows))


def test_a_ratio_is_the_median_of_quotients_not_the_quotient_of_medians():
    got = ratio([1.0, 4.0, 30.0], [1.0, 2.0, 40.0])
    assert (got.median, got.low, got.high) == (1.0, 0.75, 2.0)
    quartiles = ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert (quartiles.low, quartiles.median, quartiles.high) == (2.0, 3.0, 4.0)


def test_goals_are_judged_by_the_medians_of_ratios_and_the_best_counts():
    run = results(
        row("ddp", [2.0, 2.0, 2.0]),
        row("hook_bf16", [1.0, 1.0, 1.02]),  # 0.50: met
        row("hook_int8", [0.6, 0.5, 0.6]),  # 0.30 > 0.28: missed
        row("ring", [1.0, 1.0, 1.0], scenario="dense", limit=0.97),
        row("ring", [0.9, 0.9, 0.9], scenario="sizes", link="loopback", size=32 * 2**20),
        row("direct", [0.8, 0.8, 0.8], scenario="sizes", link="loopback", size=32 * 2**20),
        row("all_reduce", [1.0, 1.0, 1.0], scenario="sizes", link="loopback", size=32 * 2**20),
    )
    told = {verdict.goal.text: (round(verdict.got, 3), verdict.met) for verdict in judge(run)}
    assert told == {
        "dense 200mbit: ring reaches >= 0.96 of the limit": (0.97, True),
        "training 200mbit: hook_bf16 <= 0.50 x ddp": (0.5, True),
        "training 200mbit: hook_int8 <= 0.28 x ddp": (0.3, False),
        "sizes loopback 32 MiB: ring or direct <= 0.85 x all_reduce": (0.8, True),
    }
    lines = [line for line in report.page(run, {}).splitlines() if line.endswith((" **missed** |", " met |"))]
    assert [line.split()[-2] for line in lines] == ["**missed**", "met", "met", "met"]


def test_every_goal_is_said_in_other_words():
    texts = [goal.text for goal in GOALS]
    assert len(set(texts)) == len(texts)


def test_a_later_file_replaces_rows_of_an_earlier_one(tmp_path: Path):
    for name, seconds in (("1.json", 1.0), ("2.json", 3.0)):
        (tmp_path / name).write_text(json.dumps(results(row("ddp", [seconds])).as_json()))
    both, soak = report.load(tmp_path.glob("*.json"))
    assert [each.samples for each in both.rows] == [[3.0]]
    assert sorted(both.machine) == ["1.json", "2.json"]
    assert soak == {}


def test_numbers_have_three_digits_and_a_unit():
    shown = [in_unit(x, "s") for x in (1234.0, 1.6512, 0.0214, 0.00000521)]
    assert shown == ["1234 s", "1.65 s", "21.4 ms", "5.21 us"]
    assert [in_unit(x, "B") for x in (4096, 2**20, 25e6, 1500)] == ["4 KiB", "1 MiB", "25.0 MB", "1.5 KB"]
    assert table(("a", "bb"), [("x", "1"), ("yyy", "22")]) == "| a   | bb |\n| :-- | -: |\n| x   |  1 |\n| yyy | 22 |"


def test_a_slope_is_found_with_its_uncertainty():
    noise = random.Random(0)
    seconds = [float(t) for t in range(1800)]
    flat = slope(seconds, [2e8 + noise.gauss(0, 1e6) for _ in seconds])
    assert flat["low"] < 0 < flat["high"]
    leak = slope(seconds, [2e8 + 1e4 * t + noise.gauss(0, 1e6) for t in seconds])  # 36 MB an hour
    assert leak["low"] < 36 < leak["high"]
    assert leak["low"] > 30
    warm = slope(seconds, [min(2e8, 1e8 + 1e6 * t) for t in seconds])  # what is over in the first third does not count
    assert warm["mb_per_hour"] == pytest.approx(0, abs=1e-6)
    assert math.isnan(slope([0.0], [1.0])["mb_per_hour"])


def test_growth_is_that_of_the_rank_where_it_is_largest():
    assert growth([[5.0] * 100, [3.0] * 50 + [9.0] * 50]) == {"first": 3.0, "last": 9.0}
