"""A cluster profile, `slurm/clusters/*.yaml`: what a job must know of the machines it runs on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from moekit import share
from moekit.problems import MoekitError, Problem, did_you_mean, error, shortened
from moekit.recipe.load import Source, is_there, load_as, show
from moekit.recipe.names import variable_problem
from moekit.recipe.schema.markers import AtLeast

DEFAULT = "aws-p5"
"""The profile taken where none is given: the handbook's cluster."""

_REQUIRED = ("name", "gpus_per_node", "gpu", "fabric", "container", "shared_root")
_WORD = re.compile(r"[A-Za-z0-9._,@+-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One kind of GPU node and what lies on it. Null is unset: nothing is printed and the site's own default holds."""

    name: str
    """The profile's name."""
    partition: str | None = None
    """Slurm partition of the GPU nodes."""
    account: str | None = None
    """Slurm account that is charged."""
    qos: str | None = None
    """Slurm quality of service."""
    gpus_per_node: Annotated[int, AtLeast(1)]
    """GPUs of one node: a node gets one task, and that starts one process for each GPU."""
    gpu: Literal["a100", "h100", "h200", "b200", "gb200", "b300", "gb300"]
    """GPU model."""
    cpus_per_task: Annotated[int | None, AtLeast(1)] = None
    """A node's CPUs: its one task gets them all. Said to `srun` as well, which does not take it over from the job on
    Slurm 22.05 to 23.02; without it all ranks and their loaders may share one core."""
    fabric: Literal["efa", "ib", "none"]
    """The network between nodes; `none` for a single node."""
    container: Literal["pyxis", "none"]
    """How a training process gets its software: `pyxis` starts `image` through srun, `none` runs on the node."""
    image: str | None = None
    """With `pyxis`: the squashfs file to start, as every node sees it (handbook 2.2)."""
    mounts: tuple[str, ...] | None = None
    """With `pyxis`: further folders seen inside, each `/path` or `/path:/inside`. `shared_root` and `megatron_path` are
    mounted anyway."""
    python: str = "python"
    """The interpreter that has torch, in the image or on the nodes: a name on PATH or a path."""
    shared_root: str
    """The folder that all nodes share: runs in `runs/`, data sets in `data/`, tokenizers in `tokenizers/`."""
    megatron_path: str | None = None
    """A Megatron-LM checkout that all nodes see. Null: the megatron-core that the image has."""
    time_limit_min: Annotated[int | None, AtLeast(1)] = None
    """Minutes a job gets where the recipe says none."""
    transformer_engine: str | None = None
    """Version of Transformer Engine that the training processes have."""
    cuda: str | None = None
    """Version of CUDA that the training processes have."""
    torch: str | None = None
    """Version of torch that the training processes have."""
    library_path: tuple[str, ...] | None = None
    """Folders put in front of LD_LIBRARY_PATH inside the container, which keeps what its image has there."""
    environment: Mapping[str, str | None] | None = None
    """Environment variables of the training processes; a null entry unsets one. They win over the image's."""


def find_cluster(given: str | None = None) -> Cluster:
    """The profile of a path or of a shipped name; the shipped `aws-p5` where none is given.

    Raises:
        MoekitError: with every problem of the file, each with its file and line.
    """
    cluster, source = load_as(Cluster, *_find(DEFAULT if given is None else given))
    if problems := list(_problems(cluster, source)):
        raise MoekitError(*problems)
    return cluster


def shipped_clusters() -> list[str]:
    """The names under which shipped profiles can be given."""
    return sorted(path.stem for path in (share.folder("slurm") / "clusters").glob("*.yaml"))


def _find(given: str) -> tuple[Path, str]:
    """The file of a profile, and how to call it."""
    path = Path(given)
    if is_there(path, given):
        return path, given
    shipped = share.folder("slurm") / "clusters" / f"{given}.yaml"
    if "/" not in given and shipped.is_file():
        return shipped, show(shipped)
    names = shipped_clusters()
    hint = did_you_mean(path.stem, names) or f"shipped are {', '.join(names)}"
    is_folder = given and path.is_dir()  # an empty path would be the working directory
    what = f"`{shortened(given)}` is a directory" if is_folder else f"there is no cluster profile `{shortened(given)}`"
    raise error(what, hint)


def _problems(cluster: Cluster, source: Source) -> Iterator[Problem]:
    """What is wrong with a profile beyond its single fields."""
    for name in _REQUIRED:
        if getattr(cluster, name) is None:
            yield Problem(source.where(name), f"`{name}` is missing")
    for name in ("partition", "account", "qos"):
        value = getattr(cluster, name)
        if value is not None and not _WORD.fullmatch(value):
            yield Problem(source.where(name), f"`{name}` is `{value}`, which no #SBATCH line carries")
    if cluster.container == "pyxis" and cluster.image is None:
        yield Problem(source.where("image", "container"), "`image` is missing, which `container: pyxis` starts")
    for name in ("image", "shared_root", "megatron_path"):
        value = getattr(cluster, name)
        if value is not None and (name != "image" or value.startswith(("/", "."))):
            yield from _path_problem(name, value, source)
    if re.search(r"\s", cluster.python):
        yield Problem(source.where("python"), f"`python` is `{cluster.python}`: one program, without arguments")
    yield from _mount_problems(cluster, source)
    for folder in cluster.library_path or ():
        if not folder.startswith("/") or ":" in folder:
            yield Problem(source.where("library_path"), f"`library_path` has `{folder}`; it lists absolute folders")
    for variable in cluster.environment or {}:
        if reason := variable_problem(variable):
            name = f"environment.{variable}"
            yield Problem(source.where(name), f"`{name}` {reason[0]}", reason[1])


def _path_problem(name: str, value: str, source: Source) -> Iterator[Problem]:
    if not value.startswith("/"):
        yield Problem(source.where(name), f"`{name}` must be an absolute path, not `{value}`", "all nodes must find it")
    elif found := re.search(r"[\s,:]", value):
        yield Problem(source.where(name), f"`{name}` has a `{found.group()}`, which no mount carries: `{value}`")


def _mount_problems(cluster: Cluster, source: Source) -> Iterator[Problem]:
    """What enroot would make of a mount: commas join mounts, colons split fields, spaces split again in its fstab."""
    place = source.where("mounts")
    for mount in cluster.mounts or ():
        if re.search(r"[\s,]", mount):
            yield Problem(place, f"mount `{mount}` has a space or a comma, which pyxis splits at")
        elif not re.fullmatch(r"/[^:]*(:/[^:]*(:[a-z+]+)?)?", mount):
            yield Problem(place, f"mount `{mount}` must be `/path` or `/path:/inside`, both absolute")
    inside = Counter((mount.split(":") * 2)[1] if ":" in mount else mount for mount in cluster.mounts or ())
    for target in [target for target, times in inside.items() if times > 1]:
        yield Problem(place, f"two mounts lie at `{target}`")
