"""A run's log, followed over all its attempts until no job of it is left."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from moekit.launch.rundir import RunDir
from moekit.launch.runs import Seen, look_at
from moekit.problems import Problem

ASKED_EVERY_S = 10.0
"""Slurm is asked no more often than that, however long a log is followed."""
READ_EVERY_S = 0.5


def last_lines(path: Path, lines: int) -> bytes:
    """The end of a log, at most so many lines of it; of a line that Megatron rewrites by `\\r`, all of it."""
    with path.open("rb") as file:
        return b"".join(deque(file, maxlen=lines)) if lines else b""


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
    _offset: int = 0
    _said: set[str] = field(default_factory=set)

    def copy(self, job: str | None) -> bool:
        """Copy what is new; whether there was anything."""
        newest = newest_log(self.run, job)
        copied = False
        if newest != self._at and newest is not None:
            copied = self._drain()  # what the last attempt wrote at its end
            first = self._at is None
            self._at, self._offset = newest, 0
            self.say(f"==> {newest} <==")
            if first:
                tail = last_lines(newest, self.lines)
                self._offset = newest.stat().st_size
                self._write(tail)
        return self._drain() or copied

    def say_once(self, text: str) -> None:
        """Say something that stays true for a while."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _drain(self) -> bool:
        if self._at is None or not self._at.is_file():
            return False
        with self._at.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        self._write(new)
        return bool(new)

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
        if not follower.copy(job) and follower._at is None and seen.state.active:
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
