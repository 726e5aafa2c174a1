"""The table of faults is long enough, has what it names, and is the one that docs/faults.md shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faults import inside
from faults.cases import CASES
from faults.page import BEGIN, END, legend, table
from faults.points import POINTS
from faults.trial import NEXT

PAGE = Path(__file__).parents[2] / "docs/faults.md"
WORDS = ("<!-- the words: tests/faults/ -->\n", "<!-- their end -->\n")


def test_there_are_a_hundred_faults_and_more() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 100
    assert {case.then for case in CASES} == set(NEXT)
    assert set(POINTS) == set(inside.POINTS) == {plan["point"] for case in CASES for plan in case.plans}


def test_the_page_shows_the_table(request: pytest.FixtureRequest) -> None:
    shown = PAGE.read_text()
    said = replaced(replaced(shown, BEGIN, END, table()), *WORDS, legend())
    if request.config.getoption("--update-golden"):
        PAGE.write_text(said)
        shown = said
    assert shown == said, "pytest --update-golden writes it"


def replaced(text: str, begin: str, end: str, new: str) -> str:
    return re.sub(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", lambda _: new, text, flags=re.DOTALL)
