"""The files that travel with moekit: recipes, data set descriptions, Slurm scripts and images."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

PACKAGE = Path(__file__).resolve().parent


def folder(name: Literal["recipes", "datasets", "slurm", "images"]) -> Path:
    """Where the shipped files of one kind lie: inside an installed package, beside it in a checkout."""
    installed = PACKAGE / "share" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def shipped_recipes() -> list[str]:
    """The names under which shipped recipes can be given: `first_moe`, `settings/quickstart_dense`, ..."""
    root = folder("recipes")
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))
