"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    >>> Finding("versions", "failed", "torch 2.12.0 on rank 1, 2.13.0 on rank 0", "install one version").bad
    True
    """

    check: str
    """What was looked at."""
    level: Level
    """``"warning"``: training will work, but not as it should. ``"failed"``: it will not work."""
    what: str
    """What is there, with the ranks it concerns."""
    fix: str = ""
    """The likely cause and what to do about it, in one line; empty when all is well."""
    fatal: bool = False
    """Whether checks that need all ranks and their network are pointless, since they could only wait."""

    @property
    def bad(self) -> bool:
        """Whether it makes the command fail."""
        return self.level == "failed"


def ranks(numbers: Iterable[int]) -> str:
    """Ranks as messages name them; many that follow each other as a span.

    >>> ranks([3]), ranks([0, 1, 2, 3, 6]), ranks([])
    ('rank 3', 'ranks 0-3, 6', 'no rank')
    """
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    if not spans:
        return "no rank"
    parts = [f"{span[0]}" if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"rank{'s' if len(spans) > 1 or len(spans[0]) > 1 else ''} {', '.join(parts)}"
