"""The part of a rehearsal that really trains: two processes, a checkpoint, and a start from it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from moekit.job.endings import not_a_number
from moekit.launch.folders import write
from moekit.launch.processes import environment
from moekit.launch.run_files import job_variables, run_files
from moekit.launch.rundir import run_dir
from moekit.megatron.installed import Judge
from moekit.megatron.judgement import problem_of
from moekit.megatron.ranks import Start, Training
from moekit.megatron.verdict import Verdict
from moekit.problems import Problem
from moekit.recipe.load import Loaded
from moekit.rehearse.plan import Part, Plan
from moekit.watch.metrics import LOSS, MetricsReader, merge

PROCESSES = 2


def training(made: Plan, folder: Path) -> Training | str:
    """What is asked: the small runs' directories are made, in `folder`/runs; a text where there is no small run.

    First the run whose checkpoint the recipe begins from, where it does; then its own, and one from what it saved.
    """
    if unready := made.unready.get("parent") or made.unready.get("two processes"):
        return unready
    return Training(list(_starts(made, folder)), PROCESSES)


def _starts(made: Plan, folder: Path) -> Iterator[Start]:
    recipe = made.two.recipe
    if made.parent is not None and recipe.checkpoint.from_run:
        yield from _starts_of(replace(made.loaded, recipe=made.parent.recipe), recipe.checkpoint.from_run, folder, 1)
    times = 2 if recipe.checkpoint.save else 1
    yield from _starts_of(replace(made.loaded, recipe=recipe), made.loaded.name, folder, times)


def _starts_of(small: Loaded, name: str, folder: Path, times: int) -> Iterator[Start]:
    run = run_dir(folder, name)
    write(run.path, run_files(small, name, folder))
    for argv in (run.argv_first, run.argv_resume)[:times]:
        number = run.new_attempt()
        own = small.recipe.runtime.environment or {}
        given = environment("cpu", PROCESSES, number, job_variables(small.recipe), own, os.environ)
        place = str(run.attempt(number).path.relative_to(run.path))
        yield Start(str(run.path), place, argv.read_text(encoding="utf-8").splitlines(), given)


def trained(question: Training, verdicts: Sequence[Verdict], made: Plan, judge: Judge) -> Iterator[Part]:
    """A part for each start that was made."""
    for start, verdict in zip(question.starts, verdicts, strict=False):
        log = Path(start.run, start.attempt, "train.log")
        losses_by_step = _losses(start)
        problems = [problem_of(verdict, made.loaded, judge)] if verdict.answer == "refused" else []
        if wrong := _wrong(verdict, start, losses_by_step, log):
            verdict = replace(verdict, answer="refused", message=wrong)
            problems = [Problem(made.loaded.source.shown, f"in the rehearsal {wrong}", f"its log is {log}")]
        title = _title(start, made, len(question.starts) > 1)
        yield Part(title, (verdict,), tuple(problems), tuple(losses_by_step.values()), verdict.seconds)


def _title(start: Start, made: Plan, several: bool) -> str:
    run = Path(start.run).name
    if not several:
        return "two processes"
    if made.parent is not None and run == made.two.recipe.checkpoint.from_run:
        return f"two processes, run `{run}` that it begins from"
    return "two processes, " + ("first start" if start.attempt.endswith("/1") else "from its checkpoint")


def _losses(start: Start) -> dict[int, float]:
    """LM loss by iteration, nats."""
    logged = MetricsReader(Path(start.run)).poll()
    steps = merge([step for step in logged if step.attempt == int(Path(start.attempt).name)])
    return {step: metrics[LOSS] for step, metrics in steps.items() if LOSS in metrics}


def _wrong(verdict: Verdict, start: Start, losses: dict[int, float], log: Path) -> str:
    """What the run's files tell better than its end: NaN, no step, or steps from the beginning; else empty."""
    if verdict.answer == "refused":
        return not_a_number(log.read_text(errors="replace")) if log.exists() else ""
    if verdict.answer == "passed" and not losses:
        return "Megatron ends without a training step"
    if verdict.answer == "passed" and min(losses) == 1 and Path(start.attempt).name != "1":
        return "training begins anew instead of from its checkpoint"
    infinite = [f"the loss of iteration {step} is {loss}" for step, loss in losses.items() if not math.isfinite(loss)]
    return infinite[0] if infinite else ""
