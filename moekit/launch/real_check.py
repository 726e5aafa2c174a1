"""`moekit check --real`: recipes before the real Megatron, and what is printed of its answers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moekit.cluster.profile import Cluster
from moekit.launch import judges
from moekit.megatron.installed import Judge
from moekit.megatron.judgement import fair, problem_of, summary
from moekit.megatron.stages import Question
from moekit.megatron.verdict import Verdict
from moekit.problems import Problem
from moekit.recipe.load import Loaded


@dataclass(frozen=True)
class Judged:
    """What the real Megatron says of one recipe."""

    lines: list[str]
    """For people: what each stage said, in one line; a second where a start from the run's own checkpoint differs."""
    problems: list[Problem] = field(default_factory=list)
    """Its refusals, at the recipe's fields."""
    values: dict[str, Any] = field(default_factory=dict)
    """For scripts: the Megatron, and every verdict with its start (`first`, `resume`) and `where`."""


@dataclass(frozen=True)
class Start:
    """One way a run starts, and what Megatron says of its arguments."""

    name: str
    """`first`, or `resume`: from the run's own checkpoint."""
    question: Question
    verdicts: list[Verdict]


def real_check(
    recipes: Mapping[str, Loaded], cluster: Cluster, megatron: str | None, in_image: bool
) -> dict[str, Judged]:
    """Ask for each recipe, by the name it was given; Megatron is imported once for all.

    `megatron` is a checkout, None the installed one or that of the profile.

    Raises:
        MoekitError: there is no Megatron to ask.
    """
    if megatron and in_image:
        cluster = replace(cluster, megatron_path=megatron)
    asked: dict[tuple[str, str], Question] = {}
    unasked: dict[str, Judged] = {}
    for name, loaded in recipes.items():
        if reason := _unaskable(loaded):
            unasked[name] = Judged([f"not judged: {reason}"])
        else:
            questions = judges.questions(loaded, cluster, in_image)
            asked |= {(name, start): question for start, question in questions.items()}
    if not asked:
        return unasked
    _say(f"asking the real Megatron {'by srun' if in_image else '(5 seconds to import it)'} ...")
    if in_image:
        judge, answers = judges.ask_in_image(list(asked.values()), cluster)
    else:
        judge, answers = judges.ask_here(list(asked.values()), megatron or "installed")
    starts: dict[str, list[Start]] = {name: [] for name in recipes}
    for ((name, start), question), verdicts in zip(asked.items(), answers, strict=True):
        starts[name].append(Start(start, question, fair(verdicts, question.argv, recipes[name], judge)))
    return {name: unasked.get(name) or _judged(starts[name], loaded, judge) for name, loaded in recipes.items()}


def _unaskable(loaded: Loaded) -> str:
    """Why Megatron cannot be asked, empty where it can."""
    if loaded.problems:
        return "not all of its fields can be read"
    return "" if loaded.recipe.parallel.gpus else "`parallel.gpus` is not set"


def _judged(starts: Sequence[Start], loaded: Loaded, judge: Judge) -> Judged:
    made_up = judges.makes_up_vocabulary(loaded.recipe)
    lines: list[str] = []
    problems: list[Problem] = []
    values = []
    for start in starts:
        line = summary(start.verdicts, start.question.stages, loaded, judge)
        if made_up and any((verdict.stage, verdict.answer) == ("build", "passed") for verdict in start.verdicts):
            line += f"; made-up vocabulary ({judges.MADE_UP_VOCABULARY:,} tokens: the tokenizer is not read)"
        if line not in lines:
            lines.append(line)
        for verdict in start.verdicts:
            problem = problem_of(verdict, loaded, judge) if verdict.answer == "refused" else None
            if problem and problem not in problems:
                problems.append(problem)
            values.append({"start": start.name, **verdict.told(), "where": problem.where if problem else ""})
    shown = [lines[0], *(f"from its own checkpoint: {line}" for line in lines[1:])]
    return Judged(shown, problems, {"judge": asdict(judge), "verdicts": values})


def _say(text: str) -> None:
    """A word to whoever waits."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
