"""Every public name is documented in full: one line, what it returns, an example that runs, a place on an API page.

Whether examples are right is for doctest, which the test command runs too.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import ptcollect as pc

API = Path(__file__).parents[1] / "docs" / "api"
NAMES = {
    name: getattr(module, name.rpartition(".")[2])
    for module, prefix in ((pc, ""), (pc.codecs, "codecs."), (pc.topologies, "topologies."))
    for name in (prefix + public for public in module.__all__)
}
every_name = pytest.mark.parametrize("name", NAMES)
every_function = pytest.mark.parametrize(
    "name", [name for name, value in NAMES.items() if callable(value) and not isinstance(value, type)]
)


def documentation(name: str) -> str:
    return inspect.getdoc(NAMES[name]) or ""


@every_name
def test_it_starts_with_one_line(name: str):
    first, *rest = documentation(name).splitlines() or [""]
    assert re.fullmatch(r"\S.*\S[.:]", first), f"{name}: expected one sentence on one line, got {first!r}"
    assert not rest or not rest[0], f"{name}: an empty line comes after the first"


@every_name
def test_it_has_an_example(name: str):
    assert re.search(r"^ *>>> ", documentation(name), flags=re.MULTILINE), f"{name} has no doctest"


@every_function
def test_it_says_what_it_returns(name: str):
    assert section(name, "Returns"), f"{name} returns something and does not say what"


@every_function
def test_it_documents_every_argument(name: str):
    described = set(re.findall(r"^    \*{0,2}(\w+):", section(name, "Args"), flags=re.MULTILINE))
    takes = {parameter for parameter in inspect.signature(NAMES[name]).parameters if parameter != "return"}
    assert described == takes, f"{name} takes {sorted(takes)} and describes {sorted(described)}"


@pytest.mark.parametrize("name", [name for name in pc.__all__ if not inspect.ismodule(NAMES[name])])
def test_it_is_on_an_api_page(name: str):
    pages = "\n".join(page.read_text() for page in API.glob("*.md"))
    full = f"{NAMES[name].__module__}.{name}"
    assert re.search(rf"^::: ptcollect\.((codecs|topologies)\.)?{name}$", pages, flags=re.MULTILINE), (
        f"{full} is on no API page"
    )


def section(name: str, heading: str) -> str:
    """What is indented under ``heading:``."""
    found = re.search(rf"^{heading}:\n((?:    .*\n?|\n)+)", documentation(name), flags=re.MULTILINE)
    return found[1] if found else ""
