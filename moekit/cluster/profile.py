"""A cluster profile, `slurm/clusters/*.yaml`: what a job must know of the machines it runs on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from moekit import share
from moekit.cluster.profile_rules import problems_of
from moekit.problems import Problem, did_you_mean, error, shortened
from moekit.recipe import flat, nodes
from moekit.recipe.load import is_there, show
from moekit.recipe.schema.markers import AtLeast

HINTS = {
    "`moekit new NAME --from first_moe` writes a recipe": "`moekit init` writes a profile of the cluster you are on",
    "a recipe is two levels": "a profile is one, but for `environment`",
    "inherit with `base:`": "write the values out: a profile inherits from none",
    "one file holds one recipe": "one file holds one profile",
}
"""What recipes are told about a text that is no plain YAML, and what a profile is told."""

DEFAULT = "aws-p5"
"""The profile taken where none is given: the handbook's cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One kind of GPU node and what lies on it. Null is unset: nothing is printed and the site's own default holds."""

    name: str
    """The profile's name."""
    partition: str | None = None
    """Slurm partition of the GPU nodes. Null: the cluster's default one."""
    cpu_partition: str | None = None
    """Slurm partition for work without GPUs: tokenization, index building. It may be the same one."""
    account: str | None = None
    """Slurm account that is charged. Null: the user's default one."""
    qos: str | None = None
    """Slurm quality of service. Null: the account's default one."""
    nodes: Annotated[int | None, AtLeast(1)] = None
    """Nodes of this kind that the partition has; a run that needs more is refused."""
    gpus_per_node: Annotated[int, AtLeast(1)]
    """GPUs of one node: a node gets one task, and that starts one process for each GPU."""
    gpu: Literal["a100", "h100", "h200", "b200", "gb200", "b300", "gb300"]
    """GPU model."""
    gres: str = "gpu"
    """What `--gres` asks for, up to the number: `gpu`, or `gpu:h100` where a partition has GPUs of several types."""
    cpus_per_task: Annotated[int | None, AtLeast(1)] = None
    """A node's CPUs: its one task gets them all. Said to `srun` as well, which does not take it over from the job on
    Slurm 22.05 to 23.02; without it all ranks and their loaders may share one core."""
    memory_gib: Annotated[int | None, AtLeast(1)] = None
    """A node's main memory as Slurm gives it to jobs."""
    fabric: Literal["efa", "ib", "none"]
    """The network between nodes: `efa` is AWS's; `ib` is InfiniBand, or RoCE by the same cards; `none` is for a single
    node, or slow."""
    time_limit_min: Annotated[int | None, AtLeast(1)] = None
    """Minutes a job gets where the recipe says none."""
    max_time_min: Annotated[int | None, AtLeast(1)] = None
    """The most minutes that the site gives a job."""
    max_nodes: Annotated[int | None, AtLeast(1)] = None
    """The most nodes that the site gives a job, where that is fewer than `nodes`."""
    max_array_tasks: Annotated[int | None, AtLeast(1)] = None
    """The most tasks that one job array may have: Slurm's MaxArraySize."""
    price_per_gpu_hour: Annotated[float | None, AtLeast(0)] = None
    """What a GPU costs an hour, in any currency: `moekit plan` then says what a run costs."""
    container: Literal["pyxis", "none"]
    """How a training process gets its software: `pyxis` starts `image` through srun, `none` runs on the node."""
    image: str | None = None
    """With `pyxis`: the squashfs file to start, as every node sees it (handbook 2.2), or a registry's name for one."""
    mounts: tuple[str, ...] | None = None
    """With `pyxis`: further folders seen inside, each `/path` or `/path:/inside`. `shared_root` and `megatron_path` are
    mounted anyway."""
    setup_script: str | None = None
    """With `container: none`: a bash file that a node sources before it starts `python`: modules, an environment."""
    python: str = "python"
    """The interpreter that has torch, in the image or on the nodes: a name on PATH or a path."""
    shared_root: str
    """The folder that all nodes share: runs in `runs/`, data sets in `data/`, tokenizers in `tokenizers/`."""
    megatron_path: str | None = None
    """A Megatron-LM checkout that all nodes see. Null: the megatron-core that the image has."""
    nccl_tests: str | None = None
    """The `alltoall_perf` of nccl-tests, which measures the network (handbook 2.1): a path in `nccl_tests_image`."""
    nccl_tests_image: str | None = None
    """With `pyxis`: the image that has it. Null: `image`."""
    transformer_engine: str | None = None
    """Version of Transformer Engine that the training processes have."""
    cuda: str | None = None
    """Version of CUDA that the training processes have."""
    torch: str | None = None
    """Version of torch that the training processes have."""
    preflight: bool = True
    """Whether a job looks at its nodes before it trains: GPUs, limits, the exchange between them (docs/preflight.md).
    """
    library_path: tuple[str, ...] | None = None
    """Folders put in front of LD_LIBRARY_PATH inside the container, which keeps what its image has there."""
    environment: Mapping[str, str | None] | None = None
    """Environment variables of the training processes; a null entry unsets one. They win over the image's."""


def find_cluster(given: str | None = None) -> Cluster:
    """The profile of a path or of a shipped name; the shipped `aws-p5` where none is given.

    Raises:
        MoekitError: with every problem of the file, each with its file and line.
    """
    path, shown = _find(DEFAULT if given is None else given)
    return parse_cluster(nodes.read_text(path, shown), shown)


def parse_cluster(text: str, shown: str) -> Cluster:
    """The profile that a YAML text says, called `shown` in messages; raises like `find_cluster`."""
    return flat.parse(Cluster, text, shown, problems_of, _of_a_profile)


def _of_a_profile(problem: Problem) -> Problem:
    """A problem of YAML, whose hints are for recipes, in a profile's words."""
    return replace(problem, hint=HINTS.get(problem.hint, problem.hint))


def over_limits(
    cluster: Cluster, *, nodes: int | None = None, time_min: int | None = None, array_tasks: int | None = None
) -> Iterator[tuple[str, str]]:
    """What of a job the profile's limits do not allow, each as (what, hint); nothing where no limit is said."""
    fewest = "nodes" if cluster.max_nodes is None else "max_nodes"
    asked = {"max_time_min": (time_min, "minutes"), "max_array_tasks": (array_tasks, "array tasks")}
    for name, (number, unit) in {fewest: (nodes, "nodes"), **asked}.items():
        most = getattr(cluster, name)
        if number is not None and most is not None and number > most:
            yield f"{number} {unit} are more than the {most} of profile `{cluster.name}`", f"`{name}` there says so"


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
    several = f"shipped are {', '.join(names)}; `moekit init` writes one for the cluster you are on"
    hint = did_you_mean(path.stem, names) or several
    is_folder = given and path.is_dir()  # an empty path would be the working directory
    what = f"`{shortened(given)}` is a directory" if is_folder else f"there is no cluster profile `{shortened(given)}`"
    raise error(what, hint)
