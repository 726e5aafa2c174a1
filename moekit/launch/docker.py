"""A run in a container on this machine: the `docker run` that its local launch starts in place of torchrun.

Nothing of a recipe meets a shell: docker takes words. Variables go by name, `--env NAME`, and docker reads their values
from its own environment, so that no value, and no secret, stands on a command line; a name without a value is unset in
the container. All else is as without a container: run directory, attempts, checkpoints, the live view, Ctrl-C.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moekit.cluster.profile import Cluster
from moekit.launch import data_there
from moekit.launch.checkout import look_at
from moekit.launch.missing import missing_secrets
from moekit.launch.processes import visible_gpus
from moekit.launch.script import environment, nodes_and_gpus, torchrun_words
from moekit.problems import Problem
from moekit.recipe.load import Loaded
from moekit.recipe.schema import Recipe

_ANSWERS_S = 20
_PLAIN_PATH = re.compile(r"/[^:\n]*")


@dataclass(frozen=True)
class Container:
    """What one attempt of a run starts docker with."""

    image: str
    name: str
    """The container's own."""
    run: Path
    mounts: tuple[str, ...]
    """`/path:/path` or `/path:/path:ro`."""
    gpus: bool
    variables: Mapping[str, str | None]
    """Of the training processes; None unsets one. A secret stands here with the value that the shell has."""
    torchrun: tuple[str, ...]

    def words(self) -> list[str]:
        """The command up to the trainer's own words."""
        return [
            *("docker", "run", "--rm", "--init", f"--name={self.name}"),
            *(("--gpus=all",) if self.gpus else ()),
            # ranks and loaders exchange batches in shared memory, of which docker gives 64 MiB; CUDA locks memory
            *("--ipc=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864"),
            *(f"--volume={mount}" for mount in self.mounts),
            f"--workdir={self.run}",
            # files are the user's own, who has no home and no name in there
            *(f"--user={os.getuid()}:{os.getgid()}", "--env=HOME=/tmp", "--env=USER=moekit"),
            *(f"--env={name}" for name in sorted([*self.variables, "MOEKIT_ATTEMPT"])),
            *("--entrypoint=", self.image),
            *self.torchrun,
        ]

    def environment(self, attempt: int, outer: Mapping[str, str]) -> dict[str, str]:
        """docker's own environment, where it finds the values."""
        inherited = {name: value for name, value in outer.items() if name not in self.variables}
        said = {name: value for name, value in self.variables.items() if value is not None}
        return {**inherited, **said, "MOEKIT_ATTEMPT": str(attempt)}


def container(
    loaded: Loaded, name: str, cluster: Cluster, image: str, root: Path, outer: Mapping[str, str]
) -> Container:
    """The container of a recipe's run below `root`, with a profile's checkout of Megatron and variables."""
    recipe = loaded.recipe
    run = root / "runs" / name
    mounts = [f"{root}:{root}"]
    if cluster.megatron_path and not Path(cluster.megatron_path).is_relative_to(root):
        mounts.append(f"{cluster.megatron_path}:{cluster.megatron_path}:ro")
    mounts += [mount if ":" in mount else f"{mount}:{mount}" for mount in cluster.mounts or ()]
    called = f"moekit-{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}-{zlib.crc32(str(run).encode()):08x}"
    torchrun = (*torchrun_words(recipe, cluster), "--rdzv-endpoint=127.0.0.1:29511", "--node-rank=0")
    on_cpu = recipe.runtime.device == "cpu"
    return Container(image, called, run, tuple(mounts), not on_cpu, _variables(recipe, cluster, outer), torchrun)


def _variables(recipe: Recipe, cluster: Cluster, outer: Mapping[str, str]) -> dict[str, str | None]:
    ours = {"PYTHONPATH": "job", "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}
    chosen = {"CUDA_VISIBLE_DEVICES": outer["CUDA_VISIBLE_DEVICES"]} if "CUDA_VISIBLE_DEVICES" in outer else {}
    secrets = {name: outer.get(name) for name in recipe.runtime.secrets or ()}
    return {**ours, **chosen, **environment(recipe, cluster), **secrets}


def problems(loaded: Loaded, cluster: Cluster, root: Path, image: str, outer: Mapping[str, str]) -> list[Problem]:
    """Everything that keeps a recipe from being trained in a container here, each with its remedy."""
    return [
        *_fits(loaded, cluster, outer),
        *_docker(image),
        *_megatron(loaded, cluster),
        *_paths(cluster, root),
        *data_there.problems(loaded, root),
        *missing_secrets(loaded, outer),
    ]


def _fits(loaded: Loaded, cluster: Cluster, outer: Mapping[str, str]) -> Iterator[Problem]:
    place = loaded.source.where("parallel.gpus")
    nodes, gpus = nodes_and_gpus(loaded.recipe, cluster)
    if nodes > 1:
        what = f"the recipe trains on {nodes} nodes, and docker starts a container on this one"
        yield Problem(place, what, "`--on slurm`, `--on skypilot` and `--on kubernetes` are for several")
    elif loaded.recipe.runtime.device != "cpu" and (found := visible_gpus(outer)) < gpus:
        what = f"the recipe trains on {gpus} GPU{'s' * (gpus > 1)}, and {found or 'none'} can be seen here"
        yield Problem(place, what, "launch it on a machine that has them; `--dry-run` shows the command")


def _docker(image: str) -> Iterator[Problem]:
    if not shutil.which("docker"):
        yield Problem("", "`docker` is not on PATH", "install it, with NVIDIA's container toolkit for `--gpus`")
        return
    done = _ask("docker", "image", "inspect", "--format={{.Id}}", image)
    said = " ".join(done.stderr.split())
    if done.returncode and "o such image" in said:
        yield Problem("", f"there is no image `{image}` here", f"`docker pull {image}`")
    elif done.returncode:
        yield Problem("", f"docker does not answer: {said or f'exit code {done.returncode}'}", "is its daemon running?")


def _megatron(loaded: Loaded, cluster: Cluster) -> list[Problem]:
    if not cluster.megatron_path:
        return []  # the image's own
    return look_at(cluster.megatron_path, loaded.recipe.megatron.version)[1]


def _paths(cluster: Cluster, root: Path) -> Iterator[Problem]:
    for path in filter(None, (str(root), cluster.megatron_path)):
        if not _PLAIN_PATH.fullmatch(path):
            yield Problem("", f"docker mounts no path with a `:` in it: {path}", "run this in another folder")


@contextmanager
def alone(container: Container | None) -> Iterator[None]:
    """See that no container of that name is there before or after: docker's client can be killed, and it goes on."""
    if container is None:
        yield
        return
    _ask("docker", "rm", "--force", container.name)
    try:
        yield
    finally:
        _ask("docker", "rm", "--force", container.name)


def _ask(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=_ANSWERS_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer within {_ANSWERS_S} s")
