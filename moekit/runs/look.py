"""The runs there are, and what has become of each: all files read, Slurm asked once for all of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moekit.launch import slurm
from moekit.launch.rundir import RunDir
from moekit.launch.slurm_text import Job
from moekit.problems import MoekitError, Problem, did_you_mean, error
from moekit.runs import submissions
from moekit.runs.state import Files, State, judge, read_files
from moekit.runs.submissions import Submission

LOCAL_ROOT = "moekit-local"
"""Where runs, data, tokenizers and metrics of this machine lie, in the working directory."""


@dataclass(frozen=True)
class Seen:
    """A run as it is now."""

    files: Files
    state: State


def roots(profile: str | None) -> list[Path]:
    """The folders that hold runs, data and tokenizers: a profile's, and this machine's where there is one.

    Raises:
        MoekitError: the profile cannot be read.
    """
    from moekit.cluster.profile import find_cluster

    found = [Path(find_cluster(profile).shared_root)] if profile else []
    here = Path.cwd() / LOCAL_ROOT
    return [*found, here] if (here / "runs").is_dir() and here not in found else found


def all_runs(shared_roots: Iterable[Path]) -> list[RunDir]:
    """Every run below the folders, by name."""
    found = []
    for root in shared_roots:
        with contextlib.suppress(FileNotFoundError):
            entries = [entry for entry in os.scandir(root / "runs") if entry.is_dir() and entry.name[0] != "."]
            found += [RunDir(root / "runs" / name) for name in sorted(entry.name for entry in entries)]
    return found


def find_run(given: str, shared_roots: Sequence[Path]) -> RunDir:
    """The run of a name, or of a path of its directory.

    Raises:
        MoekitError: there is none.
    """
    if "/" in given or given in (".", ".."):
        path = Path(given).absolute()
        path = path.resolve() if path.name in ("", ".", "..") else path
        if (path / "recipe.yaml").is_file():
            return RunDir(path)
        raise error(f"`{given}` is no run: it has no `recipe.yaml`", "`moekit list` names the runs there are")
    for root in shared_roots:
        if given and (root / "runs" / given / "recipe.yaml").is_file():
            return RunDir(root / "runs" / given)
    names = [run.path.name for run in all_runs(shared_roots)]
    looked = " and ".join(str(root / "runs") for root in shared_roots)
    elsewhere = "`--profile` says which cluster's runs, and MOEKIT_PROFILE for all commands; or give its directory"
    what = f"there is no run `{given}`" + (f" in {looked}" if looked else ", and no profile says where runs lie")
    raise error(what, did_you_mean(given, names) or elsewhere)


def look(runs: Sequence[RunDir], again: bool = False) -> tuple[list[Seen], list[Problem]]:
    """What each run is now, and what kept that from being known better.

    Slurm is asked once for all runs, whatever their number. Jobs that were lost or submitted by hand are put down on
    the way, and so are ends. After those nobody asks any more, but while Slurm can still put a job back into its queue,
    and with `again`.
    """
    read = [read_files(run) for run in runs]
    problems: list[Problem] = []
    answered = True
    if any(files.searched_for or files.unsubmitted_jobs for files in read):
        found = _search(read, problems)
        answered = not problems
        read = [_adopted(files, found.get(files.run.path, [])) for files in read]
    asked = {job for files in read for job in files.open_jobs}
    if slurm.available():  # else what was put down is all that is known
        asked |= {job for files in read if (job := files.newest_job if again else files.job_that_may_be_back)}
    jobs: dict[str, Job] = {}
    if asked and answered:
        jobs, problem = _ask(sorted(asked))
        problems += [problem] if problem else []
        answered = not problem
    read = [_reopened(files, jobs) for files in read]
    return [_seen(files, jobs, answered) for files in read], problems


def look_at(run: RunDir, again: bool = False) -> tuple[Seen, list[Problem]]:
    """`look` for one run."""
    (seen,), problems = look([run], again)
    return seen, problems


def _search(read: Sequence[Files], problems: list[Problem]) -> dict[Path, list[Job]]:
    """One's own jobs in the folders of runs that may have some which no file names."""
    folders = [files.run.path for files in read if files.searched_for]
    if not folders or not slurm.available():
        return {}
    try:
        return slurm.jobs_in(folders)
    except MoekitError as silent:
        problems += silent.problems
        return {}


def _adopted(files: Files, found: Sequence[Job]) -> Files:
    """A run's files, once jobs that no submission names are put down."""
    numbers = {*map(int, files.unsubmitted_jobs), *(int(job.id) for job in found if job.id.isdecimal())}
    new = [str(number) for number in sorted(numbers) if number > files.last_number]
    if not new or any(one.in_hand for one in files.submissions):  # a moekit is about to put it down itself
        return files
    submissions.adopt(files.run, new, files.submissions)
    read = read_files(files.run)
    unwritten = [job for job in new if int(job) > read.last_number]  # where one may not write
    known = [Submission(read.newest + 1, "submitted", read.time, job) for job in reversed(unwritten)]
    return replace(read, submissions=[*known, *read.submissions])


def _ask(ids: Sequence[str]) -> tuple[dict[str, Job], Problem | None]:
    if not slurm.available():
        what = "Slurm's commands are not on PATH here, so what is shown is what files say"
        return {}, Problem("", what, "on a login node of the cluster, jobs are asked for", "warning")
    try:
        return slurm.jobs(ids), None
    except slurm.Unanswered as silent:
        return silent.known, silent.problems[0]


def _reopened(files: Files, jobs: dict[str, Job]) -> Files:
    """A run's files, where the job whose end they tell is back in Slurm's queue, or runs again."""
    newest = files.submissions[0] if files.submissions else None
    job = jobs.get(newest.job or "") if newest and newest.ended else None
    if newest is None or job is None or job.ended or not _belongs(job, files.run):
        return files
    return replace(files, submissions=[submissions.reopen(files.run, newest), *files.submissions[1:]])


def _seen(files: Files, jobs: dict[str, Job], answered: bool) -> Seen:
    """What a run is; ends are put down. A job of the same number in another folder is another cluster's."""
    mine = {job: jobs[job] for job in files.open_jobs if job in jobs and _belongs(jobs[job], files.run)}
    for one in files.submissions:
        if one.job in mine and mine[one.job].ended:
            submissions.record_end(files.run, one, mine[one.job])
    return Seen(files, judge(files, mine, answered))


def _belongs(job: Job, run: RunDir) -> bool:
    return job.folder in ("", str(run.path)) or os.path.realpath(job.folder) == os.path.realpath(run.path)
