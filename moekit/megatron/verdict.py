"""What the real Megatron answers: a verdict of one stage, and how a refusal of its own is read off the exception."""

from __future__ import annotations

import linecache
import re
import traceback
from dataclasses import dataclass
from typing import Any, Literal

from moekit.megatron.names import names_at
from moekit.megatron.stages import Parameters

Answer = Literal["passed", "refused", "not_judged"]


@dataclass(frozen=True)
class Verdict:
    """What one stage of Megatron says."""

    stage: str
    """One of `moekit.megatron.stages.STAGES`, or `step`."""
    answer: Answer
    message: str = ""
    """Megatron's own words where it refuses (of a bare assert the source line), the reason where it is not judged."""
    place: str = ""
    """Where it refuses, `core/transformer/transformer_config.py:2621`; empty for the parser."""
    feature: str = ""
    """What is not judged."""
    parameters: Parameters | None = None
    """Of stage `build` where a model is built and one tensor- and pipeline-parallel rank holds it all."""
    names: tuple[str, ...] = ()
    """Dests and config fields that the refusing statement and the `if`s around it read, nearest first."""
    losses: tuple[float, ...] | None = None
    """Of stage `step`: each iteration's, to the last bit; empty where the last pipeline stage is another rank's."""
    grad_norms: tuple[float, ...] | None = None
    """Of stage `step`, likewise."""
    seconds: float = 0.0
    """Of stage `train`: how long it took."""

    def told(self) -> dict[str, str]:
        """What a script is told of it."""
        return {name: getattr(self, name) for name in ("stage", "answer", "message", "place", "feature")}


def verdict_of(fields: dict[str, Any]) -> Verdict:
    """The verdict that `answer` gave, from its JSON values."""
    parameters = fields.pop("parameters")
    tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Verdict(**{**fields, **tuples}, parameters=Parameters(**parameters) if parameters else None)


def refusal(stage: str, problem: BaseException, printed: str) -> Verdict:
    """The verdict of a stage that ended with `problem` after it had `printed`."""
    message = _message(problem, printed)
    if isinstance(problem, SystemExit):
        return Verdict(stage, "refused", message)
    frame = _frame(problem)
    place = f"{frame.filename.rpartition('/megatron/')[2]}:{frame.lineno}"
    return Verdict(stage, "refused", message, place, names=names_at(frame.filename, frame.lineno or 0))


def _message(problem: BaseException, printed: str) -> str:
    """Megatron's words: argparse's last line, an exception's text, or the source of a bare assert."""
    if isinstance(problem, SystemExit):
        last = (printed.strip().splitlines() or [str(problem)])[-1]
        return last.removeprefix("pretrain_gpt.py: error: ")
    text = re.sub(r"^\[enforce fail at \S+\] .*?\. ", "", str(problem).strip())  # gloo's own source
    if isinstance(problem, AssertionError | ValueError | RuntimeError) and text:
        return text
    if isinstance(problem, AssertionError):
        frame = _frame(problem)
        first, last_line = frame.lineno or 0, frame.end_lineno or frame.lineno or 0
        return " ".join(linecache.getline(frame.filename, line).strip() for line in range(first, last_line + 1))
    return f"{type(problem).__name__}: {text}"


def _frame(problem: BaseException) -> traceback.FrameSummary:
    """The innermost frame of Megatron's."""
    frames = traceback.extract_tb(problem.__traceback__)
    return [frame for frame in frames if "/megatron/" in frame.filename and "/moekit/" not in frame.filename][-1]
