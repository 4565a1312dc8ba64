"""Every ```python block of the documentation runs as it stands, those of a page in order and in one namespace.

On one process, that is: a page that communicates makes itself a group of one. Blocks marked ```py are not run.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.exists()]


def blocks(page: Path) -> list[str]:
    """The page's blocks, each behind as many empty lines as put it where it is in the page."""
    text = page.read_text()
    found = re.finditer(r"^( *)```python\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    return [
        "\n" * text.count("\n", 0, match.start(2)) + re.sub(f"^{match[1]}", "", match[2], flags=re.MULTILINE)
        for match in found
    ]


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, object]]:
    """That of a module which exists, since dataclasses and pickle look theirs up; a page's leftovers are removed."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    with torch.random.fork_rng():
        yield vars(module)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_the_page_runs(page: Path, namespace: dict[str, object]):
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)
