"""What a Slurm job needs that is not there: all of it at once, in the order in which it is made, each with how."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from moekit.cluster.profile import Cluster
from moekit.launch import data_there, slurm
from moekit.launch.checkout import look_at
from moekit.launch.data_there import PREPARED_DATA
from moekit.launch.needs import missing_tokenizing
from moekit.launch.rundir import run_dir
from moekit.problems import Problem
from moekit.recipe.load import Loaded


def missing(
    loaded: Loaded, cluster: Cluster, environ: Mapping[str, str], siblings: frozenset[str] = frozenset()
) -> list[Problem]:
    """Everything that a job of this recipe on this cluster would not find, or not as it should be; and warnings.

    `siblings` are runs that are launched with it, whose checkpoints need not be there yet.
    """
    return [
        *_folders(cluster),
        *_image(cluster),
        *_nccl_tests(loaded, cluster),
        *_megatron(loaded, cluster),
        *_data(loaded, cluster.shared_root),
        *_parent(loaded, cluster.shared_root, siblings),
        *missing_secrets(loaded, environ),
        *_slurm(),
    ]


def as_warnings(problems: list[Problem]) -> list[Problem]:
    """The same for a run that is only written: its job can be submitted when they are gone."""
    return [replace(problem, level="warning") for problem in problems]


def missing_secrets(loaded: Loaded, environ: Mapping[str, str]) -> list[Problem]:
    """The recipe's secrets that the submitting shell does not have: jobs get them from there alone."""
    place = loaded.source.where("runtime.secrets")
    return [
        Problem(place, f"`{name}` is a secret of this run, and is not set here", f"`read -rs {name} && export {name}`")
        for name in loaded.recipe.runtime.secrets or ()
        if not environ.get(name)
    ]


def _folders(cluster: Cluster) -> Iterator[Problem]:
    root = Path(cluster.shared_root)
    profile = f"profile `{cluster.name}`"
    if not root.is_dir():
        hint = f"`mkdir -p {root}` where all nodes see it, or name another `shared_root` in the profile"
        yield Problem("", f"there is no folder {root}, the `shared_root` of {profile}", hint)
    elif not os.access(root, os.W_OK):
        yield Problem("", f"the `shared_root` of {profile} cannot be written to: {root}", "name another in the profile")
    for mount in cluster.mounts or () if cluster.container == "pyxis" else ():
        source = mount.partition(":")[0]
        if not Path(source).exists():
            yield Problem("", f"there is no {source}, which {profile} mounts", "make it, or take it out of `mounts`")
    if cluster.setup_script and not Path(cluster.setup_script).is_file():
        yield Problem("", f"there is no {cluster.setup_script}, the `setup_script` of {profile}", "write it")


def _image(cluster: Cluster) -> Iterator[Problem]:
    if cluster.container == "none" or cluster.image is None or not cluster.image.startswith("/"):
        return
    if not Path(cluster.image).is_file():
        command = f"moekit image import pytorch --out {cluster.image}"
        hint = f"`{command}` makes one, `moekit image build efa` one with EFA; or name another in the profile's `image`"
        yield Problem("", f"there is no image: {cluster.image}", hint)


def _nccl_tests(loaded: Loaded, cluster: Cluster) -> Iterator[Problem]:
    """What a job measures its nodes with before it trains."""
    if not (cluster.preflight and cluster.nccl_tests) or loaded.recipe.runtime.device == "cpu":
        return
    inside = cluster.container == "pyxis"
    path = cluster.nccl_tests_image if inside else cluster.nccl_tests
    if path and path.startswith("/") and not Path(path).is_file():
        makes = f"`moekit image import nccl-tests --out {path}` makes one" if inside else "build it (handbook 2.1)"
        what = f"there is no {path}, with which the job measures its nodes"
        yield Problem("", what, f"{makes}; `nccl_tests: null` in the profile, or `--no-preflight`, goes without")


def _megatron(loaded: Loaded, cluster: Cluster) -> Iterator[Problem]:
    if cluster.megatron_path:
        _, problems = look_at(cluster.megatron_path, loaded.recipe.megatron.version)
        for problem in problems:
            yield replace(problem, where=loaded.source.where("megatron.version"))


def _data(loaded: Loaded, shared_root: str) -> Iterator[Problem]:
    if lacking := missing_tokenizing(loaded, Path(shared_root)):
        listed = ", ".join(f"`{name}`" for name in lacking)
        what = f"not installed, and `{PREPARED_DATA}` is prepared at its first launch: {listed}"
        yield Problem("", what, "run `pip install 'moekit[data]'`")
    yield from data_there.problems(loaded, Path(shared_root))


def _parent(loaded: Loaded, shared_root: str, siblings: frozenset[str]) -> Iterator[Problem]:
    parent = loaded.recipe.checkpoint.from_run
    if parent and parent not in siblings and not (run := run_dir(shared_root, parent)).latest_checkpoint.is_file():
        what = f"run `{parent}` has no complete checkpoint: {run.checkpoints}"
        place = loaded.source.where("checkpoint.from_run")
        yield Problem(place, what, f"`moekit launch {parent}` trains it, where that is its recipe")


def _slurm() -> Iterator[Problem]:
    if not slurm.available():
        hint = "launch on a login node of the cluster; `--no-submit` writes the run, for `sbatch` by hand"
        yield Problem("", "`sbatch` is not on PATH", hint)
