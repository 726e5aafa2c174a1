"""The texts of the Slurm array that tokenizes a data set: one element a shard, on the profile's CPU partition.

Nothing here asks anybody: the same description, profile and list of shards give the same files. `tokenize.sh` is the
body, the same for every data set; all that differs stands in these texts.

    <shared_root>/data/<name>/
        submissions/1.json        what became of the first submission (runs/submissions.py)
        jobs/1/                   its working directory
            array.sbatch  tokenize.sh  argv.python
            array.json            which shards its elements make
            slurm-17_3.log        what the element of index 3 prints, over all its starts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import moekit
from moekit import share
from moekit.cluster.profile import Cluster, over_limits
from moekit.data.dataset import Dataset
from moekit.data.plan import DataFolder
from moekit.launch.run_files import lines
from moekit.launch.slurm_text import number
from moekit.problems import MoekitError, Problem

DEFAULT_ARRAY_TASKS = 1001
"""Slurm's own MaxArraySize (slurm.conf), taken where neither the profile nor Slurm says another."""


@dataclass(frozen=True)
class Array:
    """One job array. Its element of index `i` makes shard `offset + i`."""

    offset: int
    tasks: tuple[int, ...]
    """The shards it makes, ascending."""

    @property
    def indices(self) -> str:
        """Its elements as sbatch takes them: `0-3,7`."""
        return index_list([task - self.offset for task in self.tasks])

    def log(self, folder: Path, job: str, task: int) -> Path:
        """What the element of a shard prints; `job` is the array's id."""
        return folder / f"slurm-{number(job)}_{task - self.offset}.log"


def arrays(tasks: Sequence[int], max_array_tasks: int) -> list[Array]:
    """Shards to job arrays, none with an index that Slurm refuses: they go from 0 to MaxArraySize - 1."""
    groups = groupby(sorted(tasks), lambda task: task // max_array_tasks)
    return [Array(which * max_array_tasks, tuple(group)) for which, group in groups]


def index_list(numbers: Sequence[int]) -> str:
    """Numbers, ascending, with what follows each other joined: `0-3,7`."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(group[0][1], group[-1][1]) for _, pairs in runs if (group := list(pairs))]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def array_files(dataset: Dataset, folder: DataFolder, array: Array, cluster: Cluster, python: str) -> dict[str, str]:
    """The texts of one submission's directory, by name.

    `folder` is the data set's, `python` the interpreter that has moekit, on every node.

    Raises:
        MoekitError: the profile has no CPU partition, or the description asks for more than it gives.
    """
    if problems := list(_unfit(dataset, cluster)):
        raise MoekitError(*problems)
    command = [python, "-m", "moekit.data.array.task", str(folder.path), str(dataset.cpus_per_task)]
    facts = {"offset": array.offset, "tasks": list(array.tasks)}
    return {
        "array.sbatch": _script(dataset, array, cluster),
        "tokenize.sh": (share.folder("slurm") / "tokenize.sh").read_text(encoding="utf-8"),
        "argv.python": lines(command),
        "array.json": json.dumps(facts) + "\n",
    }


def read_array(folder: Path) -> Array | None:
    """What a submission's directory says of its elements; None where it was cut off before it said so."""
    try:
        facts = json.loads((folder / "array.json").read_text(encoding="utf-8"))
        return Array(int(facts["offset"]), tuple(map(int, facts["tasks"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _unfit(dataset: Dataset, cluster: Cluster) -> Iterator[Problem]:
    """Why the tasks cannot run on this cluster."""
    if cluster.cpu_partition is None:
        what = f"profile `{cluster.name}` names no partition of CPU nodes, and tokenizing takes no GPU"
        yield Problem("", what, "name one in its `cpu_partition`, or tokenize here with `--on local`")
    for what, hint in over_limits(cluster, time_min=dataset.time_limit_min):
        yield Problem("", f"`time_limit_min` of data set `{dataset.name}`: {what}", hint)


def _script(dataset: Dataset, array: Array, cluster: Cluster) -> str:
    """The sbatch file: a header and one line that runs the body. Its paths are relative to its own folder."""
    throttle = f"%{dataset.max_running}" if dataset.max_running else ""
    options: dict[str, object] = {
        "job-name": f"{dataset.name}-tokenize",
        "array": f"{array.indices}{throttle}",
        "partition": cluster.cpu_partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": dataset.cpus_per_task,
        "mem": f"{dataset.memory_gib}G",
        "time": dataset.time_limit_min or cluster.max_time_min,
        "output": "slurm-%A_%a.log",
        "open-mode": "append",  # a requeued element goes on in the log of its first start
    }
    header = [f"#SBATCH --{option}={value}" for option, value in options.items() if value is not None]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Shards of data set {dataset.name}, by moekit {moekit.__version__}. In this folder: sbatch array.sbatch",
            *header,
            "#SBATCH --requeue",
            f"exec bash tokenize.sh {array.offset}",
            "",
        ]
    )
