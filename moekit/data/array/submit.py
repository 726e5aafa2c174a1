"""A data set's missing shards submitted to Slurm as arrays; nothing is submitted twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moekit.cluster.profile import Cluster
from moekit.data.array.jobs import jobs_folder, still_there, submissions_of, submitted
from moekit.data.array.texts import DEFAULT_ARRAY_TASKS, Array, array_files, arrays
from moekit.data.dataset import Dataset
from moekit.data.plan import DataFolder
from moekit.launch import slurm, slurm_text
from moekit.launch.folders import write
from moekit.problems import MoekitError, Problem, error
from moekit.runs import submissions


@dataclass(frozen=True)
class Sent:
    """One array that Slurm took."""

    folder: Path
    job: str
    array: Array

    def as_json(self) -> dict[str, Any]:
        """What a script needs of it."""
        return {"job": self.job, "directory": str(self.folder), "tasks": list(self.array.tasks)}


def refuse_while_running(folder: DataFolder) -> None:
    """See that no array of a data set waits or runs.

    Raises:
        MoekitError: one does, or Slurm does not answer, or another moekit is submitting one.
    """
    if problem := still_there(submitted(folder), folder.path.name):
        raise MoekitError(problem)


def submit(
    dataset: Dataset, folder: DataFolder, missing: Sequence[int], cluster: Cluster, python: str
) -> tuple[list[Sent], list[Problem]]:
    """Submit the shards that are missing; the arrays, and what was refused once Slurm had taken one.

    Raises:
        MoekitError: as `refuse_while_running`; or the profile does not fit, or Slurm refuses the first array.
    """
    if not slurm.available():
        raise error(
            "`sbatch` is not on PATH", "run this on a login node of the cluster, or tokenize here: `--on local`"
        )
    refuse_while_running(folder)
    most = max_array_tasks(cluster)
    texts = [(array, array_files(dataset, folder, array, cluster, python)) for array in arrays(missing, most)]
    known = submissions.read(submissions_of(folder))
    newest = known[0].number if known else 0
    sent: list[Sent] = []
    for array, files in texts:
        # one array after the other where a throttle is to hold for all of them
        behind = [f"--dependency=afterany:{slurm_text.number(sent[-1].job)}"] if sent and dataset.max_running else []
        try:
            newest = submissions.claim(submissions_of(folder), newest)
            job = _sbatch(folder, newest, files, behind)
        except MoekitError as refused:
            if not sent:
                raise
            return sent, [*refused.problems]
        sent.append(Sent(jobs_folder(folder, newest), job, array))
    return sent, []


def max_array_tasks(cluster: Cluster) -> int:
    """The most elements that one array may have: the profile's, else Slurm's own."""
    if cluster.max_array_tasks:
        return cluster.max_array_tasks
    said = slurm.call(["scontrol", "show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", said.out, re.MULTILINE)
    return max(1, int(found[1])) if found else DEFAULT_ARRAY_TASKS


def _sbatch(folder: DataFolder, number: int, files: dict[str, str], options: Sequence[str]) -> str:
    """Write one submission and have Slurm take it, and put down what came of it; the array's id."""
    run, path = submissions_of(folder), jobs_folder(folder, number)
    try:
        write(path, files)
        job = slurm.submit(path, options, script="array.sbatch")
    except slurm.Unanswered as silent:
        submissions.record(run, number, "unanswered", said=silent.problems[0].what)
        hint = f"it may have the job all the same: `moekit data status {folder.path.name}` looks for it"
        raise error(silent.problems[0].what, hint, str(path)) from None
    except MoekitError as refused:
        problem = refused.problems[0]
        submissions.record(run, number, "refused", said=problem.what)
        asked = f"what it asks for is in {path}/array.sbatch, from the profile and the data set's description"
        raise error(problem.what, "; ".join(text for text in (problem.hint, asked) if text)) from None
    submissions.record(run, number, "submitted", job=job)
    return job
