"""The real Megatron's judgement of a command line, on a machine without a GPU.

Importing Megatron takes 3 to 5 seconds and each question leaves its traces in the process (environment, globals,
determinism), so one process imports it once and forks for every question, on all cores at a time
(`moekit.megatron.forks`); the stages (`moekit.megatron.stages`, `moekit.megatron.step`) run in the forks.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moekit.megatron import ranks, step
from moekit.megatron.cpu_limits import cpu_limits
from moekit.megatron.forks import ServerError, ask_each, in_a_fork, serve
from moekit.megatron.in_image import NO_MEGATRON
from moekit.megatron.ranks import Training
from moekit.megatron.stages import RUNNERS, STAGES, Question, Run
from moekit.megatron.verdict import Verdict, verdict_of
from moekit.problems import error

STAGES_LIMIT_S, STEP_LIMIT_S = 120.0, 60.0


def judge(
    argv: Sequence[str],
    world_size: int,
    capability: tuple[int, int] = (9, 0),
    transformer_engine: str | None = "2.14.0",
    env: Mapping[str, str] | None = None,
    stages: Sequence[str] = STAGES,
    megatron: str | None = None,
) -> list[Verdict]:
    """What each stage of the real Megatron says to `argv`, in order; the list ends at the first that refuses.

    See `moekit.megatron.stages.Question` for the arguments and `judge_all` for `megatron` and errors.
    """
    question = Question(argv, world_size, capability, transformer_engine, env, stages)
    return judge_all([question], megatron)[0]


def judge_all(
    questions: Sequence[Question], megatron: str | None = None, progress: Callable[[int], object] | None = None
) -> list[list[Verdict]]:
    """`judge` for many questions: Megatron is imported once.

    `megatron` is a Megatron-LM checkout, None the installed megatron-core. `progress` is told how many are judged.
    Raises `MoekitError` if Megatron does not import.
    """
    answers = []
    for verdicts in judge_each(questions, megatron, min(max(1, len(questions)), _cores())):
        answers.append(verdicts)
        if progress is not None:
            progress(len(answers))
    return answers


def judge_each(
    questions: Iterable[Question | Training], megatron: str | None = None, at_once: int | None = None
) -> Iterator[list[Verdict]]:
    """`judge_all`, each answer as it comes, in order, for any number of questions in constant memory.

    `at_once`: how many are judged at a time, by default as many as there are cores, at most 8.
    """
    environment = dict(os.environ)
    paths = [megatron, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["OMP_NUM_THREADS"] = "1"  # a fork of a process with threads would wait for them for ever
    command = [sys.executable, "-m", "moekit.megatron.real"]
    asked = (asdict(question) for question in questions)
    try:
        for answers in ask_each(command, environment, asked, at_once or _cores()):
            yield [verdict_of(fields) for fields in answers]
    except ServerError as problem:
        if problem.code == NO_MEGATRON:
            last = str(problem).strip().splitlines()[-1]
            raise error(
                f"the real Megatron does not import: {last}", "`pip install 'moekit[local]'`, on Linux"
            ) from None
        raise RuntimeError(f"{' '.join(command)} failed:\n{problem}") from None


def _cores() -> int:
    return min(8, len(os.sched_getaffinity(0)))


# Below: inside the process that has Megatron.


def answer(question: Question) -> list[dict[str, Any]]:
    """The verdicts of one question as JSON values, each part in a fork of this process, which must have Megatron."""
    asked = [stage for stage in STAGES if stage in question.stages]
    verdicts = _until_it_ends(lambda: _stages(question, asked), asked, STAGES_LIMIT_S) if asked else []
    if "step" in question.stages and all(verdict["answer"] != "refused" for verdict in verdicts):
        step.prepare()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            verdicts += _until_it_ends(lambda: iter([_step(question, Path(folder))]), ["step"], STEP_LIMIT_S)
    return verdicts


def _until_it_ends(work: Callable[[], Iterator[Verdict]], stages: list[str], limit_s: float) -> list[dict[str, Any]]:
    """The verdicts of `work` in a fork; of a fork that is killed or dies, the stage it was in is not judged."""
    verdicts, why = in_a_fork(lambda: (asdict(verdict) for verdict in work()), limit_s)
    if why:
        message = f"it does not end in {limit_s:.0f} s" if why == "time" else f"its process ends with {why}"
        verdicts.append(asdict(Verdict(stages[len(verdicts)], "not_judged", message, feature=why.split()[0])))
    return verdicts


def _stages(question: Question, stages: list[str]) -> Iterator[Verdict]:
    """Run these stages; this process is spoilt afterwards."""
    from moekit.megatron.stages import pretend

    run = Run(question)
    pretend(question)
    for index, stage in enumerate(stages):
        verdict = _build(run) if stage == "build" else _run_stage(stage, run)
        yield verdict
        if verdict.answer == "refused":
            return
        if verdict.answer == "not_judged" and stage in LEFT_FOR_THE_NEXT:
            yield from (replace(verdict, stage=later, place="") for later in stages[index + 1 :])
            return


LEFT_FOR_THE_NEXT = ("parse", "validate", "config", "groups")
"""Stages without whose work the later ones have nothing to judge."""


def _step(question: Question, folder: Path) -> Verdict:
    """Stage `step`, from the parser on: of the stages before it, this process must know nothing."""
    from moekit.megatron.stages import pretend

    run = Run(question)
    pretend(question)
    for stage in ("parse", "validate"):
        verdict = _run_stage(stage, run)
        if verdict.answer == "refused":
            return replace(verdict, stage="step")
    if lacking := step.not_judged(run.args):
        return Verdict("step", "not_judged", lacking[1], feature=lacking[0])
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            steps = step.step(run.args, folder)
    except (Exception, SystemExit) as problem:
        return step.answer_to("step", problem, printed.getvalue())
    return Verdict("step", "passed", losses=tuple(steps.losses), grad_norms=tuple(steps.grad_norms))


def _build(run: Run) -> Verdict:
    """Stage `build`, not judged where what it would build is not what the run builds."""
    if run.args.vocab_size is None and run.args.padded_vocab_size is None:
        return Verdict("build", "not_judged", "the tokenizer says how large it is", feature="vocabulary")
    limits = [limit for limit in cpu_limits(vars(run.args)) if limit.build != "replaced"]
    if not limits:
        return _run_stage("build", run)
    first = limits[0]
    verdict = Verdict("build", "not_judged", first.reason, feature=first.feature)
    if first.build == "impossible":
        return verdict
    built = _run_stage("build", run)
    return built if built.answer == "refused" else replace(verdict, parameters=built.parameters)


def _run_stage(stage: str, run: Run) -> Verdict:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            parameters = RUNNERS[stage](run)
    except (Exception, SystemExit) as problem:
        if isinstance(problem, SystemExit) and not problem.code:
            return Verdict(stage, "refused", "ends Megatron without training")  # --help
        verdict = step.answer_to(stage, problem, printed.getvalue())
        if verdict.answer == "refused" and stage == "build" and not isinstance(problem, AssertionError | ValueError):
            return replace(verdict, answer="not_judged", feature="a model of the local layers")
        return verdict
    return Verdict(stage, "passed", parameters=parameters)


def _any_answer(fields: dict[str, Any]) -> list[dict[str, Any]]:
    if "starts" not in fields:
        return answer(Question(**fields))
    starts = [ranks.Start(**start) for start in fields["starts"]]
    return ranks.answer(Training(starts, fields["processes"]))


def main(sockets: list[str]) -> None:
    """Answer the questions that come on these sockets; exit code 3 if there is no Megatron."""
    from moekit.megatron.stages import load

    try:
        load()
    except ImportError as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        raise SystemExit(NO_MEGATRON) from None
    serve(map(int, sockets), _any_answer)


if __name__ == "__main__":
    main(sys.argv[1:])
