"""A recipe's own run, made small and really trained: as rank 0 of its world, and with two processes.

`rehearse` asks one process that has Megatron imported, and hands out each part as it ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from moekit.launch import judges
from moekit.megatron.installed import Judge, find_judge
from moekit.megatron.judgement import fair, problem_of
from moekit.megatron.ranks import Training
from moekit.megatron.real import judge_each
from moekit.megatron.stages import STAGES, Question
from moekit.megatron.verdict import Verdict
from moekit.problems import error
from moekit.rehearse.plan import Part, Plan
from moekit.rehearse.two import trained, training


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
    small = judges.questions(replace(made.loaded, recipe=made.world.recipe), made.cluster)["first"]
    yield world, made.unready.get(world) or replace(small, stages=("step",))
    yield "two processes", training(made, folder)


def _ended(
    name: str, question: Question | Training, verdicts: Sequence[Verdict], made: Plan, judge: Judge, seconds: float
) -> Iterator[Part]:
    """The parts that one answer is about."""
    if isinstance(question, Training):
        yield from trained(question, verdicts, made, judge)
        return
    said = fair(verdicts, question.argv, made.loaded, judge) if question.stages == STAGES else verdicts
    problems = [problem_of(verdict, made.loaded, judge) for verdict in said if verdict.answer == "refused"]
    losses = next((verdict.losses for verdict in said if verdict.losses), ())
    yield Part(name, tuple(said), tuple(problems), losses, seconds)
