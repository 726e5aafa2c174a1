"""What a user did wrong, in one shape: where, what, and what to do next.

Everything that refuses a user's input raises `MoekitError`; the command line prints its problems and exits with 1.
Any other exception is a defect of moekit and keeps its traceback.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TextIO

Level = Literal["error", "warning"]

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What no terminal shows and no command line carries: control characters, other line ends, halves of characters."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or looks wrong, with what the user gave."""

    where: str
    """`file:line`, a file or a command; empty where no place is known."""
    what: str
    """One sentence in the present tense, the user's own names in backticks, no final period."""
    hint: str = ""
    """What to do next; empty where there is nothing to add."""
    level: Level = "error"


class MoekitError(Exception):
    """One or more problems with the user's input; nothing was done."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(format_problem(problem) for problem in problems))
        self.problems = problems


def error(what: str, hint: str = "", where: str = "") -> MoekitError:
    """A `MoekitError` of one problem, to raise."""
    return MoekitError(Problem(where, what, hint))


def format_problem(problem: Problem) -> str:
    """`where: what` and, indented below it, `hint: ...`."""
    place = f"{problem.where}: " if problem.where else ""
    if problem.level == "warning":
        place += "warning: "
    elif not problem.where:
        place = "error: "
    text = CONTROL.sub("?", f"{place}{problem.what}")
    return f"{text}\n    hint: {CONTROL.sub('?', problem.hint)}" if problem.hint else text


def shortened(text: str) -> str:
    """A user's text as a message quotes it: on one line, 60 characters at most."""
    line = CONTROL.sub("?", text)
    return line if len(line) <= 60 else line[:57] + "..."


def print_problems(problems: tuple[Problem, ...] | list[Problem], stream: TextIO | None = None) -> None:
    """Print each problem to standard error (or `stream`), in the order given."""
    for problem in problems:
        print(format_problem(problem), file=stream or sys.stderr)


def did_you_mean(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint that names the closest of `names`, empty where none is close."""
    from difflib import get_close_matches  # here: most input has nothing wrong

    close = get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return f"did you mean `{close[0]}`?" if close else ""
