"""Which Megatron and Transformer Engine a Python would import, without importing either. Standard library only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Judge:
    """The Megatron that judges a recipe."""

    megatron: str
    """Its version, `0.19.2`."""
    commit: str = ""
    """The commit of a checkout; empty where it is not known."""
    transformer_engine: str | None = None
    """The version installed beside it; None where there is none, or another is pretended."""

    def is_version(self, version: str) -> bool:
        """Whether a recipe's `megatron.version`, a release or the beginning of a commit, means this one."""
        return version == self.megatron or bool(self.commit and self.commit.startswith(version))

    def __str__(self) -> str:
        return f"Megatron {self.megatron}" + (f" at {self.commit[:9]}" if self.commit else "")


def find_judge(checkout: str | None = None) -> Judge | None:
    """The Megatron of a checkout, or the one that this Python has; None where there is none."""
    spec = None if checkout else importlib.util.find_spec("megatron")
    folders = [f"{checkout}/megatron"] if checkout else list((spec and spec.submodule_search_locations) or ())
    for folder in folders:
        file = Path(folder) / "core" / "package_info.py"
        if file.is_file():
            commit = _commit(checkout) if checkout else ""
            return Judge(_version(file.read_text(encoding="utf-8")), commit, _transformer_engine())
    return None


def _version(package_info: str) -> str:
    """`MAJOR = 0`, `MINOR = 19`, `PATCH = 2` and `PRE_RELEASE = "rc0"`, as Megatron itself joins them."""
    said: dict[str, str] = dict(
        re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?([\w.]*)", package_info, re.MULTILINE)
    )
    return ".".join(said.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH")) + said.get("PRE_RELEASE", "")


def _commit(checkout: str) -> str:
    if not (Path(checkout) / ".git").exists():  # else the commit of whatever lies around it
        return ""
    command = ["git", "-c", "safe.directory=*", "-C", checkout, "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _transformer_engine() -> str | None:
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None
