"""The Megatron checkout that jobs mount: at which commit it is, and whether anything in it was changed."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from moekit.megatron.installed import find_judge
from moekit.problems import Problem

MOST_SHOWN = 3
"""Changed files that a message names."""
TIMEOUT_S = 120.0
"""`git status` of a large checkout on a slow file system."""

HOME = "https://github.com/NVIDIA/Megatron-LM"


@dataclass(frozen=True)
class Checkout:
    """A checkout that may be trained with."""

    path: str
    version: str
    """As its `package_info.py` says."""
    commit: str


def clone_command(path: str, version: str) -> str:
    """The command that makes a checkout of a recipe's `megatron.version`, a release or the beginning of a commit."""
    return f"git clone {HOME} {path} && git -C {path} checkout {git_name(version)}"


def look_at(path: str, version: str, commit: str = "") -> tuple[Checkout | None, list[Problem]]:
    """The checkout, and what keeps it from being the Megatron that recipes of `version` were checked against.

    With `commit` it must be at that very one, as for the further jobs of a run.
    """
    if not Path(path).is_dir():
        return None, [Problem("", f"there is no Megatron checkout: {path}", f"`{clone_command(path, version)}`")]
    found = find_judge(path)
    if found is None or not found.commit:
        what = f"`{path}` is no checkout of Megatron" if found is None else f"`{path}` is in no git repository"
        return None, [Problem("", f"{what}, so what would be trained is not known", _another(path, version))]
    checkout = Checkout(path, found.megatron, found.commit)
    problems = []
    if commit and found.commit != commit:
        what = f"the Megatron checkout is at {found.commit[:9]}, and the run was begun with {commit[:9]}: {path}"
        problems.append(Problem("", what, f"`git -C {path} checkout {commit}`"))
    elif not found.is_version(version):
        what = f"the Megatron checkout is {found}, and the recipe is for `{version}`: {path}"
        problems.append(
            Problem("", what, f"`git -C {path} checkout {git_name(version)}`, or name it in `megatron.version`")
        )
    if changes := _changes(path):
        shown = ", ".join(changes[:MOST_SHOWN]) + (
            f" and {len(changes) - MOST_SHOWN} more" * (len(changes) > MOST_SHOWN)
        )
        what = f"the Megatron checkout has changes that no commit holds: {shown}"
        problems.append(Problem("", what, f"`git -C {path} stash --include-untracked` puts them aside"))
    return checkout, problems


def _changes(path: str) -> list[str]:
    """Files that differ from the commit, new ones too; what cannot be asked counts as a change."""
    quiet = ["-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false"]
    command = ["git", *quiet, "-C", path, "status", "--porcelain", "--no-renames", "--ignore-submodules=none"]
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired:
        return [f"(`git status` took longer than {TIMEOUT_S:g} s)"]
    if done.returncode:
        return [f"({' '.join(done.stderr.split())})"]
    return [line[3:] for line in done.stdout.splitlines()]


def git_name(version: str) -> str:
    """What git calls a release: Megatron's tags are `core_v0.19.2`."""
    return f"core_v{version}" if "." in version else version


def _another(path: str, version: str) -> str:
    return f"name another folder in `megatron_path`, or move it away and `{clone_command(path, version)}`"
