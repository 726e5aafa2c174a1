"""What a run was made of, as far as a cluster says it at launch: checkout, image, data, versions.

A run's `provenance.json` has what `rundir.run_files` says, which is the same every time, and these under `found`. No
gigabytes are read for it: an image is told by its size and time, and by the sha256 that somebody put down beside it
(`IMAGE.sha256`, as `sha256sum` writes it). Of data, the small files that list what was made are hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
from pathlib import Path
from typing import Any

from moekit.launch import slurm
from moekit.launch.checkout import look_at
from moekit.launch.cluster import Cluster
from moekit.launch.rundir import RunDir, data_dir, tokenizer_dir
from moekit.megatron.installed import find_judge
from moekit.problems import MoekitError
from moekit.recipe.load import Loaded

MOST_HASHED_BYTES = 64 * 2**20
_DATA_FILES = ("manifest.json", "data-args.txt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def with_found(files: dict[str, str], found: dict[str, Any]) -> dict[str, str]:
    """A run's files with what was found on the cluster in their provenance."""
    name = str(RunDir(Path()).provenance)
    return {**files, name: json.dumps({**json.loads(files[name]), "found": found}, indent=2) + "\n"}


def found_on(cluster: Cluster, loaded: Loaded, as_checked: bool | None) -> dict[str, Any]:
    """What the job of a recipe will find there; what is missing is null.

    `as_checked` says that the Megatron checkout was looked at and is as the recipe was checked; None looks.
    """
    recipe, root = loaded.recipe, cluster.shared_root
    return {
        "checkout": _checkout(cluster.megatron_path, recipe.megatron.version, as_checked),
        "image": image_facts(cluster.image) if cluster.container == "pyxis" and cluster.image else None,
        "data": _folder(data_dir(root, recipe.data.name), _DATA_FILES) if recipe.data.name else None,
        "tokenizer": _folder(tokenizer_dir(root, recipe.data.tokenizer), _TOKENIZER_FILES)
        if recipe.data.tokenizer
        else None,
        "slurm": _slurm_version(),
        "python": platform.python_version(),
    }


def read(run: RunDir) -> dict[str, Any]:
    """A run's provenance; empty where it cannot be read."""
    try:
        said = json.loads(run.provenance.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def image_facts(image: str) -> dict[str, Any] | None:
    """What tells an image from another of the same name; None where there is none."""
    path = Path(image)
    if not path.is_absolute():
        return {"name": image}
    if not path.is_file():
        return None
    told = None
    with contextlib.suppress(OSError):
        told = re.match(r"[0-9a-f]{64}\b", Path(f"{image}.sha256").read_text(encoding="utf-8"))
    stat = path.stat()
    return {"path": image, "bytes": stat.st_size, "modified": int(stat.st_mtime), "sha256": told[0] if told else None}


def _checkout(path: str | None, version: str, as_checked: bool | None) -> dict[str, Any] | None:
    judge = find_judge(path) if path else None
    if path is None or judge is None:
        return None
    if as_checked is None:
        as_checked = not look_at(path, version)[1]
    return {"path": path, "version": judge.megatron, "commit": judge.commit or None, "as_checked": as_checked}


def _folder(folder: Path, names: tuple[str, ...]) -> dict[str, Any] | None:
    """A folder, and the sha256 of those of some files that it has."""
    if not folder.exists():
        return None
    hashes = {}
    for name in names:
        path = folder / name
        if path.is_file() and path.stat().st_size <= MOST_HASHED_BYTES:
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"path": str(folder), "sha256": hashes}


def _slurm_version() -> str | None:
    if not slurm.available():
        return None
    with contextlib.suppress(MoekitError):
        return slurm.call(["sbatch", "--version"]).out.split()[-1]
    return None
