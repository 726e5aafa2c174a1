"""A recipe and a cluster profile to the texts of a Slurm job: its header, what srun and torchrun get, the environment.

`train.sh` is the job's body, a plain bash file that is the same for every run; all that differs stands in these texts.
`docs/slurm.md` says why each option is there.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping

import moekit
from moekit import share
from moekit.cluster.profile import Cluster, over_limits
from moekit.job.attempts import MAX_ATTEMPTS
from moekit.launch.run_files import job_variables, lines, run_files
from moekit.launch.rundir import run_dir
from moekit.preflight.files import preflight_files
from moekit.problems import MoekitError, Problem, error
from moekit.recipe.load import Loaded
from moekit.recipe.schema import Recipe

SIGNAL_LEAD_S = 300
"""Seconds before the time limit at which a run with `resilience.exit_signal_handler` is told to save and end. torchrun
waits as long for its ranks."""
STRAGGLERS_S = 60
"""Seconds that a node's tasks are given once another node's have ended, well or not."""
STORE_TIMEOUT_S = 1800
"""Seconds in which all nodes must have come together: the first may have its container long before the last."""

_BEFORE_BLACKWELL = ("a100", "h100", "h200")
_HANDED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that torchrun gives to its ranks unasked (torch/distributed/run.py, `--signals-to-handle`)."""
_NSYS = (
    "nsys",
    "profile",
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--capture-range=cudaProfilerApi",  # from Megatron's cudaProfilerStart to its cudaProfilerStop
    "--capture-range-end=stop",  # what ends is the recording; unsaid, nsys ends the training as well
    "--force-overwrite=true",
)


def slurm_files(loaded: Loaded, name: str, cluster: Cluster) -> dict[str, str]:
    """The text of every file of a run directory for Slurm, by its path there; the same every time.

    Raises:
        MoekitError: the recipe does not fit the profile's nodes and limits, or names a variable that a job cannot get.
    """
    recipe = loaded.recipe
    run_dir(cluster.shared_root, name)
    if problems := list(_unfit(loaded, cluster)):
        raise MoekitError(*problems)
    variables = environment(recipe, cluster)
    gpus = nodes_and_gpus(recipe, cluster)[1]
    looked = preflight_files(cluster, variables, gpus=gpus) if _is_looked(loaded, cluster) else {}
    texts = {
        "job.sbatch": job_script(recipe, cluster, name),
        "train.sh": (share.folder("slurm") / "train.sh").read_text(encoding="utf-8"),
        "environment.sh": environment_script(variables, recipe.runtime.secrets or ()),
        "retry.json": retry_facts(recipe, cluster),
        "argv.srun": lines(srun_words(recipe, cluster)),
        "argv.torchrun": lines(torchrun_words(recipe, cluster)),
        **run_files(loaded, name, cluster.shared_root, cluster.name),
        **looked,
    }
    return {**texts, "argv.nsys": lines(_NSYS)} if _profiled_nodes(recipe, cluster) else texts


def _is_looked(loaded: Loaded, cluster: Cluster) -> bool:
    """Whether the job looks at its nodes before it trains."""
    return cluster.preflight and not _on_cpu(loaded.recipe)


def _unfit(loaded: Loaded, cluster: Cluster) -> Iterator[Problem]:
    """Why a recipe cannot run on this kind of node, or so many of them, or so long."""
    place = loaded.source.where("parallel.gpus")
    try:
        nodes, _ = nodes_and_gpus(loaded.recipe, cluster)
    except MoekitError as unfit:
        yield from (Problem(place, problem.what, problem.hint) for problem in unfit.problems)
    else:
        yield from (Problem(place, what, hint) for what, hint in over_limits(cluster, nodes=nodes))
    time_min, place = _time_limit_min(loaded.recipe, cluster), loaded.source.where("runtime.time_limit_min")
    yield from (Problem(place, what, hint) for what, hint in over_limits(cluster, time_min=time_min))


def nodes_and_gpus(recipe: Recipe, cluster: Cluster) -> tuple[int, int]:
    """How many nodes a run takes, and how many GPUs of each; with `runtime.device: cpu`, how many processes."""
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
        "partition": (cluster.cpu_partition or cluster.partition) if _on_cpu(recipe) else cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": nodes,
        "ntasks-per-node": 1,  # one torchrun a node, which starts a process for each GPU
        "cpus-per-task": cluster.cpus_per_task,
        "gres": None if _on_cpu(recipe) else f"{cluster.gres}:{gpus}",
        "mem": 0,  # all of a node's
        "time": _time_limit_min(recipe, cluster),
        "output": "slurm-%j.log",
        "open-mode": "append",
        "signal": f"{_exit_signal(recipe).removeprefix('SIG')}@{SIGNAL_LEAD_S}" if _exit_signal(recipe) else None,
    }
    header = [f"#SBATCH --{option}={value}" for option, value in options.items() if value is not None]
    requeue = "requeue" if recipe.resilience.requeue else "no-requeue"
    header += ["#SBATCH --exclusive", f"#SBATCH --{requeue}"]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Run {name}, by moekit {moekit.__version__}. In this folder: sbatch job.sbatch",
            *header,
            "exec bash train.sh",
            "",
        ]
    )


def retry_facts(recipe: Recipe, cluster: Cluster) -> str:
    """What `job/retry.py` has to know of a run besides its attempts."""
    nodes, gpus = nodes_and_gpus(recipe, cluster)
    facts = {
        "requeue": bool(recipe.resilience.requeue),
        "max_attempts": recipe.resilience.max_attempts or MAX_ATTEMPTS,
        "world": nodes * gpus,
        "ranks_per_node": gpus,
    }
    return json.dumps(facts, indent=1) + "\n"


def srun_words(recipe: Recipe, cluster: Cluster) -> list[str]:
    """The options of srun that are known before the job runs: one task a node, in the profile's container."""
    nodes, _ = nodes_and_gpus(recipe, cluster)
    words = [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--export=ALL",  # also where the job was submitted with `--export=NONE`, which steps inherit
        # not `--kill-on-bad-exit`: the first torchrun that was told to end would have the others killed as they save
        "--kill-on-bad-exit=0",
        f"--wait={STRAGGLERS_S}",
    ]
    if cluster.cpus_per_task:
        words.append(f"--cpus-per-task={cluster.cpus_per_task}")
    if cluster.container == "none":
        return words
    winning = [name for name, value in environment(recipe, cluster).items() if value is not None]
    return [
        *words,
        f"--container-image={cluster.image}",
        f"--container-mounts={','.join(mounts_of(cluster))}",
        "--no-container-mount-home",  # or packages in ~/.local are imported before the image's
        "--no-container-entrypoint",
        f"--container-env={','.join([*winning, *(recipe.runtime.secrets or ())])}",  # else the image's values win
    ]


def torchrun_words(recipe: Recipe, cluster: Cluster) -> list[str]:
    """The command that starts a node's processes, up to what is known only when the job runs."""
    nodes, gpus = nodes_and_gpus(recipe, cluster)
    words = [
        *(cluster.python, "-m", "torch.distributed.run"),
        *(f"--nnodes={nodes}", f"--nproc-per-node={gpus}"),
        # `static`, whose ranks follow Slurm's order of nodes; `c10d` sorts nodes by name, n10 before n2
        *("--rdzv-backend=static", f"--rdzv-conf=timeout={STORE_TIMEOUT_S}", "--max-restarts=0"),
    ]
    signal = _exit_signal(recipe)
    if signal and signal not in _HANDED_ON:
        words.append(f"--signals-to-handle={','.join((*_HANDED_ON, signal))}")
    return words


def environment(recipe: Recipe, cluster: Cluster) -> dict[str, str | None]:
    """The variables of the training processes; None unsets one. The recipe's win over the profile's, its over ours."""
    ours = {
        "MOEKIT_DEVICE": recipe.runtime.device or "gpu",
        "MOEKIT_MEGATRON": cluster.megatron_path,
        "MOEKIT_LIBRARY_PATH": ":".join(cluster.library_path) if cluster.library_path else None,
        "MOEKIT_SETUP_SCRIPT": cluster.setup_script,
        **job_variables(recipe),
        "MOEKIT_PROFILED_NODES": _profiled_nodes(recipe, cluster),
    }
    if recipe.model.stack == "hybrid":
        ours["MOEKIT_STACK"] = "hybrid"
    if _on_cpu(recipe):
        ours["CUDA_VISIBLE_DEVICES"] = ""
        if cluster.cpus_per_task:
            processes = min(recipe.parallel.gpus or 1, cluster.gpus_per_node)
            ours["OMP_NUM_THREADS"] = str(max(1, cluster.cpus_per_task // processes))
    elif _is_sharded(recipe):
        ours["CUDA_DEVICE_MAX_CONNECTIONS"] = None
    elif _needs_one_connection(recipe, cluster):
        ours["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if _exit_signal(recipe):
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


def _time_limit_min(recipe: Recipe, cluster: Cluster) -> int | None:
    return recipe.runtime.time_limit_min or cluster.time_limit_min


def _on_cpu(recipe: Recipe) -> bool:
    return recipe.runtime.device == "cpu"


def _is_sharded(recipe: Recipe) -> bool:
    """Whether the run is one of FSDP, which stops where CUDA_DEVICE_MAX_CONNECTIONS is 1.

    A login shell may have that set (megatron/training/arguments.py:1014 and 1143 at 0.19.2).
    """
    return bool(recipe.parallel.use_megatron_fsdp or "--use-torch-fsdp2" in (recipe.megatron.extra or ()))


def _needs_one_connection(recipe: Recipe, cluster: Cluster) -> bool:
    """Whether Megatron stops unless CUDA_DEVICE_MAX_CONNECTIONS is 1.

    Before Blackwell, tensor and context parallelism need it, but for FSDP; where the expert exchange is overlapped the
    choice is the user's (megatron/training/arguments.py:1411-1439 at 0.19.2).
    """
    split = max(recipe.parallel.tensor_model or 1, recipe.parallel.context or 1) > 1
    return cluster.gpu in _BEFORE_BLACKWELL and split and not recipe.overlap.moe_expert_parallel_comm


def _exit_signal(recipe: Recipe) -> str:
    """The signal on which the trainer saves and ends; empty where it does not."""
    return (recipe.resilience.exit_signal or "SIGTERM") if recipe.resilience.exit_signal_handler else ""


def _profiled_nodes(recipe: Recipe, cluster: Cluster) -> str | None:
    """The nodes, from 0, of the ranks that Nsight Systems records, `0,3`; None where it does not.

    Without `profile.ranks` it is all of them (megatron/training/training.py:3727 at 0.19.2).
    """
    profile, gpus = recipe.profile, recipe.parallel.gpus
    if not profile.enabled or profile.use_pytorch_profiler or not gpus:
        return None
    nodes = {rank // min(gpus, cluster.gpus_per_node) for rank in profile.ranks or range(gpus)}
    return ",".join(map(str, sorted(nodes)))


def mounts_of(cluster: Cluster) -> Iterator[str]:
    """All mounts as `/path:/inside`: what all nodes share under its own path, so that paths mean the same inside."""
    yield f"{cluster.shared_root}:{cluster.shared_root}"
    megatron = cluster.megatron_path
    if megatron and not f"{megatron}/".startswith(f"{cluster.shared_root.rstrip('/')}/"):
        yield f"{megatron}:{megatron}"
    for mount in cluster.mounts or ():
        yield mount if ":" in mount else f"{mount}:{mount}"
