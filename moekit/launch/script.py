"""A recipe and a cluster profile to the texts of a Slurm job: its header, what srun and torchrun get, the environment.

`train.sh` is the job's body, a plain bash file that is the same for every run; all that differs stands in these texts.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

import moekit
from moekit import share
from moekit.launch.cluster import Cluster
from moekit.launch.rundir import lines, run_dir, run_files
from moekit.problems import MoekitError, error
from moekit.recipe.load import Loaded
from moekit.recipe.schema import Recipe

SIGNAL_LEAD_S = 300
"""Seconds before the time limit at which a run with `resilience.exit_signal_handler` is told to save and end."""

_BEFORE_BLACKWELL = ("a100", "h100", "h200")


def slurm_files(loaded: Loaded, name: str, cluster: Cluster) -> dict[str, str]:
    """The text of every file of a run directory for Slurm, by its path there; the same every time.

    Raises:
        MoekitError: the recipe does not fit the profile's nodes, or names a variable that a job cannot be given.
    """
    recipe = loaded.recipe
    run_dir(cluster.shared_root, name)
    try:
        nodes_and_gpus(recipe, cluster)
    except MoekitError as unfit:
        (problem,) = unfit.problems
        raise error(problem.what, problem.hint, loaded.source.where("parallel.gpus")) from None
    variables = environment(recipe, cluster)
    return {
        "job.sbatch": job_script(recipe, cluster, name),
        "train.sh": (share.folder("slurm") / "train.sh").read_text(encoding="utf-8"),
        "environment.sh": environment_script(variables, recipe.runtime.secrets or ()),
        "argv.srun": lines(srun_words(recipe, cluster)),
        "argv.torchrun": lines(torchrun_words(recipe, cluster)),
        **run_files(loaded, name, cluster.shared_root, cluster.name),
    }


def nodes_and_gpus(recipe: Recipe, cluster: Cluster) -> tuple[int, int]:
    """How many nodes a run takes, and how many GPUs of each."""
    gpus, per_node = recipe.parallel.gpus, cluster.gpus_per_node
    if gpus is None:
        raise error("`parallel.gpus` is not set", "it is the number of GPUs of the whole run")
    if gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        what = f"{gpus} GPUs are no whole number of nodes with {per_node} GPUs each (profile `{cluster.name}`)"
        raise error(what, f"`parallel.gpus` can be {below} or {below + per_node}")
    return max(1, gpus // per_node), min(gpus, per_node)


def job_script(recipe: Recipe, cluster: Cluster, name: str) -> str:
    """The sbatch file: a header and one line that runs the body. Its paths are relative to the run directory."""
    nodes, gpus = nodes_and_gpus(recipe, cluster)
    options: dict[str, object] = {
        "job-name": name,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": nodes,
        "ntasks-per-node": 1,  # one torchrun a node, which starts a process for each GPU
        "cpus-per-task": cluster.cpus_per_task,
        "gres": f"gpu:{gpus}",
        "mem": 0,  # all of a node's
        "time": recipe.runtime.time_limit_min or cluster.time_limit_min,
        "output": "slurm-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{SIGNAL_LEAD_S}" if _ends_on_sigterm(recipe) else None,
    }
    header = [f"#SBATCH --{option}={value}" for option, value in options.items() if value is not None]
    header += ["#SBATCH --exclusive", "#SBATCH --no-requeue"]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Run {name} on {cluster.name}, by moekit {moekit.__version__}. In this folder: sbatch job.sbatch",
            *header,
            "exec bash train.sh",
            "",
        ]
    )


def srun_words(recipe: Recipe, cluster: Cluster) -> list[str]:
    """The options of srun that are known before the job runs: one task a node, in the profile's container."""
    nodes, _ = nodes_and_gpus(recipe, cluster)
    words = [f"--nodes={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    if cluster.cpus_per_task:
        words.append(f"--cpus-per-task={cluster.cpus_per_task}")
    if cluster.container == "none":
        return words
    winning = [name for name, value in environment(recipe, cluster).items() if value is not None]
    return [
        *words,
        f"--container-image={cluster.image}",
        f"--container-mounts={','.join(_mounts(cluster))}",
        "--no-container-mount-home",  # or packages in ~/.local are imported before the image's
        "--no-container-entrypoint",
        f"--container-env={','.join([*winning, *(recipe.runtime.secrets or ())])}",  # else the image's values win
    ]


def torchrun_words(recipe: Recipe, cluster: Cluster) -> list[str]:
    """The command that starts a node's processes, up to what is known only when the job runs."""
    nodes, gpus = nodes_and_gpus(recipe, cluster)
    layout = [f"--nnodes={nodes}", f"--nproc-per-node={gpus}"]
    return [cluster.python, "-m", "torch.distributed.run", *layout, "--rdzv-backend=c10d"]


def environment(recipe: Recipe, cluster: Cluster) -> dict[str, str | None]:
    """The variables of the training processes; None unsets one. The recipe's win over the profile's, its over ours."""
    last_iters = recipe.monitor.routing_trace_last_iters
    ours = {
        "MOEKIT_DEVICE": "gpu",
        "MOEKIT_MEGATRON": cluster.megatron_path,
        "MOEKIT_LIBRARY_PATH": ":".join(cluster.library_path) if cluster.library_path else None,
        "MOEKIT_ROUTING_TRACE_LAST_ITERS": str(last_iters) if last_iters else None,
    }
    if recipe.model.stack == "hybrid":
        ours["MOEKIT_STACK"] = "hybrid"
    if _needs_one_connection(recipe, cluster):
        ours["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if _ends_on_sigterm(recipe):
        ours["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SIGNAL_LEAD_S)  # torchrun's 30 s end many a save half-way
    return {**ours, **(cluster.environment or {}), **(recipe.runtime.environment or {})}


def environment_script(variables: Mapping[str, str | None], secrets: tuple[str, ...]) -> str:
    """The variables as a file for bash to source, every value byte for byte; a secret is only asked for."""
    said = [
        f"unset -v {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in variables.items()
    ]
    asked = [f': "${{{name}:?is a secret of this run: set it in the shell that submits}}"' for name in secrets]
    return "".join(f"{line}\n" for line in (*said, *asked))


def _needs_one_connection(recipe: Recipe, cluster: Cluster) -> bool:
    """Whether Megatron stops unless CUDA_DEVICE_MAX_CONNECTIONS is 1.

    Before Blackwell, tensor and context parallelism need it; with FSDP it must not be 1, and where the expert exchange
    is overlapped the choice is the user's (megatron/training/arguments.py:1143 and 1411-1439 at 0.19.2).
    """
    parallel = recipe.parallel
    split = max(parallel.tensor_model or 1, parallel.context or 1) > 1
    fsdp = parallel.use_megatron_fsdp or "--use-torch-fsdp2" in (recipe.megatron.extra or ())
    return bool(cluster.gpu in _BEFORE_BLACKWELL and split and not fsdp and not recipe.overlap.moe_expert_parallel_comm)


def _ends_on_sigterm(recipe: Recipe) -> bool:
    """Whether the trainer saves and ends on the scheduler's SIGTERM, the one signal that torchrun hands on."""
    return bool(recipe.resilience.exit_signal_handler) and recipe.resilience.exit_signal in (None, "SIGTERM")


def _mounts(cluster: Cluster) -> Iterator[str]:
    """All mounts as `/path:/inside`: what all nodes share under its own path, so that paths mean the same inside."""
    yield f"{cluster.shared_root}:{cluster.shared_root}"
    megatron = cluster.megatron_path
    if megatron and not f"{megatron}/".startswith(f"{cluster.shared_root.rstrip('/')}/"):
        yield f"{megatron}:{megatron}"
    for mount in cluster.mounts or ():
        yield mount if ":" in mount else f"{mount}:{mount}"
