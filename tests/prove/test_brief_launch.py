"""A launch that is one of several: what it is and how it ended, without rows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from moekit.launch.live import Display, Row


@pytest.mark.parametrize("brief", [True, False])
def test_rows_and_minor_facts_are_left_out(brief: bool) -> None:
    out = io.StringIO()
    display = Display(True, Console(file=out, highlight=False), brief=brief)
    display.say("some_run: a summary")
    for name in ("run", "needs", "training", "log"):
        display.fact(name, f"its {name}")
    display.row(Row(10, 7.0, 1.0, 0.5, 4000.0, 3.0), 20)
    lines = [line.split()[0] for line in out.getvalue().splitlines()]
    assert (
        lines == ["some_run:", "run", "training"]
        if brief
        else ["some_run:", "run", "needs", "training", "log", "10/20"]
    )
