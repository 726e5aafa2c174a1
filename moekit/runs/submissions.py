"""The submissions of a run: a file each, claimed before Slurm is asked, saying afterwards what came of it.

    submissions/1.json    {"phase": "submitting", "host": ..., "pid": ..., ...}, replaced by
                          {"phase": "submitted", "job": "17"}, and once that job was seen to have ended by
                          {"phase": "ended", "job": "17", "state": "FAILED", ...}
    jobs/17               written by the job itself as its first act

A file's number is claimed by linking it, so that of two moekits only one submits, and no file is ever deleted. A claim
whose moekit is gone, killed or cut off, says that Slurm may have taken the job: `look.py` then looks for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moekit.launch import slurm
from moekit.launch.rundir import RunDir
from moekit.launch.slurm_text import Job
from moekit.problems import MoekitError, error

Phase = Literal["submitting", "submitted", "refused", "unanswered", "ended"]

MOST_S = slurm.SUBMIT_TIMEOUT_S + 60
"""The longest that a moekit on another machine can be submitting; one on this machine is looked at."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One submission, as its file says."""

    number: int
    """From 1."""
    phase: Phase
    time: float
    """When it was claimed, in seconds since 1970."""
    job: str | None = None
    """The job's id; None where there is none, or nobody heard of it."""
    said: str = ""
    """Why there is no job, in Slurm's words."""
    in_hand: bool = False
    """Whether a moekit is asking Slurm just now."""
    ended: Job | None = None
    """The job as it ended."""

    @property
    def lost(self) -> bool:
        """Whether Slurm may have a job of it that nobody heard of."""
        return self.job is None and not self.in_hand and self.phase in ("submitting", "unanswered")


def read(run: RunDir, whole: bool = False) -> list[Submission]:
    """The submissions of a run, the newest first, down to the first whose end is known; all of them if `whole`."""
    found = []
    folder = str(run.submissions)
    for number in sorted(_numbers(folder), reverse=True):
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError),  # half a file
            open(f"{folder}/{number}.json", encoding="utf-8") as file,  # noqa: PTH123
        ):
            found.append(_submission(number, json.load(file)))
            if found[-1].phase == "ended" and not whole:
                break
    return found


def ends(run: RunDir) -> list[Job]:
    """How the jobs of a run ended, of all submissions whose end is known."""
    return [one.ended for one in read(run, whole=True) if one.ended]


def started_jobs(run: RunDir) -> list[str]:
    """The numbers of all jobs of a run that ever started, ascending: each leaves a file in `jobs/`."""
    return [str(number) for number in sorted(_numbers(str(run.jobs)))]


def claim(run: RunDir, newest: int, **said: object) -> int:
    """Claim the submission behind the newest one, by its number, 0 where there is none; the new one's number.

    Raises:
        MoekitError: another moekit was faster, or the folder cannot be written.
    """
    number = newest + 1
    asking = {"phase": "submitting", "time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    target, temporary = _file(run, number), _temporary(run, number)
    try:
        run.submissions.mkdir(exist_ok=True)
        _write(temporary, {**asking, "began": _began(os.getpid()), **said})
        try:
            target.hardlink_to(temporary)  # with its content: nobody ever reads half a claim
        finally:
            temporary.unlink()
    except FileExistsError:
        raise error(f"`{run.path.name}` is being submitted by another moekit", "wait for it") from None
    except OSError as reason:
        what = f"`{run.submissions}` cannot be written: {(reason.strerror or str(reason)).lower()}"
        raise error(what) from None
    return number


def record(run: RunDir, number: int, phase: Phase, **said: object) -> None:
    """Say what came of a submission, in place of what its file said."""
    temporary = _temporary(run, number)
    _write(temporary, {"phase": phase, "time": time.time(), **said})
    temporary.replace(_file(run, number))


def record_end(run: RunDir, submission: Submission, job: Job) -> None:
    """Say how a submission's job ended, so that nobody has to ask Slurm again; not where one may not write."""
    ended = {"state": job.state, "reason": job.reason, "exit_code": job.exit_code, "start": job.start, "end": job.end}
    with contextlib.suppress(OSError):
        record(run, submission.number, "ended", job=submission.job, nodes=job.nodes, node_count=job.node_count, **ended)


def reopen(run: RunDir, submission: Submission) -> Submission:
    """A submission whose job came back after its end was put down; said so in its file, where one may write."""
    with contextlib.suppress(OSError):
        record(run, submission.number, "submitted", job=submission.job)
    return replace(submission, phase="submitted", ended=None)


def adopt(run: RunDir, jobs: list[str], known: list[Submission]) -> None:
    """Put down jobs of a run that no submission knows: those that were lost, or that somebody submitted by hand."""
    lost = [submission.number for submission in reversed(known) if submission.lost]
    newest = max((submission.number for submission in known), default=0)
    with contextlib.suppress(OSError, MoekitError):  # read-only, or another moekit was faster: it says the same
        for job in jobs:
            if lost:
                record(run, lost.pop(0), "submitted", job=job)
            else:
                newest = claim(run, newest, job=job)
                record(run, newest, "submitted", job=job, by="hand")


def _submission(number: int, said: Mapping[str, Any]) -> Submission:
    job, phase = said.get("job"), said["phase"]
    names = ("reason", "exit_code", "start", "end", "nodes", "node_count")
    ended = Job(id=str(job), state=said["state"], **{name: said[name] for name in names}) if phase == "ended" else None
    in_hand = phase == "submitting" and _in_hand(said)
    return Submission(number, phase, float(said["time"]), job, str(said.get("said", "")), in_hand, ended)


def _in_hand(said: Mapping[str, Any]) -> bool:
    if said["host"] == socket.gethostname():
        return said["began"] is not None and _began(said["pid"]) == said["began"]
    return time.time() - float(said["time"]) < MOST_S


def _began(pid: int) -> int | None:
    """When a process began, in the kernel's ticks: a later one of the same number began at another time."""
    try:
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _write(path: Path, said: Mapping[str, object]) -> None:
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def _file(run: RunDir, number: int) -> Path:
    return run.submissions / f"{number}.json"


def _temporary(run: RunDir, number: int) -> Path:
    """A name that no other moekit takes, on any machine."""
    return run.submissions / f".{number}.{secrets.token_hex(8)}"


def _numbers(folder: str) -> list[int]:
    """The numbers that a folder's files are named by. (A thousand runs are read in one go: no `Path` here.)"""
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []
    return [int(name) for name in (name.removesuffix(".json") for name in names) if name.isdecimal()]
