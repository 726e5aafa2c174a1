"""A run's log, followed over all its attempts until no job of it is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from moekit.launch.rundir import RunDir
from moekit.problems import Problem
from moekit.runs.look import Seen, look_at

ASKED_EVERY_S = 10.0
"""Slurm is asked no more often than that, however long a log is followed."""
READ_EVERY_S = 0.5
_TAIL_BYTES = 2**20


def last_lines(path: Path, lines: int) -> tuple[bytes, int]:
    """The end of a log, at most so many lines and a mebibyte of it; and how far that goes, in bytes."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = file.read()
        return b"".join(tail.splitlines(keepends=True)[-lines:] if lines else []), file.tell()


def newest_log(run: RunDir, job: str | None) -> Path | None:
    """The log of the newest attempt; before the first, what its job printed."""
    numbers = [number for number in run.numbers() if run.attempt(number).train_log.is_file()]
    if numbers:
        return run.attempt(numbers[-1]).train_log
    log = run.job_log(job) if job else None
    return log if log and log.is_file() else None


@dataclass
class Follower:
    """Copies what logs get, attempt after attempt."""

    run: RunDir
    lines: int
    """Of the log that is there at first, so many last lines."""
    out: BinaryIO
    say: Callable[[str], None]
    """Takes what is no log: which attempt begins, what the run waits for."""
    _at: Path | None = None
    _attempt: int = 0
    _offset: int = 0
    _said: set[str] = field(default_factory=set)

    @property
    def silent(self) -> bool:
        """Whether there was no log yet."""
        return self._at is None

    def copy(self, job: str | None) -> None:
        """Copy what is new, of attempts that came and went since the last time too."""
        self._drain()
        if self._at is None or not self._attempt:
            newest = newest_log(self.run, job)
            if newest is not None and newest != self._at:
                self._attempt = max(self._logged(), default=0)
                self._begin(newest, self.lines)
        for number in self._logged():
            if number > self._attempt > 0:
                self._attempt = number
                self._begin(self.run.attempt(number).train_log)

    def say_once(self, text: str) -> None:
        """Say something that stays true for a while."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _logged(self) -> list[int]:
        return [number for number in self.run.numbers() if self.run.attempt(number).train_log.is_file()]

    def _begin(self, log: Path, lines: int | None = None) -> None:
        """Go over to another log, whole or with its last lines first."""
        self.say(f"==> {log} <==")
        self._at, self._offset = log, 0
        if lines is not None:
            tail, self._offset = last_lines(log, lines)
            self._write(tail)
        self._drain()

    def _drain(self) -> None:
        if self._at is None or not self._at.is_file():
            return
        with self._at.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        self._write(new)

    def _write(self, data: bytes) -> None:
        self.out.write(data)
        self.out.flush()


def follow(run: RunDir, lines: int, describe: Callable[[Seen], str]) -> Seen:
    """Copy a run's log to standard output until no job of it is left; what it is then. All else is standard error."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    follower = Follower(run, lines, sys.stdout.buffer, say)
    while True:
        seen, problems = look_at(run)
        for problem in problems:
            follower.say_once(_silent(problem))
        job = seen.state.job.id if seen.state.job else None
        follower.copy(job)
        if follower.silent and seen.state.active:
            follower.say_once(describe(seen))
        if not seen.state.active and not problems:
            return seen
        asked = time.monotonic()
        while time.monotonic() < asked + ASKED_EVERY_S:
            time.sleep(READ_EVERY_S)
            follower.copy(job)
            if seen.files.local:
                break


def _silent(problem: Problem) -> str:
    return f"{problem.what}; the log is followed all the same"
