"""The table of faults as docs/faults.md shows it."""

from __future__ import annotations

from faults.cases import CASES
from faults.trial import NEXT

BEGIN, END = "<!-- the table: tests/faults/ -->\n", "<!-- its end -->\n"


def table() -> str:
    """A row for each fault and what follows, with the points at which it is put in."""
    points: dict[tuple[str, str], list[str]] = {}
    for case in CASES:
        points.setdefault((case.fault, case.then), []).append(case.point)
    rows = [f"| {fault} | {'; '.join(dict.fromkeys(at))} | {then} |\n" for (fault, then), at in points.items()]
    return "| fault | put in | next |\n|---|---|---|\n" + "".join(rows)


def legend() -> str:
    """What the words of the last column mean."""
    return "".join(f"- **{word}**: {meaning}\n" for word, meaning in NEXT.items())
