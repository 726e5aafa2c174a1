"""A recipe's own run, made small and really trained: as rank 0 of its world, and with two processes.

`rehearse` asks one process that has Megatron imported, and hands out each part as it ends.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moekit.launch import judges
from moekit.launch.cluster import Cluster
from moekit.launch.failure import not_a_number
from moekit.launch.processes import environment
from moekit.launch.rundir import run_dir, run_files, write
from moekit.megatron.cpu_limits import Limit
from moekit.megatron.installed import Judge, find_judge
from moekit.megatron.judgement import fair, problem_of
from moekit.megatron.ranks import Start, Training
from moekit.megatron.real import judge_each
from moekit.megatron.stages import STAGES, Question
from moekit.megatron.verdict import Verdict
from moekit.problems import Problem, error
from moekit.recipe.check import problems_of
from moekit.recipe.load import Loaded
from moekit.rehearse.edit import Change
from moekit.rehearse.small import Small, for_the_world, for_two, parent
from moekit.watch.metrics import LOSS, MetricsReader, merge

PROCESSES = 2


@dataclass(frozen=True)
class Part:
    """One part of a rehearsal, and what came of it."""

    name: str
    """`full size`, `rank 0 of N`, or `two processes` with the start it is."""
    verdicts: tuple[Verdict, ...]
    problems: tuple[Problem, ...] = ()
    """Refusals, at the user's fields."""
    losses: tuple[float, ...] = ()
    """LM loss of each iteration, nats; it says nothing where the other ranks are made up."""
    seconds: float = 0.0
    """Since the part before ended."""

    @property
    def answer(self) -> str:
        """`refused`, `not_judged` where nothing passed, else `passed`."""
        answers = {verdict.answer for verdict in self.verdicts}
        return next((word for word in ("refused", "passed") if word in answers), "not_judged")


@dataclass(frozen=True)
class Plan:
    """What a rehearsal will do; nothing is written yet."""

    loaded: Loaded
    cluster: Cluster
    world: Small
    two: Small
    parent: Small | None
    unready: dict[str, str] = field(default_factory=dict)
    """Parts that cannot be made small, with the reason: a rule that the small recipe breaks."""

    @property
    def left_out(self) -> list[Limit]:
        """What a CPU cannot do, and so is taken out or replaced."""
        found = {limit.feature: limit for small in (self.world, self.two) for limit in small.not_judged}
        return list(found.values())

    @property
    def changes(self) -> dict[str, tuple[Change, ...]]:
        """Every field that differs from the recipe, by the part."""
        changes = {f"rank 0 of {self.ranks}": self.world.changes, "two processes": self.two.changes}
        return changes | ({"parent": self.parent.changes} if self.parent else {})

    @property
    def ranks(self) -> int:
        """Of the recipe's own world."""
        return self.loaded.recipe.parallel.gpus or 1


def plan(loaded: Loaded, cluster: Cluster) -> Plan:
    """Make a recipe small, twice.

    Raises:
        MoekitError: it does not say how many GPUs it has.
    """
    if not loaded.recipe.parallel.gpus:
        raise error("`parallel.gpus` is not set", "a rehearsal keeps the layout over all of them", loaded.source.shown)
    made = Plan(loaded, cluster, for_the_world(loaded.recipe), for_two(loaded.recipe), parent(loaded.recipe))
    smalls = {f"rank 0 of {made.ranks}": made.world, "parent": made.parent, "two processes": made.two}
    for name, small in smalls.items():
        if small is not None:
            broken = [p for p in problems_of(replace(loaded, recipe=small.recipe), cluster) if p.level == "error"]
            if broken:
                made.unready[name] = broken[0].what
    return made


def rehearse(plans: Sequence[Plan], folder: Path) -> Iterator[Iterator[Part]]:
    """For each plan its parts as they end, up to the first that is refused; the runs of plan N lie in `folder`/N/runs.

    Raises:
        MoekitError: there is no Megatron here.
    """
    judge = find_judge()
    if judge is None:
        raise error("there is no Megatron here to rehearse with", "`pip install 'moekit[local]'` (Linux, about 3 GB)")
    parts = [list(_parts(made, folder / str(number))) for number, made in enumerate(plans, 1)]
    asked = [question for several in parts for _, question in several if not isinstance(question, str)]
    answers = judge_each(asked, at_once=1)
    unread: Iterator[tuple[str, Asked]] = iter(())
    try:
        for made, several in zip(plans, parts, strict=True):
            for _, question in unread:
                if not isinstance(question, str):
                    next(answers)
            unread = iter(several)
            yield _rehearsed(made, unread, answers, judge)
    finally:
        answers.close()  # type: ignore[attr-defined]  # a generator's: nothing of the asked process outlives it


def _rehearsed(
    made: Plan, parts: Iterator[tuple[str, Asked]], answers: Iterator[list[Verdict]], judge: Judge
) -> Iterator[Part]:
    for name, question in parts:
        if isinstance(question, str):
            yield Part(name, (Verdict("train", "not_judged", question, feature="a small recipe"),))
            continue
        began = time.monotonic()
        verdicts = next(answers)
        found = list(_ended(name, question, verdicts, made, judge, time.monotonic() - began))
        yield from found
        if any(part.answer == "refused" for part in found):
            return


Asked = Question | Training | str
"""What is asked of Megatron; a text says why a part cannot be."""


def _parts(made: Plan, folder: Path) -> Iterator[tuple[str, Asked]]:
    """What is asked, in order."""
    for start, question in judges.questions(made.loaded, made.cluster).items():
        yield "full size" if start == "first" else "full size, from its checkpoint", question
    world = f"rank 0 of {made.ranks}"
    small = replace(made.loaded, recipe=made.world.recipe)
    yield world, made.unready.get(world) or _step(small, made.cluster)
    unready = made.unready.get("parent") or made.unready.get("two processes")
    yield "two processes", unready or Training(list(_starts(made, folder)), PROCESSES)


def _step(small: Loaded, cluster: Cluster) -> Question:
    return replace(judges.questions(small, cluster)["first"], stages=("step",))


def _starts(made: Plan, folder: Path) -> Iterator[Start]:
    """Of the run whose checkpoint the recipe begins from, where it does; then its own, and one from what it saved."""
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
        last_iters = small.recipe.monitor.routing_trace_last_iters
        given = environment("cpu", PROCESSES, number, last_iters, small.recipe.runtime.environment or {}, os.environ)
        place = str(run.attempt(number).path.relative_to(run.path))
        yield Start(str(run.path), place, argv.read_text(encoding="utf-8").splitlines(), given)


def _ended(
    name: str, question: Question | Training, verdicts: Sequence[Verdict], made: Plan, judge: Judge, seconds: float
) -> Iterator[Part]:
    """The parts that one answer is about: each start of two processes is one."""
    loaded = made.loaded
    if isinstance(question, Question):
        said = fair(verdicts, question.argv, loaded, judge) if question.stages == STAGES else verdicts
        problems = [problem_of(verdict, loaded, judge) for verdict in said if verdict.answer == "refused"]
        losses = next((verdict.losses for verdict in said if verdict.losses), ())
        yield Part(name, tuple(said), tuple(problems), losses, seconds)
        return
    for start, verdict in zip(question.starts, verdicts, strict=False):
        log = Path(start.run, start.attempt, "train.log")
        losses_by_step = _losses(start)
        problems = [problem_of(verdict, loaded, judge)] if verdict.answer == "refused" else []
        if wrong := _wrong(verdict, start, losses_by_step, log):
            verdict = replace(verdict, answer="refused", message=wrong)
            problems = [Problem(loaded.source.shown, f"in the rehearsal {wrong}", f"its log is {log}")]
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
