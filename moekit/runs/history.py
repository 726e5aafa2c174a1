"""What became of each start of a run, and what comes next by the rules of its job: files are read, none is written."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from moekit.job import checkpoints
from moekit.job.attempts import Attempt, Facts, read_attempts, read_facts, read_json
from moekit.job.endings import exit_records
from moekit.job.retry import Decision, decide_here
from moekit.launch.rundir import AttemptDir, RunDir
from moekit.launch.slurm_text import Job, number
from moekit.problems import MoekitError
from moekit.recipe.load import load
from moekit.runs import submissions
from moekit.runs.look import Seen

_SLURMS_WORDS = {
    "BOOT_FAIL": "its nodes did not boot",
    "CANCELLED": "somebody ended its job",
    "DEADLINE": "its job's deadline came",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "a node was out of memory",
    "PREEMPTED": "another job took its nodes",
    "TIMEOUT": "its job's time limit came",
}
"""What Slurm says of a job that it ended itself."""
_CLOCKS_S = 5.0
"""Nodes and controller may differ by so much, and a requeued job waits longer."""
_KILLED_AFTER_S = 120.0
"""Slurm's SIGTERM comes so long, at most, before the end that it puts down (slurm.conf: KillWait)."""
_LOG_HEAD_BYTES = 2**20
_LOADED = re.compile(r"successfully loaded checkpoint from checkpoints\b.* at iteration (\d+)")
"""What Megatron says of the run's own checkpoint (megatron/training/checkpointing.py:1983 at 0.19.2)."""


@dataclass(frozen=True)
class Start:
    """One attempt of a run."""

    attempt: Attempt
    running: bool
    cause: str
    """Why it ended; empty while it runs."""
    then: str
    """What came next; empty of the last one."""


@dataclass(frozen=True)
class History:
    """All starts of a run, and what is next."""

    starts: tuple[Start, ...] = ()
    decision: Decision | None = None
    """What its next job would do; None while an attempt runs or nobody knows, and of a run on this machine."""
    exclude: tuple[str, ...] = ()
    """Nodes that further jobs stay away from."""
    passed_over: tuple[str, ...] = ()
    """What is wrong in `checkpoints/`: sentences."""


def read_history(seen: Seen) -> History:
    """The history of a run that was looked at."""
    files, run = seen.files, seen.files.run
    running = running_attempt(seen)
    facts = _facts(seen)
    found = checkpoints.latest(run.checkpoints)
    attempts = [_completed(attempt, files.local, run, found.step) for attempt in read_attempts(run.path, facts)]
    ends = _ends(seen)
    thens = [_then(one, following) for one, following in pairwise(attempts)]
    starts = tuple(
        Start(one, one.number == running, "" if one.number == running else _cause(one, ends), then)
        for one, then in zip(attempts, [*thens, ""], strict=False)
    )
    asked = not (running or files.local or seen.state.word == "unknown")
    decision = decide_here(run.path, attempts, facts, found) if asked else None
    suspects = tuple(dict.fromkeys(node for one in attempts for node in one.suspects))
    return History(starts, decision, decision.exclude if decision else suspects, tuple(found.said))


def running_attempt(seen: Seen) -> int:
    """The number of the attempt that trains now, 0 where none does: its job may wait again, or have just begun."""
    files = seen.files
    if not files.attempt or files.local:
        return files.attempt if files.locked else 0
    folder, job = files.run.attempt(files.attempt).path, seen.state.job
    if job is None or job.waiting or job.ended or "kind" in read_json(folder / "end.json"):
        return 0
    if str(read_json(folder / "decision.json").get("job")) != number(job.id):
        return 0
    # the job's first act, in every start of it
    began = _changed_at(files.run.jobs / number(job.id))
    return files.attempt if _changed_at(folder / "decision.json") >= began else 0


def _facts(seen: Seen) -> Facts:
    """What the run's files say of it; how many ranks it has, its recipe does where nothing else was written."""
    run = seen.files.run
    facts = read_facts(run.path)
    if "world" in read_json(run.path / "retry.json"):
        return facts
    with contextlib.suppress(MoekitError):
        return replace(facts, world=load(str(run.recipe)).recipe.parallel.gpus or 1)
    return replace(facts, world=max(1, len(seen.files.exits)))


def _completed(attempt: Attempt, local: bool, run: RunDir, checkpoint: int) -> Attempt:
    """An attempt with what nobody put down; on this machine only its other files say when it began, and where."""
    folder = run.attempt(attempt.number)
    if attempt.end:
        return attempt
    ended = max(_changed_at(folder.train_log), *(one["time"] for one in exit_records(folder.path).values()), 0.0)
    attempt = replace(attempt, end=ended, checkpoint=checkpoint)
    if not local:
        return attempt
    began = _loaded(folder)
    return replace(
        attempt, start=_changed_at(folder.installed), began_at_step=began, step=max(attempt.step, began), checkpoint=0
    )


def _loaded(folder: AttemptDir) -> int:
    """The step of the run's own checkpoint that an attempt began from, by its log."""
    with contextlib.suppress(OSError), folder.train_log.open(errors="replace") as log:
        if found := _LOADED.search(log.read(_LOG_HEAD_BYTES)):
            return int(found[1])
    return 0


def _ends(seen: Seen) -> dict[str, Job]:
    """How Slurm says that the run's jobs ended, by their number."""
    ended = submissions.ends(seen.files.run)
    told = [seen.state.job] if seen.state.job and seen.state.job.ended else []
    return {number(job.id): job for job in [*ended, *told]}


def _cause(attempt: Attempt, ends: Mapping[str, Job]) -> str:
    """Why an attempt ended, in Slurm's word first where Slurm ended it."""
    said, job = attempt.ending.sentence, ends.get(attempt.job)
    if job is None or job.state not in _SLURMS_WORDS or attempt.ending.kind == "ended":
        return said
    if not job.nodes or (job.start or 0) > attempt.start + _CLOCKS_S:  # it waited again by then, or had begun again
        return said
    if attempt.ending.kind != "lost" and attempt.end < (job.end or 0) - _KILLED_AFTER_S:
        return said
    word = f"{job.state}: {_SLURMS_WORDS[job.state]}"
    return word if attempt.ending.kind == "lost" else f"{word}; {said}"


def _then(attempt: Attempt, following: Attempt) -> str:
    """What came after an attempt."""
    begins = f"goes on from step {following.began_at_step:,}" if following.began_at_step else "begins at the beginning"
    without = f", without {', '.join(attempt.suspects)}" if attempt.suspects else ""
    by_hand = ", by hand in spite of it" if attempt.forgiven else ""
    return f"attempt {following.number} {begins}{without}{by_hand}"


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
