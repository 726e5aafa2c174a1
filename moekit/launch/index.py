"""The job that builds Megatron's index of the data before a run's own job: one CPU node, while no GPU is held.

It lies in `index/` of the run directory, or where `moekit data index` puts it (`folder_of`), and runs `job/index.py`
with the run's own arguments. Runs that are launched together on the same data need it for more than time: each would
build the same files, over those of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import moekit
from moekit import share
from moekit.cluster.profile import Cluster
from moekit.job.gpt import OF_A_CHECKOUT
from moekit.job.index import CHANGES_ON_THE_WAY
from moekit.launch import slurm
from moekit.launch.folders import write
from moekit.launch.run_files import lines
from moekit.launch.rundir import RunDir, data_dir, run_dir
from moekit.launch.script import srun_words
from moekit.launch.slurm_text import number
from moekit.megatron.flags import arguments, argv
from moekit.problems import MoekitError, Problem, error
from moekit.recipe.load import Loaded
from moekit.recipe.values import plain_values

TIME_LIMIT_MIN = 60
"""Of the job: an index of many shards takes minutes."""
_MADE_FROM = (
    *("data.name", "data.shards", "data.per_split", "data.tokenizer", "data.split", "model.seq_length", "train.seed"),
    *("train.iters", "train.samples", "train.global_batch_size", "train.eval_iters", "train.eval_interval"),
)
"""What the index of a run depends on (megatron/core/datasets/gpt_dataset.py, `_key_config_attributes`, and sizes)."""


@dataclass
class Indexes:
    """The index jobs of one launch: one for each index, one after another."""

    cluster: Cluster
    wanted: bool
    jobs: dict[tuple[object, ...], str] = field(default_factory=dict)

    def wanted_by(self, loaded: Loaded, run: RunDir) -> list[str]:
        """The job that a run waits for: one that builds its index already, else a new one where that is wanted.

        Raises:
            MoekitError: Slurm refuses it.
        """
        key = _key(loaded)
        if not has_index(loaded) or not (self.wanted or key in self.jobs):
            return []
        if key not in self.jobs:
            before = list(self.jobs.values())[-1:]  # so that no two of them write the same files
            self.jobs[key] = submit(loaded, run, self.cluster, before)
        return [self.jobs[key]]


def has_index(loaded: Loaded) -> bool:
    """Whether an index of a run's data can be built beforehand: made-up data have none, others a later one."""
    said = {word.lstrip("-").replace("-", "_") for word in argv(arguments(loaded.recipe)) if word.startswith("--")}
    return loaded.recipe.data.name is not None and not said & {*CHANGES_ON_THE_WAY, *OF_A_CHECKOUT}


def folder_of(loaded: Loaded, shared_root: str | Path) -> RunDir:
    """Where `moekit data index` works for a recipe, beside its data: `<data set>/indexes/<name>-<what it depends on>`.

    It is laid out as a run's directory is, as far as the index job reads that.
    """
    depends_on = hashlib.sha256(repr(_key(loaded)).encode()).hexdigest()[:8]
    return RunDir(data_dir(shared_root, loaded.recipe.data.name or "") / "indexes" / f"{loaded.name}-{depends_on}")


def for_runs(loaded: Sequence[Loaded], cluster: Cluster, wanted: bool | None) -> Indexes:
    """The index jobs for some runs, those that an earlier command submitted and that have not ended among them.

    Where it is not said, several runs of the same data have one.

    Raises:
        MoekitError: Slurm gives no answer.
    """
    if wanted is False:
        return Indexes(cluster, False)
    named = [one for one in loaded if one.recipe.data.name]
    folders = {folder_of(one, cluster.shared_root).path / "index": one for one in named}
    if wanted or (wanted is None and cluster.cpu_partition and _share_data(loaded)):
        wanted = True
        folders |= {run_dir(cluster.shared_root, one.name).path / "index": one for one in loaded}
    there = [folder for folder in folders if folder.is_dir()]
    found = slurm.jobs_in(there) if there else {}
    jobs = {_key(folders[folder]): job.id for folder in there for job in found.get(folder, []) if not job.ended}
    return Indexes(cluster, bool(wanted), jobs)


def problems(loaded: Sequence[Loaded], cluster: Cluster, wanted: bool | None) -> Iterator[Problem]:
    """Why an index cannot be built first, or should be."""
    for one in loaded if wanted else ():
        if not has_index(one):
            what = f"`--index-first`: there is no index of the data of `{one.name}` that could be built first"
            yield Problem(one.source.where("data.name", "data"), what, "leave it out")
    if cluster.cpu_partition:
        return
    hint = f"name a partition of CPU nodes in `cpu_partition` of profile `{cluster.name}`"
    if wanted:
        yield Problem("", "`--index-first` is a job for CPUs, and the profile names no partition of them", hint)
    elif wanted is None and _share_data(loaded):
        names = sorted({str(one.recipe.data.name) for one in loaded if has_index(one)})
        what = f"{len(loaded)} runs will each build the index of {', '.join(names)}, over each other's files"
        yield Problem("", what, f"{hint}: one job then builds it first", "warning")


def submit(loaded: Loaded, run: RunDir, cluster: Cluster, after: Sequence[str]) -> str:
    """Submit a run's index job, behind others; its id."""
    folder = run.path / "index"
    write(folder, files(loaded, run.path.name, cluster))
    options = [f"--dependency=afterany:{':'.join(map(number, after))}"] if after else []
    try:
        return slurm.submit(folder, options, script="index.sbatch")
    except MoekitError as refused:
        problem = refused.problems[0]
        raise error(f"{problem.what} (that of the index)", problem.hint, str(folder)) from None


def files(loaded: Loaded, name: str, cluster: Cluster) -> dict[str, str]:
    """The texts of `index/`."""
    options: dict[str, object] = {
        "job-name": f"{name}-index",
        "partition": cluster.cpu_partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": 1,
        "ntasks": 1,
        "time": TIME_LIMIT_MIN,
        "output": "slurm-%j.log",
        "open-mode": "append",
    }
    header = [f"#SBATCH --{option}={value}" for option, value in options.items() if value is not None]
    about = f"# The index of run {name}'s data, by moekit {moekit.__version__}. In this folder: sbatch index.sbatch"
    words = [word for word in srun_words(loaded.recipe, cluster) if not word.startswith(_OF_TRAINING)]
    return {
        "index.sbatch": "\n".join(["#!/bin/bash", about, *header, "exec bash index.sh", ""]),
        "index.sh": (share.folder("slurm") / "index.sh").read_text(encoding="utf-8"),
        "argv.srun": lines(["--nodes=1", "--ntasks=1", *words]),
        "argv.python": lines(["env", f"WORLD_SIZE={loaded.recipe.parallel.gpus}", cluster.python]),
    }


_OF_TRAINING = ("--nodes=", "--ntasks", "--cpus-per-task=", "--kill-on-bad-exit", "--wait=")
"""srun's options that are about nodes with GPUs."""


def _share_data(loaded: Sequence[Loaded]) -> bool:
    """Whether two runs would look for an index of the same data."""
    names = [one.recipe.data.name for one in loaded if has_index(one)]
    return len(names) > len(set(names))


def _key(loaded: Loaded) -> tuple[object, ...]:
    values = plain_values(loaded.recipe)
    return tuple(str(values.get(name)) for name in _MADE_FROM)
