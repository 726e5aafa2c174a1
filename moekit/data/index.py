"""`moekit data index`: Megatron's index of a recipe's data, built before any GPU is held, here or by a job on CPUs.

It lies in `cache/` of the data set's folder, where a training of the recipe looks for it and then builds nothing. What
builds it works in `indexes/` beside that, and claims no run's name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moekit.cluster.profile import Cluster
from moekit.data.folders import locked
from moekit.launch import needs
from moekit.launch.data_there import PREPARED_DATA
from moekit.launch.folders import write
from moekit.launch.index import folder_of, for_runs, has_index
from moekit.launch.missing import missing
from moekit.launch.processes import environment
from moekit.launch.run_files import job_variables, run_files
from moekit.launch.rundir import RunDir, data_dir
from moekit.launch.script import environment as cluster_environment
from moekit.launch.script import environment_script
from moekit.launch.submit import prepare_data
from moekit.lifeline import die_with_parent
from moekit.problems import MoekitError, Problem, error
from moekit.recipe.load import Loaded


@dataclass(frozen=True)
class Index:
    """The index of one recipe's data, built or being built."""

    loaded: Loaded
    cache: Path
    """Where it lies."""
    folder: Path
    """Where what builds it works."""
    job: str | None = None
    """The job that builds it; None where it was built here."""
    said: str = ""
    """What was built here, in a sentence."""

    def as_json(self) -> dict[str, Any]:
        """What a script needs of it."""
        facts = {"recipe": self.loaded.name, "data": self.loaded.recipe.data.name, "cache": str(self.cache)}
        return {**facts, "directory": str(self.folder), "job": self.job, "said": self.said or None}


def build_here(loaded: Sequence[Loaded], shared_root: Path) -> Iterator[Index]:
    """Build one index after the other on this machine; each as soon as it is there.

    Raises:
        MoekitError: data, tokenizer or a package is missing, there is no index to be built, or Megatron fails.
    """
    _refuse(
        loaded, [problem for one in loaded for problem in needs.problems(_of_its_data(one), shared_root, os.environ)]
    )
    for one in _different(loaded, shared_root):
        if PREPARED_DATA in (one.recipe.data.name, one.recipe.data.tokenizer):
            prepare_data(one, shared_root)
        run = folder_of(one, shared_root)
        write(run.path, run_files(one, one.name, shared_root))
        with locked(run.path / ".lock", "waiting for another moekit that builds this index", _say):
            yield replace(_index(one, shared_root), said=_run(one, run))


def submit(loaded: Sequence[Loaded], cluster: Cluster) -> list[Index]:
    """Have a job on CPUs build each index, one after another; those that a job is building already are left to it.

    Raises:
        MoekitError: the profile has no CPU partition, something is missing, there is no index to be built, or Slurm
            refuses.
    """
    root = Path(cluster.shared_root)
    lacking = [problem for one in loaded for problem in missing(_of_its_data(one), cluster, os.environ)]
    if not cluster.cpu_partition:
        what = f"profile `{cluster.name}` names no partition of CPU nodes, and an index takes no GPU"
        lacking.append(Problem("", what, "name one in its `cpu_partition`, or build it here with `--on local`"))
    _refuse(loaded, lacking)
    jobs = for_runs(loaded, cluster, True)
    built = []
    for one in _different(loaded, root):
        run = folder_of(one, root)
        if PREPARED_DATA in (one.recipe.data.name, one.recipe.data.tokenizer):
            prepare_data(one, root)
        variables = environment_script(cluster_environment(one.recipe, cluster), ())
        write(run.path, {**run_files(one, one.name, root, cluster.name), "environment.sh": variables})
        (job,) = jobs.wanted_by(one, run)
        built.append(replace(_index(one, root), job=job))
    return built


def _refuse(loaded: Sequence[Loaded], lacking: Sequence[Problem]) -> None:
    """Raise what keeps the indices from being built, all of it; how often training reads the data is no matter here."""
    found = [problem for problem in dict.fromkeys(lacking) if problem.level == "error"]
    for one in loaded:
        if not has_index(one):
            what = f"there is no index of the data of `{one.name}` that could be built before a training"
            why = "data that are made up have none, and with some options Megatron counts samples on the way"
            found.append(Problem(one.source.where("data.name", "data"), what, why))
    if found:
        raise MoekitError(*found)


def _of_its_data(loaded: Loaded) -> Loaded:
    """The recipe as far as its index is concerned: without GPUs, secrets, a profiler and another run's checkpoint."""
    recipe = loaded.recipe
    runtime = replace(recipe.runtime, device="cpu", secrets=None)
    checkpoint, profile = replace(recipe.checkpoint, from_run=None), replace(recipe.profile, enabled=None)
    return replace(loaded, recipe=replace(recipe, runtime=runtime, checkpoint=checkpoint, profile=profile))


def _different(loaded: Sequence[Loaded], shared_root: Path) -> list[Loaded]:
    """The recipes without those whose index is another one's as well."""
    first: dict[tuple[str | None, str], Loaded] = {}
    for one in loaded:
        depends_on = folder_of(one, shared_root).path.name.removeprefix(one.name)
        first.setdefault((one.recipe.data.name, depends_on), one)
    return list(first.values())


def _index(loaded: Loaded, shared_root: Path) -> Index:
    name = loaded.recipe.data.name or ""
    return Index(loaded, data_dir(shared_root, name) / "cache", folder_of(loaded, shared_root).path)


def _run(loaded: Loaded, run: RunDir) -> str:
    """Run `job/index.py` to its end; the sentence that it prints."""
    recipe, log = loaded.recipe, run.path / "index.log"
    env = environment("cpu", 1, 1, job_variables(recipe), recipe.runtime.environment or {}, os.environ)
    command = [sys.executable, "job/index.py", *run.argv_first.read_text(encoding="utf-8").splitlines()]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=run.path,
            env={**env, "WORLD_SIZE": str(recipe.parallel.gpus or 1)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    ours = [line.removeprefix("moekit: ") for line in said if line.startswith("moekit: ")]
    if code:
        why = ours[-1] if ours else next((line for line in reversed(said) if line.strip()), "it printed nothing")
        raise error(f"the index was not built: {why}", f"all that was printed is in {log}", loaded.source.shown)
    return ours[-1] if ours else ""


def _say(text: str) -> None:
    print(text, file=sys.stderr)
