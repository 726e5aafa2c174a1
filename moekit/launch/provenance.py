"""What a run was made of, as far as a cluster says it at launch: checkout, image, data, versions.

A run's `provenance.json` has what `run_files.run_files` says, which is the same every time, and these under `found`. No
gigabytes are read for it: an image is told by its size and time, and by the sha256 that somebody put down beside it
(`IMAGE.sha256`, as `sha256sum` writes it). Of data, the small files that list what was made are hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moekit.cluster.profile import Cluster
from moekit.launch import slurm
from moekit.launch.checkout import look_at
from moekit.launch.rundir import RunDir, data_dir, tokenizer_dir
from moekit.megatron.installed import find_judge
from moekit.problems import MoekitError, Problem
from moekit.recipe.load import Loaded

MOST_HASHED_BYTES = 64 * 2**20
DATA_FILES = ("manifest.json", "data-args.txt", "data-args.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def with_found(files: dict[str, str], found: dict[str, Any]) -> dict[str, str]:
    """A run's files with what was found on the cluster in their provenance."""
    name = str(RunDir(Path()).provenance)
    return {**files, name: json.dumps({**json.loads(files[name]), "found": found}, indent=2) + "\n"}


def found_on(cluster: Cluster, loaded: Loaded, as_checked: bool | None) -> dict[str, Any]:
    """What the job of a recipe will find there; of what is missing only the path.

    `as_checked` says that the Megatron checkout was looked at and is as the recipe was checked; None looks.
    """
    data, root = loaded.recipe.data, cluster.shared_root
    return {
        "checkout": _checkout(cluster.megatron_path, loaded.recipe.megatron.version, as_checked),
        "image": image_facts(cluster.image) if cluster.container == "pyxis" and cluster.image else None,
        "data": folder_facts(data_dir(root, data.name), DATA_FILES) if data.name else None,
        "tokenizer": folder_facts(tokenizer_dir(root, data.tokenizer), TOKENIZER_FILES) if data.tokenizer else None,
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


def changed(found: Mapping[str, Any]) -> list[Problem]:
    """What a run found at its launch, and a further job would not find or find changed: image, data, tokenizer."""
    problems = []
    for name in ("image", "data", "tokenizer"):
        then = found.get(name)
        if not then or "path" not in then:
            continue
        if name == "image":
            now = image_facts(then["path"])
            there = now["bytes"] is not None
        else:
            now = folder_facts(Path(then["path"]), tuple(then["sha256"] or ()))
            there = now["sha256"] is not None
        if not there:
            problems.append(Problem("", f"the {name} of this run is not there: {then['path']}", "put it there"))
        elif any(value is not None and now[fact] != value for fact, value in then.items()):
            what = f"the {name} is no longer what the run was launched with: {then['path']}"
            problems.append(Problem("", what, "put that back, or launch the recipe as another run with `--name`"))
    return problems


def image_facts(image: str) -> dict[str, Any]:
    """What tells an image from another of the same name."""
    path = Path(image)
    if not path.is_absolute():
        return {"name": image}
    facts: dict[str, Any] = {"path": image, "bytes": None, "modified": None, "sha256": None}
    with contextlib.suppress(OSError):
        stat = path.stat()
        facts |= {"bytes": stat.st_size, "modified": int(stat.st_mtime)}
        told = re.match(r"[0-9a-f]{64}\b", Path(f"{image}.sha256").read_text(encoding="utf-8"))
        facts["sha256"] = told[0] if told else None
    return facts


def folder_facts(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """A folder, and the sha256 of those of some files that it has; None for those where there is no folder."""
    if not folder.exists():
        return {"path": str(folder), "sha256": None}
    hashes = {}
    for name in names:
        path = folder / name
        if path.is_file() and path.stat().st_size <= MOST_HASHED_BYTES:
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"path": str(folder), "sha256": hashes}


def _checkout(path: str | None, version: str, as_checked: bool | None) -> dict[str, Any] | None:
    if path is None:
        return None
    judge = find_judge(path)
    if as_checked is None:
        as_checked = not look_at(path, version)[1]
    facts = {"version": judge.megatron, "commit": judge.commit or None} if judge else {"version": None, "commit": None}
    return {"path": path, **facts, "as_checked": as_checked}


def _slurm_version() -> str | None:
    if not slurm.available():
        return None
    with contextlib.suppress(MoekitError):
        return slurm.call(["sbatch", "--version"]).out.split()[-1]
    return None
