"""The runs of a proof, trained on this machine one after the other, as `moekit launch` trains them."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import moekit
from moekit.launch.attempt import is_finished
from moekit.launch.live import Display
from moekit.launch.local import launch_local
from moekit.launch.processes import only_launch
from moekit.launch.run_files import is_of
from moekit.launch.rundir import RunDir, run_dir
from moekit.megatron.installed import find_judge
from moekit.problems import MoekitError, Problem
from moekit.recipe.load import load, show


@dataclass(frozen=True)
class Part:
    """A run that a proof trains."""

    recipe: str
    """A shipped recipe."""
    name: str
    """The run's name; a recipe that goes on from another run names that one so."""


ONE_EXPERT = (
    Part("settings/quickstart_dense_save", "quickstart_dense_save"),
    Part("settings/quickstart_dense_continued", "quickstart_dense_continued"),
    Part("settings/quickstart_one_expert", "quickstart_one_expert"),
)
SLICES = (
    Part("settings/quickstart_squared_relu_save", "quickstart_squared_relu_save"),
    Part("settings/quickstart_squared_relu_continued", "quickstart_squared_relu_continued"),
    Part("settings/quickstart_slices", "quickstart_slices"),
)
DETERMINISTIC = (
    Part("settings/quickstart_deterministic", "quickstart_deterministic"),
    Part("settings/quickstart_deterministic", "quickstart_deterministic_again"),
)
NOT_DETERMINISTIC = (
    Part("settings/quickstart_repeated", "quickstart_repeated"),
    Part("settings/quickstart_repeated", "quickstart_repeated_again"),
)
"""The same without deterministic mode."""


def train(parts: Sequence[Part], root: Path, again: bool) -> int:
    """Train what is not trained yet; the exit code of a launch: 0, 1 when one failed, 130 after Ctrl-C.

    `again`: remove these runs first. How it goes is shown on standard error.

    Raises:
        MoekitError: a run of that name is another recipe's, or was trained by other software; or it cannot be
            trained here.
    """
    runs = [run_dir(root, part.name) for part in parts]
    if again:
        for run in runs:
            _remove(run)
    else:
        problems = [p for part, run in zip(parts, runs, strict=True) for p in _outdated(part, run)]
        if problems:
            raise MoekitError(*problems)
    for part in parts:
        loaded = load(part.recipe)
        display = Display(loaded.recipe.moe.num_experts is not None, Console(stderr=True, highlight=False), brief=True)
        if code := launch_local(loaded, part.name, root, display):
            return code
    return 0


def _remove(run: RunDir) -> None:
    if run.path.is_dir():
        with only_launch(run.path):
            shutil.rmtree(run.path)


def _outdated(part: Part, run: RunDir) -> list[Problem]:
    """Why a finished run says nothing of what is installed here."""
    if not run.recipe.exists():
        return []
    again = "`--again` removes the runs of this proof and trains them anew"
    loaded = load(part.recipe)
    if not is_of(run, loaded.recipe):
        what = f"run `{part.name}` is of another recipe than {part.recipe} as it is now"
        return [Problem(show(run.recipe), what, again)]
    software = run.attempt(max(run.numbers(), default=1)).software
    if not is_finished(loaded, run) or not software.is_file():
        return []
    was, now = json.loads(software.read_text()), installed()
    was["moekit"] = json.loads(run.provenance.read_text())["moekit"]
    return [
        Problem(show(run.path), f"it was trained with {name} {was.get(name)}, and {version or 'none'} is here", again)
        for name, version in now.items()
        if (was.get(name) or "").partition("+")[0] != (version or "").partition("+")[0]
    ]


def installed() -> dict[str, str | None]:
    """The software that would train here."""
    judge = find_judge()
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return {
        "megatron": judge.megatron if judge else None,
        "torch": torch,
        "transformer_engine": judge.transformer_engine if judge else None,
        "moekit": moekit.__version__,
    }
