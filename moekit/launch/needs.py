"""What a local launch needs of this machine, all of it asked for at once and before anything is written."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from moekit.launch import data_there
from moekit.launch.data_there import PREPARED_DATA
from moekit.launch.processes import visible_gpus
from moekit.launch.rundir import data_dir, run_dir
from moekit.problems import Problem
from moekit.recipe.load import Loaded

DOWNLOAD = "about 3 GB to download, 6 GB on disk"
MEMORY_GIB_PER_PROCESS = 2.75
"""Of a small model on a CPU: its peak, reached while a checkpoint is written; torch and Megatron alone take 1.5."""
DISK_GIB = 1.0
ELSEWHERE = "run this in another folder, or with another `shared_root` in the profile"


def problems(loaded: Loaded, shared_root: Path, environ: Mapping[str, str]) -> list[Problem]:
    """Everything that keeps this recipe from being trained here, each with its remedy; and warnings."""
    if sys.platform != "linux":
        what = f"Megatron trains on Linux only, and this is {sys.platform}"
        remedy = "run this in a Linux container, a virtual machine or WSL 2; `moekit check` and `--dry-run` work here"
        return [Problem("", what, remedy)]
    return [
        *_too_few_gpus(loaded, environ),
        *_unrecorded_profile(loaded),
        *_missing_packages(loaded, shared_root),
        *_missing_files(loaded, shared_root),
        *_unreadable_path(loaded, shared_root),
        *_too_little_disk(shared_root),
    ]


def memory_warning(loaded: Loaded) -> str | None:
    """A sentence where the memory that is free may not do."""
    needed_gib = MEMORY_GIB_PER_PROCESS * (loaded.recipe.parallel.gpus or 1)
    free_gib = _available_memory_gib()
    if free_gib is None or free_gib >= needed_gib:
        return None
    return f"{free_gib:.1f} GiB of memory is free; this takes about {needed_gib:.1f} GiB, more for a larger model"


def _too_few_gpus(loaded: Loaded, environ: Mapping[str, str]) -> Iterator[Problem]:
    wanted, found = loaded.recipe.parallel.gpus or 1, visible_gpus(environ)
    if found < wanted and loaded.recipe.runtime.device != "cpu":
        what = f"the recipe trains on {wanted} GPU{'s' * (wanted > 1)}, and {found or 'none'} can be seen here"
        place = loaded.source.where("parallel.gpus")
        yield Problem(
            place, what, "for a cluster that has them, `moekit launch --on slurm --dry-run=DIR` writes the job"
        )


def _unrecorded_profile(loaded: Loaded) -> Iterator[Problem]:
    profile = loaded.recipe.profile
    if profile.enabled and not profile.use_pytorch_profiler:
        what = "`profile.enabled` alone is for Nsight Systems, and only a job on Slurm starts `nsys`"
        remedy = "add `use_pytorch_profiler: true`, which writes `attempts/N/torch_profile/`"
        yield Problem(loaded.source.where("profile.enabled"), what, remedy)


def _missing_packages(loaded: Loaded, shared_root: Path) -> Iterator[Problem]:
    data = loaded.recipe.data
    local = {"torch": "torch", "megatron-core": "megatron", "tensorboard": "tensorboard", "psutil": "psutil"}
    if data.tokenizer_type == "HuggingFaceTokenizer":
        local["transformers"] = "transformers"
    missing = {"local": _not_installed(local), "data": missing_tokenizing(loaded, shared_root)}
    names = [name for packages in missing.values() for name in packages]
    if names:
        wanted = ",".join(extra for extra, lacking in missing.items() if lacking)
        size = f" ({DOWNLOAD})" if "torch" in names else ""
        listed = ", ".join(f"`{name}`" for name in names)
        yield Problem("", f"not installed: {listed}", f"run `pip install 'moekit[{wanted}]'`{size}")
    else:
        yield from _other_megatron(loaded)


def missing_tokenizing(loaded: Loaded, shared_root: Path) -> list[str]:
    """The packages that are not installed of those that prepare the data set that comes with moekit, if it is to be."""
    if loaded.recipe.data.name != PREPARED_DATA or data_dir(shared_root, PREPARED_DATA).is_dir():
        return []
    return _not_installed({name: name for name in ("datatrove", "tokenizers", "orjson")})


def _not_installed(modules: Mapping[str, str]) -> list[str]:
    """Packages, by name with the module of each, that cannot be imported."""
    return [package for package, module in modules.items() if importlib.util.find_spec(module) is None]


def _other_megatron(loaded: Loaded) -> Iterator[Problem]:
    wanted = loaded.recipe.megatron.version
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:  # a folder of that name, say a checkout on PYTHONPATH
        what = "a `megatron` can be imported here, but `megatron-core` is not installed"
        yield Problem("", what, "run `pip install 'moekit[local]'`")
        return
    if version != wanted:
        what = f"the recipe is for Megatron {wanted}, and {version} is installed"
        yield Problem(loaded.source.where("megatron.version"), what, "run `pip install 'moekit[local]'`")


def _missing_files(loaded: Loaded, shared_root: Path) -> Iterator[Problem]:
    yield from data_there.problems(loaded, shared_root)
    parent = loaded.recipe.checkpoint.from_run
    if parent and not (folder := run_dir(shared_root, parent).checkpoints).is_dir():
        what = f"run `{parent}` has no checkpoint: {folder}"
        yield Problem(loaded.source.where("checkpoint.from_run"), what, "launch it first")


def _unreadable_path(loaded: Loaded, shared_root: Path) -> Iterator[Problem]:
    from moekit.data.quickstart import unreadable_path

    if loaded.recipe.data.name == PREPARED_DATA and (problem := unreadable_path(shared_root)):
        yield problem


def _too_little_disk(shared_root: Path) -> Iterator[Problem]:
    there = next(path for path in (shared_root.absolute(), *shared_root.absolute().parents) if path.exists())
    free_gib = shutil.disk_usage(there).free / 2**30
    if free_gib < DISK_GIB:
        what = f"{free_gib:.1f} GiB of disk is free, and a run needs {DISK_GIB:.0f} GiB"
        yield Problem(str(there), what, f"make room, or {ELSEWHERE}")
    if not os.access(there, os.W_OK):
        yield Problem(str(there), "cannot be written to, and runs are kept there", ELSEWHERE)


def _available_memory_gib() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) / 2**20 if found else None
