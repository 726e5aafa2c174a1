"""How many processes a training script starts: what its launcher says, its `#SBATCH` lines, its variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from moekit.recipe.shell_values import Variables
from moekit.recipe.shell_words import Chars, lettered, spelled

_HEADER = re.compile(r"^#SBATCH\s+--?([A-Za-z-]+)[= \t][ \t]*(?:\w+:)?(\d+)[ \t]*(?:#.*)?$", re.MULTILINE)
_TOLD = {
    "nodes": "SLURM_NNODES",
    "N": "SLURM_NNODES",
    "ntasks": "SLURM_NTASKS",
    "n": "SLURM_NTASKS",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "gpus-per-node": "SLURM_GPUS_PER_NODE",
}
"""The variable in which Slurm tells a job what an option of its header says."""


def scheduler(text: str) -> dict[str, list[Chars]]:
    """What Slurm tells a job of its own `#SBATCH` lines, where those are numbers."""
    found: dict[str, str] = {}
    for option, value in _HEADER.findall(text):
        if option in _TOLD:
            found[_TOLD[option]] = value
    if "SLURM_NNODES" in found:
        found["SLURM_JOB_NUM_NODES"] = found["SLURM_NNODES"]
        if "SLURM_NTASKS_PER_NODE" in found:
            found.setdefault("SLURM_NTASKS", str(int(found["SLURM_NNODES"]) * int(found["SLURM_NTASKS_PER_NODE"])))
    return {name: [lettered(value)] for name, value in found.items()}


def world_size(launcher: Sequence[Chars], variables: Variables) -> int | None:
    """The world size that the launcher says, else the script's own variables."""
    words = [spelled(word) for word in launcher]
    programs = {PurePosixPath(word).name for word in words}
    if programs & {"torchrun", "torch.distributed.run", "torch.distributed.launch"}:
        size = _product(_said(words, "--nproc_per_node", "--nproc-per-node") or "1", _said(words, "--nnodes") or "1")
    else:
        tasks = _said(words, "--ntasks", "-n", "-np", "--np")
        per_node, nodes = _said(words, "--ntasks-per-node"), _said(words, "--nodes", "-N")
        size = _product(tasks) or _product(per_node or _held(variables, "SLURM_NTASKS_PER_NODE"),
                                           nodes or _held(variables, "SLURM_NNODES"))  # fmt: skip
        if size is None and "srun" in programs:
            size = _product(_held(variables, "SLURM_NTASKS"))
    if size is None:
        per_node = _held(variables, "GPUS_PER_NODE", "NPROC_PER_NODE", "SLURM_GPUS_PER_NODE")
        size = _product(_held(variables, "WORLD_SIZE")) or _product(per_node, _held(variables, "NNODES", "NUM_NODES"))
    return size


def _said(words: Sequence[str], *options: str) -> str:
    """The last value of an option, as `--option value` or `--option=value`."""
    found = ""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option in options:
            found = value if equals else following
    return found


def _held(variables: Variables, *names: str) -> str:
    return next((spelled(variables.values[name][0]) for name in names if variables.values.get(name)), "")


def _product(*factors: str) -> int | None:
    product = 1
    for factor in factors:
        if not re.fullmatch(r"[1-9]\d{0,6}", factor):
            return None
        product *= int(factor)
    return product
