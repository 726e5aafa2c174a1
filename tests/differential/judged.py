"""A recipe's two answers, ours and Megatron's, and what they come to beside each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from generate import MEGATRON, Values, cluster, fields, loaded

from moekit.launch.judges import questions
from moekit.megatron.stages import Question
from moekit.megatron.verdict import Verdict
from moekit.recipe.check import problems_of
from moekit.recipe.cpu import cpu_problems
from moekit.recipe.load import Loaded
from moekit.recipe.names import RUN_NAME
from moekit.recipe.rules import RULES, data, stage_of
from moekit.recipe.schema import Recipe
from moekit.recipe.schema.markers import Flag

Kind = Literal["both accept", "both refuse", "false accept", "false refusal", "masked", "ours alone", "not judged"]
DISAGREEMENTS: tuple[Kind, ...] = ("false accept", "false refusal", "masked")


OUR_NAMES = {"container": "config", "step": "first step"}
"""The stages whose names rules do not use, as `moekit.recipe.rules.STAGES` has them."""


@dataclass(frozen=True)
class Refusal:
    """One error of ours."""

    source: str
    """The rule by name; else `schema FIELD`, `option table` or `cpu`."""
    stage: str
    """Where Megatron would notice, as `moekit.recipe.rules.STAGES` has it."""
    what: str


@dataclass(frozen=True)
class Finding:
    """One thing that two answers come to."""

    kind: Kind
    group: str
    """What findings are counted by: Megatron's place, our rule, or the feature that is not judged."""
    said: str = ""
    """Megatron's words where it refuses, else ours."""


def refusals(values: Values, profile: str) -> list[Refusal]:
    """Everything that `moekit check` says against a recipe at the level of an error, and who says it."""
    ours, target = loaded(values), cluster(profile)
    errors = [problem.what for problem in problems_of(ours, target) if problem.level == "error"]
    if not errors:
        return []
    found = [Refusal(f"schema {problem.what.split('`')[1]}", "never", problem.what) for problem in ours.problems]
    if not ours.problems:
        found += _of_rules(ours.recipe, profile)
    if ours.recipe.runtime.device == "cpu":
        found += [Refusal("cpu", "never", problem.what) for problem in cpu_problems(ours) if problem.what in errors]
    known = {refusal.what for refusal in found}
    left = [what for what in errors if what not in known]
    ours_alone = re.compile(r", which (the launch sets|has a field)")  # said twice, Megatron takes the last
    return found + [Refusal("option table", "never" if ours_alone.search(what) else "parse", what) for what in left]


def _of_rules(recipe: Recipe, profile: str) -> list[Refusal]:
    return [
        Refusal(rule.__name__, stage_of(rule), violation.what)
        for rule in RULES
        for violation in rule(recipe, cluster(profile))
        if violation.level == "error"
    ]


def question(values: Values, profile: str, step: bool = False) -> Question:
    """What the real Megatron is asked: the command line and the environment of the recipe's launch.

    What a field cannot take is said to Megatron all the same, as it is written.
    """
    ours = loaded(values)
    parent = ours.recipe.checkpoint.from_run
    if parent is not None and not RUN_NAME.fullmatch(parent):  # no launch makes a path of it
        ours = loaded({**values, "checkpoint.from_run": "parent"})
    asked = questions(ours, cluster(profile))["first"]
    return replace(
        asked,
        argv=[*asked.argv, *_unread(ours, values)],
        stages=[*asked.stages, "step"] if step else asked.stages,
    )


def step_question(values: Values, profile: str) -> Question:
    """A step of training alone."""
    return replace(question(values, profile), stages=["step"])


def needs_step(ours: Sequence[Refusal]) -> bool:
    """Whether only a training step can contradict what we refuse."""
    stages = {refusal.stage for refusal in ours}
    return "first step" in stages and stages <= {"first step", "later", "never"}


def _unread(ours: Loaded, values: Values) -> list[str]:
    """The words of fields whose values the schema refuses."""
    words = []
    for problem in ours.problems:
        name = problem.what.split("`")[1]
        option = next((mark.option for mark in fields().get(name, ((), ()))[1] if isinstance(mark, Flag)), None)
        if option is not None and name in values:
            value = values[name]
            words += [option, *map(str, value if isinstance(value, list) else [value])]
    return words


def findings(values: Values, ours: Sequence[Refusal], theirs: Sequence[Verdict]) -> list[Finding]:
    """What a recipe's two answers come to: one finding, and one more for each rule that Megatron contradicts."""
    if values.get("megatron.version", MEGATRON) != MEGATRON:
        return [Finding("not judged", "another Megatron")]
    refused = next((verdict for verdict in theirs if verdict.answer == "refused"), None)
    wrong = _contradicted(values, ours, theirs)
    if refused is not None:
        group = f"{refused.stage} {refused.place or _unnumbered(refused.message)}"
        if not ours:
            return [Finding("false accept", group, refused.message)]
        explained = any(_told(refusal, refused.stage) for refusal in ours)
        return [*wrong, Finding("both refuse" if explained else "masked", group, refused.message)]
    unjudged = [Finding("not judged", f"{v.stage}: {v.feature}") for v in theirs if v.answer == "not_judged"]
    if not ours:
        return unjudged or [Finding("both accept", "")]
    if wrong:
        return wrong
    alone = [r for r in ours if r.stage in ("never", "later")]
    if alone:
        return [Finding("ours alone", refusal.source, refusal.what) for refusal in alone]
    return unjudged or [Finding("not judged", f"{refusal.stage}: not asked") for refusal in ours]


def _told(refusal: Refusal, stage: str) -> bool:
    """Whether a refusal of ours can be what Megatron refuses at a stage."""
    return refusal.stage == OUR_NAMES.get(stage, stage) or refusal.source.startswith("schema")


def _contradicted(values: Values, ours: Sequence[Refusal], theirs: Sequence[Verdict]) -> list[Finding]:
    """Rules whose stage was judged and passed."""
    answers: dict[str, set[str]] = {}
    for verdict in theirs:
        answers.setdefault(OUR_NAMES.get(verdict.stage, verdict.stage), set()).add(verdict.answer)
    passed = {stage for stage, said in answers.items() if said == {"passed"}}
    if values.get("parallel.pipeline_model") not in (None, 1):
        passed -= {"build", "first step"}  # of the first pipeline stage alone
    last = theirs[-1]
    # A step reads made-up data with a tokenizer that reads nothing, and runs without fused kernels.
    unseen = {"quantiles_go_without_fusion", *(rule.__name__ for rule in data.RULES)}
    later = f"; refused at {last.stage}: {last.message}" if last.answer == "refused" else ""
    return [
        Finding("false refusal", f"{refusal.source} ({refusal.stage})", refusal.what + later)
        for refusal in ours
        if refusal.stage in passed and not (refusal.stage == "first step" and refusal.source in unseen)
    ]


def _unnumbered(message: str) -> str:
    """The parser's message, which has no place, up to the value that it is about."""
    return message.partition(": '")[0].partition(": invalid")[0][:80]


def as_json(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """Verdicts as a line of a file keeps them."""
    return [[v.stage, v.answer, v.message[:500], v.place, v.feature] for v in verdicts]


def from_json(rows: list[list[Any]]) -> list[Verdict]:
    """Verdicts of a line that `as_json` wrote."""
    return [Verdict(*row) for row in rows]
