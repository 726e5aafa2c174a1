"""The message catalogue: what `moekit check CASE.yaml` prints, word for word, for every way to be wrong.

Each `CASE.txt` is the whole standard error of the real command, run in this folder; `pytest --update-golden` rewrites
them. The last test holds that no place in the code that refuses a recipe is left out.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import moekit
from moekit import cli

HERE = Path(__file__).parent
CASES = sorted(path.stem for path in HERE.glob("*.yaml"))
PACKAGE = Path(moekit.__file__).parent
SOURCES = [
    *(PACKAGE / "recipe" / f"{name}.py" for name in ("nodes", "load", "build", "patterns", "check", "cpu")),
    *sorted((PACKAGE / "recipe" / "rules").glob("*.py")),
    PACKAGE / "megatron" / "table.py",
]
REFUSING = {"Problem", "Refused", "Violation", "Complaint", "MoekitError", "error", "complain", "ValueError"}


def arguments(case: str) -> list[str]:
    """What comes behind `moekit`; a case named profile_* is a cluster profile."""
    if case.startswith("profile_"):
        return ["check", "../../recipes/dense.yaml", "--profile", f"{case}.yaml"]
    return ["check", f"{case}.yaml"]


def run(case: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "argv", ["moekit", *arguments(case)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("case", CASES)
def test_message(
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden_file: Callable[[Path, str], None],
) -> None:
    code = run(case, monkeypatch)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert code == (1 if re.search(r"\d problem", printed.err) or case.startswith("profile_") else 0)
    golden_file(HERE / f"{case}.txt", printed.err)


def test_each_case_has_its_text() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(CASES)


def test_messages_are_worded_alike() -> None:
    for case in CASES:
        for line in (HERE / f"{case}.txt").read_text().splitlines():
            assert not line.endswith("."), (case, line)
            assert "invalid" not in line.lower(), (case, line)


def test_causes_are_many() -> None:
    causes = set()
    for case in CASES:
        for line in (HERE / f"{case}.txt").read_text().splitlines():
            if not line.startswith("    hint: ") and ", checked against " not in line:
                causes.add(re.sub(r"`[^`]*`|\d[\d,.]*", "_", line.partition(": ")[2]))
    assert len(causes) >= 100


def places(path: Path) -> dict[int, range]:
    """For every expression in a file that makes a problem, its first line and the lines it stands on.

    One that only passes problems on, `MoekitError(*problems)`, makes none.
    """
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSING:
            if all(isinstance(argument, ast.Starred) for argument in node.args):
                continue
            found[node.lineno] = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return found


def test_every_place_that_refuses_is_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = {str(path) for path in SOURCES}
    reached: set[tuple[str, int]] = set()

    def line_runs(code: object, line: int) -> object:
        file = code.co_filename  # type: ignore[attr-defined]
        if file in watched:
            reached.add((file, line))
        return sys.monitoring.DISABLE

    tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events.LINE
    sys.monitoring.use_tool_id(tool, "catalogue")
    sys.monitoring.register_callback(tool, events, line_runs)
    sys.monitoring.set_events(tool, events)
    try:
        for case in CASES:
            run(case, monkeypatch)
    finally:
        sys.monitoring.set_events(tool, 0)
        sys.monitoring.free_tool_id(tool)
    missed = [
        f"{path.relative_to(PACKAGE)}:{first}"
        for path in SOURCES
        for first, lines in places(path).items()
        if not any((str(path), line) in reached for line in lines)
    ]
    assert not missed, f"no case in tests/errors/ reaches {', '.join(missed)}"
