"""Slurm's commands, called: each bounded in time, and told nothing by the job that moekit itself may run in.

`submit`, `jobs`, `jobs_in` and `cancel` are what moekit asks about runs; `call` is for any other client. What they
print is read in `slurm_text.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moekit.launch import slurm_text
from moekit.launch.slurm_text import Job
from moekit.lifeline import die_with_parent
from moekit.problems import MoekitError, Problem, error

SUBMIT_TIMEOUT_S = 120.0
"""A busy controller lets sbatch wait and try again for a minute and more."""
QUERY_TIMEOUT_S = 20.0
"""Of a question that a person waits for. Without a controller a client goes on trying for minutes."""

_INHERITED = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "_SLURM_", "SPANK_", "PMI_", "PMIX_")


class Unanswered(MoekitError):
    """Slurm gave no answer in time, or none that can be read; what was asked may have been done all the same."""

    def __init__(self, problem: Problem, known: Mapping[str, Job] | None = None) -> None:
        super().__init__(problem)
        self.known = dict(known or {})
        """What of the question was answered before."""


def available() -> bool:
    """Whether jobs can be submitted from here: `sbatch` is on PATH."""
    return shutil.which("sbatch") is not None


def submit(folder: Path, options: Sequence[str] = (), script: str = "job.sbatch") -> str:
    """Submit a script that lies in `folder`, which becomes the job's working directory; the job's id.

    `options` are sbatch's, in front of those of the script: `--dependency=afterok:12`.

    Raises:
        Unanswered: the job may have been submitted, or not: `jobs_in` finds it.
        MoekitError: Slurm refused it, in its own words. There is no job.
    """
    command = ["sbatch", "--parsable", f"--chdir={folder}", *options, script]
    said = call(command, SUBMIT_TIMEOUT_S, folder)
    if said.code:
        why, more = slurm_text.refusal(said.err)
        if slurm_text.no_answer(said.err):
            raise Unanswered(Problem("", f"sbatch had no answer from Slurm: {why}", more))
        raise error(f"sbatch refused the job: {why}", more)
    job = slurm_text.submitted_id(said.out)
    if job is None:
        shown = " ".join((said.out or said.err).split())[:200]
        raise Unanswered(Problem("", f"sbatch names no job, it prints `{shown}`"))
    return job


def jobs(ids: Collection[str]) -> dict[str, Job]:
    """What Slurm knows of each job; one that is missing from the answer it has forgotten.

    One call of squeue, and one of sacct where jobs are missing from that, whatever the number of ids. (Two each where
    some ids name a cluster and some do not.) Where squeue cannot list so, one of scontrol. Without accounting, a job
    is forgotten some minutes after its end (slurm.conf: MinJobAge).

    Raises:
        Unanswered: with what is known by then as its `known`.
    """
    found: dict[str, Job] = {}
    here = [job for job in ids if not slurm_text.cluster(job)]
    there = [job for job in ids if slurm_text.cluster(job)]
    for group in (here, there):
        if group:
            _add(found, group, _squeue(group, found))
            if missing := [job for job in group if job not in found]:
                _add(found, missing, _sacct(missing, found))
    return found


def jobs_in(folders: Iterable[Path]) -> dict[Path, list[Job]]:
    """One's own jobs that run in one of the folders, wherever their ids were lost; by one call of squeue.

    Raises:
        Unanswered: Slurm gave no answer.
    """
    by_name = {str(shape): folder for folder in folders for shape in (folder, folder.resolve())}
    said = call(["squeue", "--me", *_SQUEUE], QUERY_TIMEOUT_S)
    if said.code:
        raise _unreadable(said, {})
    found: dict[Path, list[Job]] = {}
    for job in slurm_text.squeue_jobs(said.out):
        if job.folder in by_name:
            found.setdefault(by_name[job.folder], []).append(job)
    return found


def cancel(ids: Collection[str], options: Sequence[str] = ()) -> None:
    """Ask Slurm to end jobs, or with `--signal` among scancel's options to signal them; silent of those that ended.

    Raises:
        Unanswered: Slurm gave no answer.
        MoekitError: it refused, in its own words.
    """
    for where in sorted({slurm_text.cluster(job) for job in ids}):
        numbers = [slurm_text.number(job) for job in ids if slurm_text.cluster(job) == where]
        said = call(["scancel", *_clusters([f";{where}"] if where else []), *options, *numbers], QUERY_TIMEOUT_S)
        if said.code:
            if slurm_text.no_answer(said.err):
                raise _unreadable(said, {})
            raise error(f"scancel refused: {' '.join(said.err.split())}")


_SQUEUE = ("--noheader", "--states=all", "--Format=" + ",".join(f"{name}:|" for name in slurm_text.SQUEUE_FIELDS))
_SACCT = ("--noheader", "--allocations", "--parsable2", "--format=" + ",".join(slurm_text.SACCT_FIELDS))


def _squeue(ids: Sequence[str], known: Mapping[str, Job]) -> list[Job]:
    command = ["squeue", *_clusters(ids), *_SQUEUE, f"--jobs={','.join(map(slurm_text.number, ids))}"]
    said = call(command, QUERY_TIMEOUT_S, known=known)
    if said.code == 0:
        return slurm_text.squeue_jobs(said.out)
    if slurm_text.unknown_job(said.err):  # of a single one; of several it leaves out what it does not know
        return []
    if slurm_text.no_answer(said.err):
        raise _unreadable(said, known)
    told = call(["scontrol", *_clusters(ids), "--oneliner", "show", "job"], QUERY_TIMEOUT_S, known=known)
    if told.code:
        raise _unreadable(said, known)
    return slurm_text.scontrol_jobs(told.out)


def _sacct(ids: Sequence[str], known: Mapping[str, Job]) -> list[Job]:
    if shutil.which("sacct") is None:
        return []
    command = ["sacct", *_clusters(ids), *_SACCT, f"--jobs={','.join(map(slurm_text.number, ids))}"]
    said = call(command, QUERY_TIMEOUT_S, known=known)
    if said.code and not slurm_text.no_accounting(said.err):
        raise _unreadable(said, known)
    return slurm_text.sacct_jobs(said.out)


def _clusters(ids: Iterable[str]) -> list[str]:
    names = sorted({slurm_text.cluster(job) for job in ids} - {""})
    return [f"--clusters={','.join(names)}"] if names else []


def _add(found: dict[str, Job], ids: Iterable[str], listed: Iterable[Job]) -> None:
    """Put what was listed under the ids that were asked for."""
    wanted = set(ids)
    for job in listed:
        for asked in wanted & {job.id, f"{job.id};{job.cluster}"}:
            found[asked] = replace(job, id=asked)


@dataclass(frozen=True)
class Said:
    """What a client said."""

    command: str
    code: int
    """Its exit code."""
    out: str
    err: str


def _unreadable(said: Said, known: Mapping[str, Job]) -> Unanswered:
    words = " ".join(said.err.split()) or f"it ends with {said.code}"
    return Unanswered(Problem("", f"{said.command} has no answer from Slurm: {words}"), known)


def call(
    command: Sequence[str],
    timeout_s: float = QUERY_TIMEOUT_S,
    folder: Path | None = None,
    known: Mapping[str, Job] | None = None,
    text: str = "",
) -> Said:
    """Run a client to its end, or no longer than a time; nothing of it is left behind, not even if moekit is killed.

    `folder` is its working directory, `text` its standard input; `known` goes into the error.

    Raises:
        Unanswered: it took longer.
        MoekitError: it is not on PATH.
    """
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=outer_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a site's wrapper has children, which would hold the pipes
            preexec_fn=die_with_parent,
        )
    except FileNotFoundError:
        what = f"`{command[0]}` is not on PATH"
        raise error(what, "run this on a login node of the cluster, where Slurm's commands are") from None
    try:
        out, err = process.communicate(text, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        what = f"Slurm does not answer: `{command[0]}` took longer than {timeout_s:g} s"
        raise Unanswered(Problem("", what, "`scontrol ping` says whether its controller is up"), known) from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    pipe.close()
    return Said(command[0], process.returncode, out, err)


def outer_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for Slurm's clients: without what an outer job, or a habit, says about another job.

    Inside a job SLURM_CPU_BIND, SLURM_MEM_PER_NODE and more would be taken for wishes about the new one. SLURM_CONF
    stays: it says which cluster.
    """
    kept = {name: value for name, value in environ.items() if name == "SLURM_CONF" or not name.startswith(_INHERITED)}
    return {**kept, "SLURM_TIME_FORMAT": "%s"}  # no time zone, no hour that comes twice
