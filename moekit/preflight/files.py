"""What a job needs to look at its nodes: `preflight.sh`, `preflight.json`, the programs in `job/preflight/`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import moekit
from moekit import share
from moekit.cluster.profile import Cluster
from moekit.job.preflight.baselines import settings_of


def preflight_files(
    cluster: Cluster,
    variables: Mapping[str, str | None],
    *,
    gpus: int | None = None,
    level: int = 1,
    baseline: bool = False,
    tried: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The text of each file, by its path in the folder that the job runs in.

    Args:
        cluster: The profile.
        variables: The job's environment, of which NCCL's and the fabric's variables belong to a baseline.
        gpus: GPUs of each node that the job has; the profile's where None.
        level: Of DCGM's diagnostic, 1 to 4.
        baseline: Whether clean runs are added to the baselines.
        tried: Variables that are compared with their absence.
    """
    asked = {
        "profile": cluster.name,
        "gpu": cluster.gpu,
        "gpus_per_node": gpus or cluster.gpus_per_node,
        "fabric": cluster.fabric,
        "shared_root": cluster.shared_root,
        "level": level,
        "nccl_tests": cluster.nccl_tests,
        "image": _image(cluster),
        "library_path": None if _has_own_image(cluster) else ":".join(cluster.library_path or ()),
        "settings": dict(settings_of(variables)),
        "node_srun": _node_srun(cluster, gpus or cluster.gpus_per_node),
        "srun": _srun(cluster, gpus or cluster.gpus_per_node),
        "baseline": baseline,
        "try": dict(tried or {}),
    }
    folder = Path(moekit.__file__).parent / "job" / "preflight"
    programs = {f"job/preflight/{path.name}": path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    return {
        "preflight.sh": (share.folder("slurm") / "preflight.sh").read_text(encoding="utf-8"),
        "preflight.json": json.dumps(asked, indent=1) + "\n",
        **programs,
    }


def _has_own_image(cluster: Cluster) -> bool:
    """Whether nccl-tests come in an image of their own, with its own libraries for the network."""
    return cluster.container == "pyxis" and cluster.nccl_tests_image is not None


def _image(cluster: Cluster) -> str | None:
    return (cluster.nccl_tests_image or cluster.image) if cluster.container == "pyxis" else None


def _node_srun(cluster: Cluster, gpus: int) -> list[str]:
    """How a node is asked: one task, on the node itself, which sees all GPUs of the job."""
    words = [f"--gres={cluster.gres}:{gpus}", "--export=ALL", "--kill-on-bad-exit=0"]
    words.append("--wait=0")  # a node's diagnostic may take minutes longer than another's
    return [*words, f"--cpus-per-task={cluster.cpus_per_task}"] if cluster.cpus_per_task else words


def _srun(cluster: Cluster, gpus: int) -> list[str]:
    """How nccl-tests are started: a rank for each GPU, none bound to CPUs (handbook 2.1)."""
    words = [f"--gres={cluster.gres}:{gpus}", "--mpi=pmix", "--cpu-bind=none", "--export=ALL", "--kill-on-bad-exit=1"]
    if cluster.cpus_per_task:
        words.append(f"--cpus-per-task={max(1, cluster.cpus_per_task // gpus)}")
    if image := _image(cluster):
        mounts = [f"{cluster.shared_root}:{cluster.shared_root}"]
        mounts += [mount if ":" in mount else f"{mount}:{mount}" for mount in cluster.mounts or ()]
        words += [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"]
        words += ["--no-container-mount-home", "--no-container-entrypoint"]
    return words
