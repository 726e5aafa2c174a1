"""The real Megatron's judgement of a command line, on a machine without a GPU.

    python -m moekit.megatron.real < questions.json > answers.json

Importing Megatron takes 3 to 5 seconds and each question leaves its traces in the process (environment, globals,
determinism), so one process imports it once and forks for every question.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moekit.megatron.cpu_limits import cpu_limits
from moekit.megatron.stages import RUNNERS, STAGES, Parameters, Question, Run
from moekit.problems import error

Answer = Literal["passed", "refused", "not_judged"]


@dataclass(frozen=True)
class Verdict:
    """What one stage of Megatron says."""

    stage: str
    """One of `moekit.megatron.stages.STAGES`."""
    answer: Answer
    message: str = ""
    """Megatron's own words where it refuses (of a bare assert the source line), the reason where it is not judged."""
    place: str = ""
    """Where it refuses, `core/transformer/transformer_config.py:2621`; empty for the parser."""
    feature: str = ""
    """What is not judged."""
    parameters: Parameters | None = None
    """Of stage `build` where a model is built and one tensor- and pipeline-parallel rank holds it all."""


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


def judge_all(questions: Sequence[Question], megatron: str | None = None) -> list[list[Verdict]]:
    """`judge` for many questions: Megatron is imported once.

    `megatron` is a Megatron-LM checkout, None the installed megatron-core. Raises `MoekitError` if it does not import.
    """
    environment = dict(os.environ)
    paths = [megatron, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "moekit.megatron.real"]
    text = json.dumps([asdict(question) for question in questions])
    child = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, check=False)
    if child.returncode == _NO_MEGATRON:
        last = child.stderr.strip().splitlines()[-1]
        raise error(f"the real Megatron does not import: {last}", "`pip install 'moekit[local]'`, on Linux")
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{child.stderr}")
    return [[_verdict(fields) for fields in verdicts] for verdicts in json.loads(child.stdout)]


def _verdict(fields: dict[str, Any]) -> Verdict:
    parameters = fields.pop("parameters")
    return Verdict(**fields, parameters=Parameters(**parameters) if parameters else None)


# Below: inside the process that has Megatron.

_NO_MEGATRON = 3


def answer(question: Question) -> Iterator[Verdict]:
    """Run the stages of one question; Megatron must be loaded, and this process is spoilt afterwards."""
    from moekit.megatron.stages import pretend

    run = Run(question)
    pretend(question)
    for stage in STAGES:
        if stage not in question.stages:
            continue
        verdict = _build(run) if stage == "build" else _run_stage(stage, run)
        yield verdict
        if verdict.answer == "refused":
            return


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
        message, place = _message(problem, printed.getvalue()), _place(problem)
        if stage == "build" and not isinstance(problem, AssertionError | ValueError):
            return Verdict(stage, "not_judged", message, place, feature="a model of the local layers")
        return Verdict(stage, "refused", message, place)
    return Verdict(stage, "passed", parameters=parameters)


def _message(problem: BaseException, printed: str) -> str:
    """Megatron's words: argparse's last line, an exception's text, or the source of a bare assert."""
    if isinstance(problem, SystemExit):
        last = (printed.strip().splitlines() or [str(problem)])[-1]
        return last.removeprefix("pretrain_gpt.py: error: ")
    text = str(problem).strip()
    if isinstance(problem, AssertionError | ValueError | RuntimeError) and text:
        return text
    if isinstance(problem, AssertionError):
        frame = _frame(problem)
        first, last_line = frame.lineno or 0, frame.end_lineno or frame.lineno or 0
        return " ".join(linecache.getline(frame.filename, line).strip() for line in range(first, last_line + 1))
    return f"{type(problem).__name__}: {text}"


def _place(problem: BaseException) -> str:
    if isinstance(problem, SystemExit):
        return ""
    frame = _frame(problem)
    return f"{frame.filename.rpartition('/megatron/')[2]}:{frame.lineno}"


def _frame(problem: BaseException) -> traceback.FrameSummary:
    """The innermost frame of Megatron's."""
    frames = traceback.extract_tb(problem.__traceback__)
    return [frame for frame in frames if "/megatron/" in frame.filename and "/moekit/" not in frame.filename][-1]


def _in_a_fork(question: Question) -> list[dict[str, Any]]:
    """The verdicts of one question as JSON values, from a copy of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            text = json.dumps([asdict(verdict) for verdict in answer(question)])
            with os.fdopen(writing, "w") as pipe:
                pipe.write(text)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise RuntimeError(f"the process of {question} ended with {code}")
    answers: list[dict[str, Any]] = json.loads(text)
    return answers


def main() -> None:
    """Questions as JSON on standard input, verdicts as JSON on standard output."""
    output = os.dup(1)
    os.dup2(2, 1)  # what Megatron prints goes to standard error
    questions = [Question(**fields) for fields in json.load(sys.stdin)]
    from moekit.megatron.stages import load

    try:
        load()
    except ImportError as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        raise SystemExit(_NO_MEGATRON) from None
    answers = [_in_a_fork(question) for question in questions]
    with os.fdopen(output, "w") as pipe:
        json.dump(answers, pipe)


if __name__ == "__main__":
    main()
