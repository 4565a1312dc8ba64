"""Real processes over gloo: a launch per world size runs every check of `gloo_checks.py`, and each check is a test."""

from __future__ import annotations

import functools
import re

import pytest
from gloo_checks import CHECKS
from ranks import STUCK, Launch, launch

LAUNCHES = {"2": (2, {}), "3": (3, {}), "4": (4, {}), "2, debug": (2, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})}
pytestmark = pytest.mark.timeout(STUCK + 30)  # the first test of a launch waits for all of it

# What torch's store and gloo themselves log where a check makes a rank wait in vain.
LOGGED = re.compile(
    r"\[rank\d\]:\[[WE]\d+ [\d:.]+ (socket|ProcessGroupGloo)\.cpp|.*/debug_logger\.cc:\d+\] ERROR failed to connect"
)
KILLED = {("4", 2): -9}  # a_rank_that_is_killed_in_its_call


def names(n: int) -> list[str]:
    """What a launch of `n` ranks runs, in order: one check in which ranks end comes last."""
    chosen = [name for name, check in CHECKS.items() if n in check.sizes]
    assert [CHECKS[name].fatal for name in chosen] == [False] * (len(chosen) - 1) + [True]
    return chosen


@functools.cache
def launched(which: str) -> Launch:
    n, environment = LAUNCHES[which]
    return launch(n, names(n), bound=STUCK + 10, **environment)


@pytest.mark.parametrize(("which", "name"), [(which, name) for which, (n, _) in LAUNCHES.items() for name in names(n)])
def test_gloo(which: str, name: str):
    report = launched(which).report(name)
    assert not report, report


@pytest.mark.parametrize("which", LAUNCHES)
def test_ranks_exit_as_they_should(which: str):
    ended = launched(which)
    expected = [KILLED.get((which, rank), 0) for rank in range(LAUNCHES[which][0])]
    assert ended.exit_codes == expected, "\n".join(ended.output)
    printed = [line for text in ended.output for line in text.splitlines() if not LOGGED.match(line)]
    assert printed == []
