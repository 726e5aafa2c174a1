"""The message catalogue: what `moekit check CASE.yaml` prints, word for word, for every way to be wrong.

Each `CASE.txt` is the whole standard error of the real command, run in this folder; `pytest --update-golden` rewrites
them. The last test holds that no place in the code that refuses a recipe is left out; rules have their own cases, in
`tests/rules`.
"""

from __future__ import annotations

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
    PACKAGE / "megatron" / "table.py",
]
REFUSING = {"Problem", "Refused", "Complaint", "MoekitError", "error", "complain", "ValueError"}


OTHERWISE = {"sweep_whole": ["flags", "sweep_whole.yaml"], "sweep_not_one": ["check", "sweep_not_one.yaml:low"]}
"""Cases that `check CASE.yaml` does not show."""


def arguments(case: str) -> list[str]:
    """What comes behind `moekit`; a case named profile_* is a cluster profile."""
    if case in OTHERWISE:
        return OTHERWISE[case]
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
    refused = re.search(r"\d problem", printed.err) or case.startswith("profile_") or case in OTHERWISE
    assert code == (1 if refused else 0)
    golden_file(HERE / f"{case}.txt", printed.err)


def test_each_case_has_its_text() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(CASES)


def test_messages_are_worded_alike() -> None:
    for path in [*HERE.glob("*.txt"), *(HERE.parent / "rules").glob("*.txt")]:
        for line in path.read_text().splitlines():
            assert not line.endswith("."), (path, line)
            assert "invalid" not in line.lower(), (path, line)


def test_causes_are_many() -> None:
    causes = set()
    for path in [*HERE.glob("*.txt"), *(HERE.parent / "rules").glob("*.txt")]:
        for line in path.read_text().splitlines():
            if not line.startswith("    ") and ", checked against " not in line:
                causes.add(re.sub(r"`[^`]*`|\d[\d,.]*", "_", line.partition(": ")[2]))
    assert len(causes) >= 100


def test_every_place_that_refuses_is_reached(
    unreached: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_all() -> None:
        for case in CASES:
            run(case, monkeypatch)

    assert unreached(SOURCES, REFUSING, run_all) == []
