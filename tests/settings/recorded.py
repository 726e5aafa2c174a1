"""How far every shipped recipe is judged here: by the option table, by the real Megatron, and by training steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import yaml

from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.launch.judges import ask_here, questions
from moekit.megatron.judgement import fair
from moekit.megatron.verdict import Verdict
from moekit.recipe.load import Loaded, load
from moekit.rehearse.small import for_the_world

FILE = Path(__file__).parent / "recorded.yaml"
"""What was answered, kept for docs/recipes.md; a test asks again."""

NAMES = share.shipped_recipes()


def taken_out(name: str) -> tuple[str, ...]:
    """What a recipe takes its steps without."""
    small = for_the_world(load(name).recipe)
    return tuple(limit.feature for limit in small.not_judged if limit.build != "replaced")


def ask() -> tuple[dict[str, list[Verdict]], dict[str, Verdict]]:
    """The stages' verdicts on every recipe, and stage `step`'s on the recipe made small."""
    whole = {name: load(name) for name in NAMES}
    small = {name: Loaded(for_the_world(loaded.recipe).recipe, loaded.source, name) for name, loaded in whole.items()}
    asked = []
    for name, loaded in (*whole.items(), *small.items()):
        question = questions(loaded, find_cluster(share.made_for(name)))["first"]
        asked.append(replace(question, stages=("step",)) if loaded is small[name] else question)
    judge, answers = ask_here(asked)
    found = [
        fair(verdicts, question.argv, loaded, judge)
        for loaded, question, verdicts in zip((*whole.values(), *small.values()), asked, answers, strict=True)
    ]
    steps = [verdicts[-1] for verdicts in found[len(NAMES) :]]
    return dict(zip(NAMES, found, strict=False)), dict(zip(NAMES, steps, strict=True))


def told(name: str, verdicts: Iterable[Verdict], step: Verdict) -> dict[str, str]:
    """What is kept of a recipe's verdicts: of stage `build` and `step`, and of others where they did not pass."""
    found = {verdict.stage: _word(verdict) for verdict in verdicts}
    kept = {stage: word for stage, word in found.items() if stage == "build" or word != "passed"}
    without = f" without {', '.join(gone)}" if (gone := taken_out(name)) else ""
    return {**kept, "step": _word(step) + without}


def _word(verdict: Verdict) -> str:
    return {"passed": "passed", "refused": f"refused: {verdict.message}"}.get(verdict.answer, verdict.feature)


def kept() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = yaml.safe_load(FILE.read_text())
    return found


def text(answers: dict[str, dict[str, str]]) -> str:
    """The file's text."""
    head = "# What the real Megatron said to each shipped recipe; pytest tests/settings --update-golden asks anew.\n"
    return head + yaml.safe_dump(answers, sort_keys=False, default_flow_style=None, width=200)
