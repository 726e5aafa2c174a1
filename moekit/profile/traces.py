"""Which traces a run, a folder or a path has, and what kind each file is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moekit.launch.rundir import RunDir
from moekit.problems import error
from moekit.profile import chrome, nsys
from moekit.profile.shares import Shares, shares_of
from moekit.recipe.load import load
from moekit.recipe.schema import Recipe

_TRACES = (".json", ".json.gz", ".sqlite")
_REPORTS = (".nsys-rep", ".qdrep")


@dataclass(frozen=True)
class Profiled:
    """What was recorded, and of which run."""

    name: str
    ranks: tuple[Shares, ...]
    recipe: Recipe | None
    """None where the traces do not lie in a run."""


def read(given: str, roots: Sequence[Path], steps: int | None) -> Profiled:
    """The shares of a run's newest traces, or of a file's, or of a folder's; `steps` is the user's word on how many.

    Raises:
        MoekitError: there are none, or one of them cannot be read.
    """
    path = Path(given)
    if path.is_file():
        return Profiled(path.name, tuple(_read(path, steps)), None)
    if path.is_dir() and not (path / "recipe.yaml").exists():
        return Profiled(path.name, _all(_files(path), given, steps), None)
    from moekit.runs.look import find_run

    run = find_run(given, roots)
    recipe = load(str(run.recipe)).recipe
    profile = recipe.profile
    if steps is None and profile.step_start is not None and profile.step_end is not None:
        steps = profile.step_end - profile.step_start
    return Profiled(run.path.name, _all(_newest(run), run.path.name, steps), recipe)


def _newest(run: RunDir) -> list[Path]:
    """The traces of the newest attempt that has some."""
    for number in sorted(run.numbers(), reverse=True):
        folder = run.attempt(number).path
        for below in ("torch_profile", "nsys"):
            if found := _files(folder / below):
                return found
    hint = "set `profile: {enabled: true, use_pytorch_profiler: true, step_start: 3, step_end: 4, ranks: [0]}`"
    raise error(f"run `{run.path.name}` has no traces", f"{hint} in its recipe")


def _files(folder: Path) -> list[Path]:
    """Traces in a folder; reports of Nsight Systems only where nobody has exported them."""
    if not folder.is_dir():
        return []
    entries = sorted(entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))
    found = [entry for entry in entries if entry.name.endswith(_TRACES)]
    return found or [entry for entry in entries if entry.name.endswith(_REPORTS)]


def _all(files: Sequence[Path], given: str, steps: int | None) -> tuple[Shares, ...]:
    if not files:
        raise error(f"`{given}` has no traces in it", f"files of traces end in {', '.join(_TRACES)}")
    found = [shares for file in files for shares in _read(file, steps)]
    return tuple(sorted(found, key=lambda one: (len(one.name), one.name)))


def _read(path: Path, steps: int | None) -> list[Shares]:
    """One file, by what its first bytes say that it is."""
    if path.name.endswith(_REPORTS):
        made = path.with_suffix(".sqlite")
        hint = f"`nsys export --type sqlite --output {made} {path}` where Nsight Systems is installed, then again"
        raise error(f"`{path}` is a report that only Nsight Systems can read", hint)
    try:
        with path.open("rb") as file:
            first = file.read(16)
    except OSError as failure:
        raise error(f"cannot read `{path}`: {str(failure.strerror).lower()}") from None
    if not first:
        raise error(f"`{path}` is empty", "the run ended before it was written; record it again")
    timelines = nsys.read(path, steps) if first == b"SQLite format 3\x00" else chrome.read(path)
    return [shares_of(one if one.steps or not steps else replace(one, steps=steps)) for one in timelines]
