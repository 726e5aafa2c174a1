"""What travels with moekit: recipes, data set descriptions, Slurm scripts and images; and the programs beside it."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

PACKAGE = Path(__file__).resolve().parent


def folder(name: Literal["recipes", "datasets", "slurm", "images"]) -> Path:
    """Where the shipped files of one kind lie: inside an installed package, beside it in a checkout."""
    installed = PACKAGE / "share" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def shipped_recipes() -> list[str]:
    """The names under which shipped recipes can be given: `first_moe`, `settings/quickstart_dense`, ...

    What lies in a folder `shapes` is only built on: it loads as a `base` and is no recipe. A sweep is several.
    """
    return _names(path for path in folder("recipes").rglob("*.yaml") if path.parent.name not in ("shapes", "sweeps"))


def shipped_sweeps() -> list[str]:
    """The names under which shipped sweeps can be given: `sweeps/learning_rate`, ..."""
    return _names((folder("recipes") / "sweeps").glob("*.yaml"))


def _names(paths: Iterable[Path]) -> list[str]:
    return sorted(path.relative_to(folder("recipes")).with_suffix("").as_posix() for path in paths)


def made_for(name: str) -> str | None:
    """The shipped profile that a shipped recipe is made for, as its opening comment says; None: any will do."""
    opening, _, _ = (folder("recipes") / f"{name}.yaml").read_text().partition("\nbase:")
    said = re.search(r"made for `--profile ([\w-]+)`", opening)
    return said[1] if said else None


def program(name: str) -> str:
    """How to call a program that is installed with moekit: by its name, or by the path beside this Python.

    The path is for an environment that is not active: as short as the working directory allows.
    """
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) or not beside.exists():
        return name
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
