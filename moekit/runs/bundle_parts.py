"""What of a run goes into its bundle: small files whole, of large ones their beginning, their end, their first cause.

Lines are taken whole or not at all, so that no secret is cut in two. No link is followed out of the run.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from moekit.doctor.triage import read_log
from moekit.launch.rundir import RunDir

KIB = 1024
HEAD_BYTES, AROUND_BYTES, TAIL_BYTES = 32 * KIB, 32 * KIB, 96 * KIB
"""Of a log: its beginning, both sides of its first cause, its end. Of metrics: beginning, with the config, and end."""
MOST_OF_A_FILE = 256 * KIB
"""Of other files, beginning and end together."""
LONGEST_LINE = 64 * KIB
MOST_RANKS = 256
"""Exit records of an attempt, those that failed first."""
MOST_SUBMISSIONS = 50
_BLOCK_BYTES = 1 << 20
_HALF_A_WORD = re.compile(r"(?<!\S)(?=\S*\d)(?=\S*[A-Za-z])\S{4,}\Z")

WHOLE = (
    *("recipe.yaml", "argv.first", "argv.resume", "argv.srun", "argv.torchrun", "argv.nsys", "provenance.json"),
    *("end", "retry.json", "decision.json", "job.sbatch", "environment.sh"),
    "checkpoints/latest_checkpointed_iteration.txt",
)
OF_AN_ATTEMPT = ("decision.json", "refused.json", "end.json", "software.json", "installed.json")


@dataclass(frozen=True)
class Part:
    """A text of the bundle, by its path in the run."""

    name: str
    text: str


@dataclass
class Collector:
    """Reads a run's files, up to so many bytes of text."""

    run: RunDir
    most_bytes: int
    parts: list[Part] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What was not taken, and why."""
    leads_out: bool = False
    """Whether a link leads out of the run."""
    _bytes: int = 0

    def collect(self) -> None:
        """Take what there is: what all attempts left first, then their logs, the newest first."""
        for name in WHOLE:
            self._take(name, MOST_OF_A_FILE // 2, MOST_OF_A_FILE // 2)
        names = self._listed("submissions", ".json")
        for name in names[-MOST_SUBMISSIONS:]:
            self._take(f"submissions/{name}", MOST_OF_A_FILE // 2, MOST_OF_A_FILE // 2)
        if len(names) > MOST_SUBMISSIONS:
            self.left_out.append(f"the first {len(names) - MOST_SUBMISSIONS:,} submissions")
        attempts = [str(number) for number in reversed(self._numbers())]
        for number in attempts:
            for name in OF_AN_ATTEMPT:
                self._take(f"attempts/{number}/{name}", MOST_OF_A_FILE // 2, MOST_OF_A_FILE // 2)
            self._take_exits(f"attempts/{number}/exit")
        for number in attempts:
            self._take(f"attempts/{number}/train.log", HEAD_BYTES, TAIL_BYTES, cause=True, resumed=number != "1")
            self._take(f"attempts/{number}/metrics.jsonl", HEAD_BYTES, HEAD_BYTES)
        logs = self._listed("", ".log", "slurm-")
        for name in sorted(logs, key=_number, reverse=True):
            self._take(name, KIB, HEAD_BYTES)

    def _take(self, name: str, head: int, tail: int, cause: bool = False, resumed: bool = False) -> None:
        if self._bytes > self.most_bytes:
            path = self._inside(name)
            if path and path.exists():
                self.left_out.append(f"{name}: there is no room for it")
            return
        file = self._open(name)
        if file is None:
            return
        try:
            with file:
                at = _first_cause(file, resumed) if cause else None
                text = excerpt(file, head, tail, at)
                text = text if name.endswith(".json") else without_half_a_word(text)
        except OSError as reason:
            self._leave(name, (reason.strerror or "it cannot be read").lower())
            return
        self._add(name, text)

    def _take_exits(self, folder: str) -> None:
        """How each rank ended, as its file says it; those that failed first."""
        said = []
        for name in self._listed(folder, ".json", "rank"):
            if file := self._open(f"{folder}/{name}"):
                with file:
                    said.append((name, _shortened(_whole_lines(file, 0, 4 * KIB, os.fstat(file.fileno()).st_size)[1])))
        said.sort(key=lambda one: ('"code": 0' in one[1], _number(one[0])))
        if said:
            rows = [f"{name}: {text.rstrip()}" for name, text in said[:MOST_RANKS]]
            rows += [f"[{len(said) - MOST_RANKS:,} ranks left out]"] if len(said) > MOST_RANKS else []
            self._add(f"{folder}.txt", "\n".join([*rows, ""]))

    def _add(self, name: str, text: str) -> None:
        self.parts.append(Part(name, text))
        self._bytes += len(text)

    def _leave(self, name: str, why: str) -> None:
        self.left_out.append(f"{name}: {why}")

    def _open(self, name: str) -> BinaryIO | None:
        """A file of the run; None where there is none that may be read."""
        path = self._inside(name)
        if path is None:
            return None
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as reason:
            self._leave(name, (reason.strerror or "it cannot be read").lower())
            return None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            self._leave(name, "it is no file")
            return None
        return os.fdopen(handle, "rb")

    def _inside(self, name: str) -> Path | None:
        try:
            path = (self.run.path / name).resolve()
        except (OSError, RuntimeError):  # links in a circle
            self._leave(name, "it cannot be read")
            return None
        if not path.is_relative_to(self.run.path.resolve()):
            self._leave(name, "it is a link out of the run")
            self.leads_out |= not name.startswith("checkpoints/")  # which often lie elsewhere, and have no text
            return None
        return path

    def _listed(self, folder: str, end: str, begin: str = "") -> list[str]:
        """Names in a folder of the run, by their numbers."""
        path = self._inside(folder)
        try:
            names = os.listdir(path) if path else []  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as reason:
            self._leave(folder, (reason.strerror or "it cannot be read").lower())
            return []
        return sorted((name for name in names if name.startswith(begin) and name.endswith(end)), key=_number)

    def _numbers(self) -> list[int]:
        names = self._listed("attempts", "")
        return sorted(int(name) for name in names if name.isdecimal() and name.isascii())


def excerpt(file: BinaryIO, head: int, tail: int, at: int | None = None) -> str:
    """The first `head` and the last `tail` bytes of a file as whole lines, and what is around byte `at`."""
    size = os.fstat(file.fileno()).st_size
    around = [] if at is None else [(at - AROUND_BYTES, at + AROUND_BYTES)]
    text, end = [], 0
    for begin, stop in _merged([(0, head), *around, (size - tail, size)], size):
        begin, lines = _whole_lines(file, begin, stop, size)
        text.append(_gap(begin - end) + _shortened(lines))
        end = begin + len(lines)
    return "".join([*text, _gap(size - end)])


def without_half_a_word(text: str) -> str:
    """A log without the word that its end cuts, where that may be a half-written secret."""
    return _HALF_A_WORD.sub("[...]", text)


def _merged(ranges: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Ranges within a file, in order, those that meet as one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted((max(0, begin), min(size, end)) for begin, end in ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif begin < end:
            merged.append((begin, end))
    return merged


def _whole_lines(file: BinaryIO, begin: int, end: int, size: int) -> tuple[int, bytes]:
    """(where they begin, the lines that lie in a range as a whole); at the end of the file the last may be half one."""
    file.seek(max(0, begin - 1))
    read = file.read(end - max(0, begin - 1))
    if begin:
        cut = read.find(b"\n") + 1 or len(read)
        begin, read = begin - 1 + cut, read[cut:]
    if end < size:
        read = read[: read.rfind(b"\n") + 1]
    return begin, read


def _shortened(lines: bytes) -> str:
    """As text, without lines that are too long to be read."""
    if len(lines) > LONGEST_LINE:
        split = lines.splitlines(keepends=True)
        lines = b"".join(one if len(one) <= LONGEST_LINE else b"[a line of %d bytes]\n" % len(one) for one in split)
    return lines.decode(errors="replace")


def _gap(size: int) -> str:
    return f"[... {size:,} bytes left out ...]\n" if size > 0 else ""


def _first_cause(file: BinaryIO, resumed: bool) -> int | None:
    """The byte at which the line of a log begins that names its first cause, as `moekit doctor` reads it."""
    found = read_log(file, resumed).found
    if not found:
        return None
    file.seek(0)
    before, at = found[0].line_number - 1, 0
    while before > 0 and (block := file.read(_BLOCK_BYTES)):
        lines = block.count(b"\n")
        if lines >= before:
            end = -1
            for _ in range(before):
                end = block.find(b"\n", end + 1)
            return at + end + 1
        before, at = before - lines, at + len(block)
    return at


def _number(name: str) -> int:
    digits = "".join(letter for letter in name if letter in "0123456789")
    return int(digits[:18] or 0)
