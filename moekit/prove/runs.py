"""A run as a proof reads it: its recipe, what it logged, and the software that trained it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moekit.launch.rundir import RunDir, run_dir
from moekit.problems import error, shortened
from moekit.recipe.load import Loaded, load, show
from moekit.watch.metrics import history

SOFTWARE = ("megatron", "torch", "transformer_engine", "device", "moekit")
"""What a proof holds for, by the names of `attempts/N/software.json`, and moekit itself."""

Software = dict[str, str | None]


@dataclass(frozen=True)
class Run:
    """One run, as far as it came."""

    name: str
    shown: str
    """Its folder, as the user would call it."""
    loaded: Loaded
    """Of `recipe.yaml`, whose lines messages name."""
    steps: dict[int, dict[str, float]]
    """What it logged, by Megatron's iteration; a later attempt's over an earlier one's."""
    software: Software
    """Of all its attempts; a version is None where there is none, or none is on record."""


def read_run(given: str, root: Path) -> Run:
    """The run of a folder, or of a name below `root`.

    Raises:
        MoekitError: there is no run, it has logged nothing, or its attempts are of different software.
    """
    run = RunDir(Path(given)) if "/" in given or Path(given, "recipe.yaml").is_file() else run_dir(root, given)
    if not run.recipe.is_file():
        below = f"; runs of names are looked for in {show(root / 'runs')}: `--root` says another place"
        raise error(f"there is no run `{shortened(given)}`", f"{show(run.path)} has no recipe.yaml{below}")
    steps = history(run.path)
    if not steps:
        raise error(f"run `{run.path.name}` has logged nothing yet", "launch it first", show(run.path))
    loaded = load(str(run.recipe))
    return Run(run.path.name, show(run.path), loaded, steps, _software(run))


def _software(run: RunDir) -> Software:
    """What trained the run in each of its attempts; those without a record say nothing."""
    provenance = json.loads(run.provenance.read_text()) if run.provenance.is_file() else {}
    known: dict[int, Any] = {
        number: json.loads(file.read_text())
        for number in run.numbers()
        if (file := run.attempt(number).software).is_file()
    }
    found = known[max(known)] if known else {"megatron": provenance.get("megatron")}
    for number, other in known.items():
        if name := next((name for name in found if other.get(name) != found[name]), None):
            what = (
                f"attempt {number} was trained with {name} {other.get(name)}, attempt {max(known)} with {found[name]}"
            )
            raise error(what, "a proof takes runs of one and the same software", show(run.path))
    return {name: found.get(name) for name in SOFTWARE} | {"moekit": provenance.get("moekit")}
