"""How far every shipped recipe is judged here: by the option table, by the real Megatron, and by training steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import yaml
from small import small

from moekit import share
from moekit.launch.cluster import find_cluster
from moekit.launch.judges import ask_here, questions
from moekit.megatron.judgement import fair
from moekit.megatron.verdict import Verdict
from moekit.recipe.load import load

FILE = Path(__file__).parent / "recorded.yaml"
"""What was answered, kept for docs/recipes.md; a test asks again."""

NAMES = share.shipped_recipes()
STEPPED = [name for name in NAMES if not name.startswith("models/")]
"""Recipes that are asked for steps, shrunk; models train in tests/quickstart/test_model_recipes.py."""


def ask(folder: Path) -> tuple[dict[str, list[Verdict]], dict[str, Verdict]]:
    """The stages' verdicts on every recipe, and stage `step`'s on the shrunk ones; shrunk files lie in `folder`."""
    whole = {name: load(name) for name in NAMES}
    shrunk = {name: load(str(small(name, folder))) for name in STEPPED}
    asked = []
    for name, loaded in (*whole.items(), *shrunk.items()):
        question = questions(loaded, find_cluster(share.made_for(name)))["first"]
        asked.append(replace(question, stages=("step",)) if loaded is shrunk.get(name) else question)
    judge, answers = ask_here(asked)
    found = [
        fair(_as_parsed(verdicts), question.argv, loaded, judge)
        for loaded, question, verdicts in zip((*whole.values(), *shrunk.values()), asked, answers, strict=True)
    ]
    steps = [verdicts[-1] for verdicts in found[len(NAMES) :]]
    return dict(zip(NAMES, found, strict=False)), dict(zip(STEPPED, steps, strict=True))


def _as_parsed(verdicts: list[Verdict]) -> list[Verdict]:
    """A step's own parser refuses under the step's name."""
    alone = verdicts[-1].answer == "refused" and verdicts[-1].message.startswith("unrecognized arguments")
    return [*verdicts[:-1], replace(verdicts[-1], stage="parse")] if alone else verdicts


def told(verdicts: Iterable[Verdict], step: Verdict | None) -> dict[str, str]:
    """What is kept of a recipe's verdicts: of stage `build` and `step`, and of others where they did not pass."""
    found = {verdict.stage: _word(verdict) for verdict in verdicts}
    kept = {stage: word for stage, word in found.items() if stage == "build" or word != "passed"}
    return kept if step is None else {**kept, "step": _word(step)}


def _word(verdict: Verdict) -> str:
    return {"passed": "passed", "refused": f"refused: {verdict.message}"}.get(verdict.answer, verdict.feature)


def kept() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = yaml.safe_load(FILE.read_text())
    return found


def text(answers: dict[str, dict[str, str]]) -> str:
    """The file's text."""
    head = "# What the real Megatron said to each shipped recipe; pytest tests/settings --update-golden asks anew.\n"
    return head + yaml.safe_dump(answers, sort_keys=False, default_flow_style=None, width=200)
