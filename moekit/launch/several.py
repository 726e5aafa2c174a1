"""Several runs in one launch, recipes or a sweep's: all are checked before any is submitted, and told of at once.

A launch that is made again finishes what is missing: runs that are there already, of the same recipe, are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moekit.cluster.profile import Cluster
from moekit.launch import chain, index
from moekit.launch.missing import missing
from moekit.launch.run_files import is_of
from moekit.launch.rundir import RunDir, run_dir
from moekit.launch.submit import Submitted, looked_at, prepare, settled, submit_links, taken_by
from moekit.problems import MoekitError, Problem, error, shortened
from moekit.recipe.check import problems_of
from moekit.recipe.load import Loaded, load_each
from moekit.runs.look import Seen, look


@dataclass(frozen=True)
class Launched:
    """What became of one of several runs."""

    run: RunDir
    submitted: Submitted | None = None
    """Its new jobs; None where it was there already, or an earlier one was refused."""
    before: Seen | None = None
    """What it was, where it was there already."""


def load_all(given: Sequence[str], name: str | None, cluster: Cluster) -> tuple[list[Loaded], list[Problem]]:
    """Every run of some recipes and sweeps, each fit for Megatron and of another name; and warnings.

    `name` is for one recipe or one sweep, whose runs are then called `<name>-<variant>`.

    Raises:
        MoekitError: with every problem of all of them, each once.
    """
    if name is not None and len(given) > 1:
        raise error(
            f"`--name {shortened(name)}` names one run or one sweep, not {len(given)}", "launch them by themselves"
        )
    loaded: list[Loaded] = []
    found: list[Problem] = []
    for one in given:
        try:
            several = load_each(one, name)
        except MoekitError as refused:
            found += refused.problems
            continue
        loaded += several
        found += [problem for run in several for problem in problems_of(run, cluster)]
    found = [*dict.fromkeys(found), *_same_names(loaded)]
    if any(problem.level == "error" for problem in found):
        raise MoekitError(*found)
    return loaded, found


def _same_names(loaded: Sequence[Loaded]) -> list[Problem]:
    first: dict[str, Loaded] = {}
    told = []
    for one in loaded:
        other = first.setdefault(one.name, one)
        if other is not one:
            what = f"{other.source.shown} and {one.source.shown} would both be the run `{one.name}`"
            told.append(Problem("", what, "launch one of them by itself, with `--name`"))
    return told


def launch_several(
    loaded: Sequence[Loaded], cluster: Cluster, links: int = 1, index_first: bool | None = None
) -> tuple[list[Launched], list[Problem]]:
    """Submit every run that is not there yet, each as `links` jobs; and what went wrong once some were submitted.

    One recipe by itself must have a name that is free. A run that begins from another's checkpoint waits for that one
    (`chain.py`). `index_first` has a job on CPUs build Megatron's index of the data first (`index.py`); None does where
    several runs would build it at once.

    Raises:
        MoekitError: with everything that keeps any of them from being submitted; nothing was written.
    """
    if len(loaded) == 1 and loaded[0].variant is None and (taken := taken_by(loaded[0].name, cluster)):
        raise MoekitError(taken)
    ordered = chain.parents_first(loaded)
    there = _there(ordered, cluster)
    todo = [one for one in ordered if one.name not in there or _unsubmitted(there[one.name])]
    found = [other for one in ordered if one.name in there and (other := _another_recipe(one, there[one.name]))]
    for one in todo:
        names = {other.name for other in ordered} | chain.awaited_runs(one, cluster.shared_root)
        found += [*chain.problems(one, links), *missing(one, cluster, os.environ, frozenset(names))]
    found += index.problems(ordered if todo else (), cluster, index_first)
    if any(problem.level == "error" for problem in found):
        raise MoekitError(*dict.fromkeys(found))
    indexes = index.for_runs(ordered if todo else (), cluster, index_first)
    launched, refused = _submit_in_order(ordered, there, cluster, links, indexes)
    looked = {one.run: one for one in looked_at([one.submitted for one in launched if one.submitted])}
    launched = [replace(one, submitted=looked.get(one.run)) for one in launched]
    return launched, [*dict.fromkeys(found), *refused]


def _submit_in_order(
    ordered: Sequence[Loaded], there: Mapping[str, Seen], cluster: Cluster, links: int, indexes: index.Indexes
) -> tuple[list[Launched], list[Problem]]:
    """Submit what is not there, up to the first that is refused: what follows it waits for the same launch again."""
    launched: list[Launched] = []
    last_jobs: dict[str, str] = {}
    refused: list[Problem] = []
    for one in ordered:
        run, before = run_dir(cluster.shared_root, one.name), there.get(one.name)
        if refused or (before and not _unsubmitted(before)):
            launched.append(Launched(run, before=before))
            continue
        try:
            newest = _newest(one, before, cluster)
            after = [*indexes.wanted_by(one, run), *chain.parents_jobs(one, last_jobs, cluster.shared_root)]
            submitted = submit_links(run, newest, chain.options(after, links), links)
        except MoekitError as stopped:
            refused = [*stopped.problems]
            launched.append(Launched(run, before=before))
            continue
        last_jobs[one.name] = submitted.jobs[-1]
        launched.append(Launched(run, replace(submitted, after=tuple(after)), before))
    return launched, refused


def _newest(loaded: Loaded, before: Seen | None, cluster: Cluster) -> int:
    """Write a run's directory where it is missing, or was of a refused submission; its newest submission's number."""
    if before and before.state.word != "refused":
        return before.files.newest
    return prepare(loaded, loaded.name, cluster)[1]


def _there(loaded: Sequence[Loaded], cluster: Cluster) -> dict[str, Seen]:
    """What is there already of the runs, by name; Slurm is asked once."""
    runs = [run_dir(cluster.shared_root, one.name) for one in loaded]
    seen, _ = look([run for run in runs if run.path.is_dir() and any(run.path.iterdir())])
    seen = [settled(one.files.run)[0] if one.state.word == "lost" else one for one in seen]
    return {one.files.name: one for one in seen}


def _unsubmitted(seen: Seen) -> bool:
    """Whether a run has its directory, and never had a job."""
    return seen.state.word in ("written", "refused", "lost") and not seen.files.attempt


def _another_recipe(loaded: Loaded, seen: Seen) -> Problem | None:
    """Why a run that is there is not the one that is to be launched."""
    run = seen.files.run
    if not run.recipe.is_file():
        return Problem("", f"`{run.path}` already exists, and is no run", "give this launch a name with `--name`")
    if is_of(run, loaded.recipe):
        return None
    what = f"run `{loaded.name}` is there already, of another recipe or of this one before it was changed"
    return Problem(str(run.path), what, "`--name` gives this launch another name")
