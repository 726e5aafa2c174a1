"""The rules in words: `docs/rules.md`, and what `moekit rules` prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import RULES

from moekit import cli
from moekit.problems import MoekitError
from moekit.recipe.rules import STAGES, page

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_rules() -> None:
    assert (ROOT / "docs" / "rules.md").read_text() == page.page(), "moekit rules --markdown > docs/rules.md"


def test_every_rule_says_its_fact_and_what_happens() -> None:
    assert {entry.name for entry in page.entries()} == set(RULES)
    for entry in page.entries():
        assert entry.stage in STAGES
        assert entry.fact.endswith((".", "`")), entry.name
        assert entry.outcome.endswith((".", "`")), entry.name


def test_every_outcome_has_a_source() -> None:
    """A place in the code of Megatron or what is around it, a section of the handbook, or where it was seen."""
    sources = (".py", ".h", ".cu", "handbook", "Transformer Engine", "seen on", " issue ")
    without = [entry.name for entry in page.entries() if not any(source in entry.outcome for source in sources)]
    assert without == []


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["moekit", "rules", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code


def test_a_word_finds_rules(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "saving_has_an_interval")
    assert capsys.readouterr().out == (
        "saving_has_an_interval (checkpoint)\n"
        "  Megatron wants to know how often.\n"
        "  Megatron, validate: a bare assert (megatron/training/arguments.py:1322).\n"
    )
    run(monkeypatch)
    assert capsys.readouterr().out.count("Megatron, ") >= len(RULES)


def test_a_word_of_no_rule_is_said() -> None:
    from moekit.recipe.commands import rules

    with pytest.raises(MoekitError, match="no rule has `xyzzy` in its name or text"):
        rules("xyzzy")
