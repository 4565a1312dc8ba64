"""docs/pitfalls.md: its wrong snippets do what the page says, and its right ones average.

Both are read from the page and run on real ranks, so that the page cannot drift away from its test.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from forked_ranks import GROUP_TIMEOUT, Case, Outcome, run

PAGE = Path(__file__).parents[1] / "docs" / "pitfalls.md"
HOOKS = (1, 2, 3, 4, 5)  # the sections whose right code registers a hook; that of the others averages `gradients`


@dataclass(frozen=True)
class Section:
    """One heading of the page and what it fences."""

    title: str
    wrong: list[str]
    """Blocks marked py."""
    outcomes: list[str]
    """Blocks marked text."""
    right: list[str]
    """Blocks marked python."""


@functools.cache
def sections() -> list[Section]:
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return [Section(title, *(fenced(kind, body) for kind in ("py", "text", "python"))) for title, body in pairs(parts)]


def pairs(parts: list[str]) -> list[tuple[str, str]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


def fenced(kind: str, body: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", body, flags=re.MULTILINE | re.DOTALL)


def pitfall(number: int) -> Section:
    section = sections()[number]
    assert section.title.startswith(f"{number}. ")
    return section


def setup() -> str:
    """What the page starts with, without its group of one."""
    return "\n".join(block for block in sections()[0].right if "init_process_group" not in block)


def cases() -> dict[str, Case]:
    wrong = {n: pitfall(n).wrong for n in range(1, 10)}
    counting = wrong[5][0]
    assert counting.count("find_unused_parameters=True") == 1
    codes = {
        "1": Case(wrong[1][0], steps=2),
        "2, a tensor": Case(wrong[2][0], steps=2),
        "2, nothing": Case(wrong[2][1], steps=1),
        "2, annotated": Case(wrong[2][0].replace("bucket):", "bucket) -> torch.Tensor:"), steps=1),
        "3": Case(wrong[3][0], steps=1),
        "3, by keyword": Case(wrong[3][0].replace("comm_hook(hook)", "comm_hook(hook=hook)"), steps=1),
        "4": Case(wrong[4][0], steps=1),
        "5": Case(counting, steps=2),
        "5, reset": Case(
            counting.replace(
                "    return future", "        state.update(seen=0, waiting=[])\n    return future"
            ).replace("find_unused_parameters=True", ""),
            steps=2,
        ),
        "6": Case(wrong[6][0]),
        "6, one gradient": Case("gradients = gradients[:1]\n" + wrong[6][0]),
        "7": Case(wrong[7][0]),
        "7, ones": Case("gradients = [torch.ones(8) for _ in range(4)]\n" + wrong[7][0]),
        "8": Case(wrong[8][0]),
        "8, three ranks": Case(wrong[8][0], ranks=3),
        "9": Case(wrong[9][0]),
        "9, a receive outstanding": Case(BARRIER_FIRST),
    }
    for n in range(1, 10):
        right = "\n".join(block for block in pitfall(n).right if "destroy_process_group" not in block)
        codes[f"{n}, right"] = Case(right, steps=3 if n in HOOKS else 0)
    codes["8, right on three ranks"] = Case(pitfall(8).right[0], ranks=3)
    return {name: Case(setup() + "\n" + case.code, case.ranks, case.steps) for name, case in codes.items()}


BARRIER_FIRST = """
buffer = torch.zeros(8)
work = dist.irecv(buffer, 1) if dist.get_rank() == 0 else None
dist.barrier()
averaged = [buffer.clone()]
dist.barrier()
if work is None:
    dist.send(torch.ones(8), 0)
else:
    work.wait()
averaged.append(buffer)
"""


@functools.cache
def outcomes() -> dict[str, Outcome]:
    return run(cases(), bound=100)


def lines(outcome: Outcome) -> list[str]:
    """An outcome as the page writes it."""
    said = []
    for label, ranks in outcome.items():
        same = len(set(ranks)) == 1
        for who, what in [("every rank", ranks[0])] if same else [(f"rank {r}", what) for r, what in enumerate(ranks)]:
            said.append(f"{label}, {who}: {what}" if label else f"{who}: {what}")
    return said


def matches(shown: str, got: str) -> bool:
    """Whether `got` is what the page shows, where ``...`` stands for any text."""
    return re.fullmatch(re.escape(shown).replace(r"\.\.\.", ".*"), got, flags=re.DOTALL) is not None


@pytest.mark.parametrize(
    ("name", "number", "block"),
    [
        ("1", 1, 0),
        ("2, a tensor", 2, 0),
        ("2, nothing", 2, 1),
        ("3", 3, 0),
        ("4", 4, 0),
        ("5", 5, 0),
        ("6", 6, 0),
        ("7, ones", 7, 0),
        ("8", 8, 0),
    ],
)
def test_a_wrong_snippet_does_what_the_page_shows(name: str, number: int, block: int):
    shown, got = pitfall(number).outcomes[block], "\n".join(lines(outcomes()[name]))
    assert matches(shown.rstrip("\n"), got), f"the page shows\n{shown}\nand this happened\n{got}"


@pytest.mark.parametrize(("name", "number", "block"), [("8, three ranks", 8, 1), ("9", 9, 0)])
def test_a_snippet_that_waits_ends_with_the_timeout(name: str, number: int, block: int):
    (ranks,) = outcomes()[name].values()
    assert all(what.startswith("RuntimeError: ") for what in ranks), ranks
    # The first rank whose wait ends closes its connections, so the others may see that instead.
    assert any(matches(pitfall(number).outcomes[block].strip(), what) for what in ranks), ranks


@pytest.mark.parametrize("number", range(1, 10))
def test_the_right_code_averages(number: int):
    outcome = outcomes()[f"{number}, right"]
    assert len(outcome) == (3 if number in HOOKS else 1)
    for ranks in outcome.values():
        assert ranks == ["5.5 5.5 5.5 5.5"] * 2


def test_all_to_all_avg_is_right_on_three_ranks_too():
    assert lines(outcomes()["8, right on three ranks"]) == ["every rank: 37 37 37 37"]


def test_the_ring_leaves_one_of_the_inputs():
    (ranks,) = outcomes()["7"].values()
    for what in ranks:
        numbers = re.split(r"[ |]", what)
        assert len(numbers) >= 4
        assert set(numbers) <= {"1", "10"}, "which one is a race, but it is never 5.5"


def test_what_the_page_says_in_passing():
    annotated, by_keyword, reset, one_gradient = (
        lines(outcomes()[name]) for name in ("2, annotated", "3, by keyword", "5, reset", "6, one gradient")
    )
    assert len(annotated) == 1
    assert "ValueError: Communication hook: return annotation should be torch.futures.Future" in annotated[0]
    assert matches("every rank: TypeError: ... missing 1 required positional argument: 'state'", by_keyword[0])
    assert reset == ["step 1, every rank: still waiting"]
    assert one_gradient == ["every rank: IndexError: list index out of range"]
    assert lines(outcomes()["9, a receive outstanding"])[0] == "rank 0: 0 1"


def test_what_the_page_says_of_torch():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.constants import default_pg_timeout

    assert callable(default_hooks.fp16_compress_hook)
    assert default_pg_timeout == timedelta(minutes=30)
    assert f"{GROUP_TIMEOUT.total_seconds() * 1000:.0f}ms" == "2000ms"


def test_the_table_lists_every_section():
    rows = re.findall(r"^\| \[(\d\. .*?)\]\(#(.*?)\) \|", PAGE.read_text(), flags=re.MULTILINE)
    titles = [section.title for section in sections()[1:]]
    assert len(titles) == 9
    assert rows == [(title, re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()))) for title in titles]


def test_every_block_of_the_page_is_looked_at():
    """A block that no test runs would be one that can drift."""
    for number, section in enumerate(sections()[1:], start=1):
        counts = (len(section.wrong), len(section.outcomes))
        assert counts == {2: (2, 2), 8: (1, 2)}.get(number, (1, 1)), section.title
