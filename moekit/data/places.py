"""Where the data commands find things: the shared root that a command line means, and the files of a data set there."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from moekit.data.plan import DataFolder, InputFile, Plan, ShardRecord
from moekit.problems import error


def shared_root_of(profile: str | None, shared_root: Path | None) -> Path:
    """The folder that holds `data/` and `tokenizers/`: what is given, else the profile's, else `moekit-local` here.

    Raises:
        MoekitError: the profile has problems.
    """
    from moekit.cluster.profile import find_cluster
    from moekit.runs.look import LOCAL_ROOT

    if shared_root is not None:
        return shared_root.absolute()
    return Path(find_cluster(profile).shared_root) if profile else Path.cwd() / LOCAL_ROOT


def load_plan(folder: DataFolder) -> Plan | None:
    """The plan of a data set's folder; None where there is none.

    Raises:
        MoekitError: it cannot be read.
    """
    said = _read(folder.plan, Plan)
    if said is None:
        return None
    said["files"] = tuple(InputFile(**file) for file in said["files"])
    return Plan(**said)


def load_record(folder: DataFolder, task: int) -> ShardRecord | None:
    """What is put down of a whole shard; None where nothing is.

    Raises:
        MoekitError: it cannot be read.
    """
    said = _read(folder.record(task), ShardRecord)
    return None if said is None else ShardRecord(**said)


def _read(path: Path, kind: type) -> dict[str, Any] | None:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise error(f"cannot be read: {problem.strerror}", "", str(path)) from None
    except ValueError:
        said = None
    if not isinstance(said, dict) or said.keys() != {field.name for field in fields(kind)}:
        hint = "remove it, and run `moekit data tokenize` again"
        raise error("is not what this moekit writes, or damaged", hint, str(path))
    return said
