"""The real stages asked about many recipes, and their answers kept."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import tee
from pathlib import Path

from judged import as_json, from_json

import moekit.megatron
from moekit.megatron.real import judge_each
from moekit.megatron.stages import Question
from moekit.megatron.verdict import Verdict


class Answers:
    """A file with the real stages' answer to every question so far: a run that was ended goes on from it.

    An answer counts as long as the code of the stages is the same. Without a file nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, str] = {}
        if path is not None and path.is_file():
            lines = [line.partition("\t") for line in path.read_text().splitlines(keepends=True)]
            self.known = {key: rows for key, _, rows in lines if rows.endswith("\n")}

    def get(self, question: Question) -> list[Verdict] | None:
        """The answer to a question, None where it was not asked yet."""
        rows = self.known.get(_key(question))
        return None if rows is None else from_json(json.loads(rows))

    def add(self, question: Question, verdicts: list[Verdict]) -> None:
        """Keep an answer."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{_key(question)}\t{json.dumps(as_json(verdicts))}\n")


def _code() -> str:
    folder = Path(moekit.megatron.__file__).parent
    code = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(code).hexdigest()


_CODE = _code()


def _key(question: Question) -> str:
    text = json.dumps([asdict(question), _CODE], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def ask(questions: Iterable[Question], answers: Answers, jobs: int | None, total: int) -> Iterator[list[Verdict]]:
    """The answer to each question, in order; `total` is for the progress line on standard error."""
    began = shown = time.monotonic()
    asked, later = tee(questions)
    fresh = judge_each((question for question in later if answers.get(question) is None), at_once=jobs)
    for count, question in enumerate(asked, 1):
        verdicts = answers.get(question)
        if verdicts is None:
            verdicts = next(fresh)
            answers.add(question, verdicts)
        yield verdicts
        if (now := time.monotonic()) - shown > 5:
            shown, rate = now, count / (now - began)
            left = f"{(total - count) / rate / 60:.0f} minutes left"
            print(f"{count:,} of {total:,}, {rate:.1f} a second, {left}", file=sys.stderr, flush=True)
