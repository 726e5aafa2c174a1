"""What has become of each shard of a data set: its files first, then what Slurm says of the elements that make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moekit.data.array.jobs import Submitted
from moekit.data.making.shards import find_shard
from moekit.data.plan import DataFolder, Plan
from moekit.launch.slurm_text import Job, number
from moekit.problems import CONTROL
from moekit.runs.logs import last_lines

LAST_LINE = 100
"""Characters of a log's last line that are shown."""


@dataclass(frozen=True)
class Shard:
    """One shard as it is now."""

    task: int
    word: str
    """`whole`, `waiting`, `running`; else how its element ended in Slurm's word (`failed`, `cancelled`, `timeout`),
    `unknown` where Slurm has forgotten that, `damaged` where it ended well, `missing` where it was never submitted."""
    job: str = ""
    """Its newest element, `17_3`."""
    why: str = ""
    """Slurm's reason or exit code."""
    log: Path | None = None
    last_line: str = ""
    """Of that log."""

    def as_json(self) -> dict[str, Any]:
        """What is known of it, for a script."""
        facts = {"task": self.task, "state": self.word, "job": self.job or None, "why": self.why or None}
        return {**facts, "log": str(self.log) if self.log else None, "last_line": self.last_line or None}


def shards(folder: DataFolder, plan: Plan, arrays: Sequence[Submitted]) -> list[Shard]:
    """Every shard of a data set; `arrays` are its submissions, the newest first."""
    newest: dict[int, Submitted] = {}
    for one in arrays:
        for task in one.array.tasks:
            newest.setdefault(task, one)
    return [_shard(folder, plan, task, newest.get(task)) for task in range(plan.tasks)]


def _shard(folder: DataFolder, plan: Plan, task: int, newest: Submitted | None) -> Shard:
    element = newest.elements.get(task) if newest else None
    if find_shard(folder, plan, task) and (element is None or element.ended):
        return Shard(task, "whole")
    if newest is None:
        return Shard(task, "missing")
    log = newest.array.log(newest.folder, newest.job, task)
    job = f"{number(newest.job)}_{task - newest.array.offset}"
    if element is None:
        return Shard(task, "unknown", job, "", log if log.is_file() else None, last_line(log))
    return Shard(task, _word(element), job, _why(element), log if log.is_file() else None, last_line(log))


def _word(element: Job) -> str:
    if element.waiting:
        return "waiting"
    if element.state == "COMPLETED":  # and yet the shard is not whole, or not any more
        return "damaged"
    return element.state.lower() if element.ended else "running"


def _why(element: Job) -> str:
    if element.ended:
        return f"exit code {element.exit_code}" if element.exit_code not in ("", "0:0") else ""
    return element.reason if element.waiting else element.nodes


def last_line(log: Path) -> str:
    """The last line of a log that says something; empty where there is none."""
    try:
        tail, _ = last_lines(log, 20)
    except OSError:
        return ""
    said = [line.strip() for line in tail.decode(errors="replace").splitlines() if line.strip()]
    text = CONTROL.sub("?", said[-1]) if said else ""
    return text if len(text) <= LAST_LINE else text[: LAST_LINE - 3] + "..."


def counted(found: Iterable[Shard]) -> str:
    """How many shards are what: `97 of 100 shards are whole, 2 running, 1 failed`."""
    words = Counter(shard.word for shard in found)
    total, whole_ones = words.total(), words.pop("whole", 0)
    others = "".join(f", {count} {word}" for word, count in words.items())
    return f"{whole_ones} of {total} shard{'s' * (total != 1)} {'is' if total == 1 else 'are'} whole{others}"


def table(found: Sequence[Shard]) -> list[str]:
    """A line for each shard that is not whole, below a heading; none where all are."""
    rows = [
        (str(shard.task), shard.word, shard.job, shard.why, shard.last_line) for shard in found if shard.word != "whole"
    ]
    if not rows:
        return []
    rows = [("SHARD", "STATE", "JOB", "WHY", "LAST LINE"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
