"""The rules against the real Megatron: what they refuse it refuses, at the stage they say; what they pass it passes.

A stage that a CPU cannot judge says so with the feature, and is no proof either way.
"""

from __future__ import annotations

import contextlib
from importlib.metadata import version
from pathlib import Path

import pytest
from cases import BROKEN, FINE, Case, label

from moekit.cluster.profile import Cluster, find_cluster
from moekit.launch.judges import CAPABILITIES
from moekit.launch.run_files import run_arguments
from moekit.launch.script import environment
from moekit.megatron.flags import argv
from moekit.megatron.judgement import shown_stage
from moekit.megatron.real import judge_all
from moekit.megatron.stages import STAGES, Question
from moekit.megatron.verdict import Verdict
from moekit.problems import MoekitError
from moekit.recipe.load import load
from moekit.recipe.rules import stage_of
from moekit.recipe.schema import Recipe

pytestmark = pytest.mark.megatron


def question(recipe: Recipe, cluster: Cluster, stages: tuple[str, ...]) -> Question:
    variables = {name: value for name, value in environment(recipe, cluster).items() if value is not None}
    return Question(
        argv=argv(run_arguments(recipe, "run", "/shared", resume=False)),
        world_size=recipe.parallel.gpus or 1,
        capability=CAPABILITIES[cluster.gpu],
        transformer_engine=cluster.transformer_engine,
        environment=variables,
        stages=stages,
    )


def verdicts(cases: list[Case], change: str, here: Path) -> list[list[Verdict]]:
    """What the real stages say to each case's `broken` or `fine` change; nothing to one of another Megatron."""
    questions: dict[int, Question] = {}
    for index, case in enumerate(cases):
        path = case.write(here / f"{index}.yaml", getattr(case, change))
        wants_a_step = case.rule and stage_of(case.function) in ("first step", "later", "never")
        stages = (*(s for s in STAGES if s != "step"), *(["step"] if wants_a_step else []))
        recipe = load(str(path)).recipe
        if recipe.megatron.version != version("megatron-core"):
            continue
        with contextlib.suppress(MoekitError):  # a parent whose name is no run's
            questions[index] = question(recipe, find_cluster(case.profile), stages)
    answers = dict(zip(questions, judge_all(list(questions.values())), strict=True))
    return [answers.get(index, []) for index in range(len(cases))]


def told(verdict: Verdict) -> str:
    """The stage of the rules' docstrings that a stage of the real thing is."""
    return "first step" if verdict.stage == "step" else shown_stage(verdict.stage)


def test_megatron_refuses_what_the_rules_refuse_where_they_say(here: Path) -> None:
    cases = [case for case in BROKEN if case.rule]
    wrong = {}
    for case, found in zip(cases, verdicts(cases, "broken", here), strict=True):
        stage, refused = stage_of(case.function), [verdict for verdict in found if verdict.answer == "refused"]
        unjudged = [verdict for verdict in found if verdict.answer == "not_judged"]
        if stage in ("later", "never") or not found:
            agrees = not refused
        else:
            agrees = told(refused[0]) == stage if refused else any(told(verdict) == stage for verdict in unjudged)
        if not agrees:
            said = [f"{told(verdict)}: {verdict.message} ({verdict.place})" for verdict in refused] or ["passed"]
            wrong[f"{case.rule}, {case.broken!r}"] = f"{stage}, but Megatron: {said[0]}"
    assert wrong == {}


def test_megatron_refuses_nothing_that_the_rules_allow(here: Path) -> None:
    wrong = {}
    for case, found in zip(FINE, verdicts(FINE, "fine", here), strict=True):
        if refused := [verdict for verdict in found if verdict.answer == "refused"]:
            wrong[f"{label(case)}, {case.fine!r}"] = f"{refused[0].stage}: {refused[0].message} ({refused[0].place})"
    assert wrong == {}
