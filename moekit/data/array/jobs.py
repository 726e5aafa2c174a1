"""What Slurm has of a data set's arrays: their ids, even one that was lost, and the state of each element."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moekit.data.array.texts import Array, read_array
from moekit.data.plan import DataFolder
from moekit.launch import slurm, slurm_text
from moekit.launch.rundir import RunDir
from moekit.launch.slurm_text import Job
from moekit.problems import Problem, error
from moekit.runs import submissions
from moekit.runs.submissions import Submission

SETTLES_S = 5.0
"""The longest that Slurm may take to show a job whose sbatch was cut off."""


@dataclass(frozen=True)
class Submitted:
    """A submission that Slurm has, or had, an array of."""

    folder: Path
    job: str
    """The array's id."""
    array: Array
    elements: dict[int, Job]
    """By their shard; one that is missing has been forgotten by Slurm."""
    live: bool
    """Whether any of its elements waits or runs."""


def submissions_of(folder: DataFolder) -> RunDir:
    """The data set's folder, as what keeps submissions takes it."""
    return RunDir(folder.path)


def jobs_folder(folder: DataFolder, number: int) -> Path:
    """The working directory of a submission."""
    return folder.path / "jobs" / str(number)


def known(folder: DataFolder) -> list[Submission]:
    """All submissions, the newest first; an id that was lost is looked for by the job's working directory.

    Raises:
        MoekitError: another moekit is submitting just now, or Slurm does not say whether it has a job that was lost.
    """
    patience = time.monotonic() + SETTLES_S
    while True:
        found = submissions.read(submissions_of(folder), whole=True)
        if any(one.in_hand for one in found):
            raise error(f"`{folder.path.name}` is being submitted by another moekit", "wait for it")
        lost = {jobs_folder(folder, one.number): one.number for one in found if one.lost}
        if not lost or not slurm.available():
            return found
        jobs = slurm.jobs_in(lost)
        for path, (job, *_) in jobs.items():
            submissions.record(submissions_of(folder), lost[path], "submitted", job=_array_id(job.id))
        if not jobs and time.monotonic() > patience:
            return found
        time.sleep(0 if jobs else 1)


def submitted(folder: DataFolder) -> list[Submitted]:
    """Every array that Slurm took, the newest first, with what it still knows of it.

    Raises:
        MoekitError: as `known`, or Slurm does not answer.
    """
    jobs = [(jobs_folder(folder, one.number), one.job) for one in known(folder) if one.job]
    elements = _elements([job for _, job in jobs]) if jobs and slurm.available() else {}
    found = []
    for path, job in jobs:
        array = read_array(path) or Array(0, ())
        number = slurm_text.number(job)
        mine = {task: elements[one] for task in array.tasks if (one := f"{number}_{task - array.offset}") in elements}
        live = any(not one.ended for name, one in elements.items() if name.startswith(f"{number}_"))
        found.append(Submitted(path, job, array, mine, live))
    return found


def still_there(found: Sequence[Submitted], name: str) -> Problem | None:
    """Why a data set cannot be submitted again: an array of it has not ended."""
    live = [slurm_text.number(one.job) for one in reversed(found) if one.live]
    if not live:
        return None
    many = len(live) > 1
    what = f"data set `{name}` is being tokenized: its job{'s' * many} {', '.join(live)} {'have' if many else 'has'}"
    hint = f"wait for {'them' if many else 'it'}, or `scancel {' '.join(live)}`; `moekit data status {name}` says more"
    return Problem("", f"{what} not ended", hint)


def _array_id(job: str) -> str:
    """The id of the array that squeue shows by one of its elements' own numbers."""
    said = slurm.call(["squeue", "--noheader", "--states=all", "--Format=ArrayJobID:|", f"--jobs={job}"])
    numbers = [line.strip(" |") for line in said.out.splitlines()]
    return next((number for number in numbers if number.isdecimal()), job)


def _elements(arrays: Sequence[str]) -> dict[str, Job]:
    """Each element that Slurm knows of some arrays, by `<array>_<index>`: squeue's, and sacct's of what that forgot."""
    clusters = sorted({slurm_text.cluster(job) for job in arrays} - {""})
    asked = [f"--clusters={','.join(clusters)}"] if clusters else []
    asked += ["--noheader", "--array", f"--jobs={','.join(map(slurm_text.number, arrays))}"]
    fields = ",".join(f"{name}:|" for name in ("JobArrayID", *slurm_text.SQUEUE_FIELDS[1:]))
    said = slurm.call(["squeue", *asked, "--states=all", f"--Format={fields}"])
    if said.code and not slurm_text.unknown_job(said.err):  # of a single one that it has forgotten
        raise slurm.Unanswered(Problem("", f"squeue has no answer from Slurm: {' '.join(said.err.split())}"))
    found = {job.id: job for job in slurm_text.squeue_jobs(said.out)}
    if shutil.which("sacct"):
        columns = f"--format={','.join(slurm_text.SACCT_FIELDS)}"
        told = slurm.call(["sacct", *asked, "--allocations", "--parsable2", columns])
        found = {**{job.id: job for job in slurm_text.sacct_jobs(told.out)}, **found}
    return found
