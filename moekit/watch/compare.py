"""Two runs side by side: may they be compared, what is different, is that more than noise, and is it as it should be.

`compare` reads both runs' files, in constant memory however long they are; `compare_text.py` makes text of the result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moekit.launch.rundir import RunDir
from moekit.problems import error
from moekit.recipe.schema import Recipe
from moekit.recipe.values import differences
from moekit.runs.look import look_at
from moekit.runs.report import headline
from moekit.watch.compare_facts import Fact, Side, facts_between, side
from moekit.watch.compare_figures import BESIDE, MAIN, RELATIVE_LOSS, Common, Figure, Interval
from moekit.watch.compare_read import Trajectory, aligned
from moekit.watch.compare_recipes import Difference, difference
from moekit.watch.compare_verdicts import Known, Verdict, verdict

LAST = 20
"""Steps that medians are over, unless somebody says otherwise: those of the handbook's 120 (3.3)."""


@dataclass(frozen=True)
class Ends:
    """One run, and how far it has come."""

    name: str
    path: str
    state: str
    active: bool
    first: int
    last: int
    """The first and the last step it has logged."""


@dataclass(frozen=True)
class Comparison:
    """Everything that is said of two runs, A and B, as plain values."""

    one: Ends
    other: Ends
    facts: list[Fact]
    difference: Difference | None
    """None where a recipe cannot be read."""
    interval: Interval
    figures: list[Figure]
    verdict: Verdict | None
    notes: list[str]
    """Sentences on what the figures do not say, and why."""
    curves: tuple[dict[str, list[tuple[float, float]]], ...]
    """Of A and of B by name, over the steps that both have; of long runs every so many."""

    @property
    def spoilt(self) -> list[str]:
        """What makes losses of the same step say nothing of each other; empty where they may be compared."""
        return [fact.name for fact in self.facts if fact.same is False and fact.bearing == "loss"]

    @property
    def groups(self) -> list[str]:
        """The groups of fields that the recipes differ in."""
        return list(self.difference.groups) if self.difference else []

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, for `--json`."""
        values = asdict(self) | {"not_comparable": self.spoilt}
        for figure, plain in zip(self.figures, values["figures"], strict=True):
            plain["is_clear"] = figure.is_clear
        if self.verdict:
            values["verdict"]["holds"] = self.verdict.holds
        return values


def compare(one: RunDir, other: RunDir, last: int = LAST, warmup: int | None = None) -> Comparison:
    """Compare two runs as far as they have come.

    Args:
        one: the run that the other is measured by, A.
        other: B.
        last: over how many of the last steps that both have.
        warmup: steps that are left out at the beginning; None takes the learning rate's warm-up, the longer of both.

    Raises:
        MoekitError: they are one run, a run has logged nothing, or they have nothing in common.
    """
    if one.path.resolve() == other.path.resolve():
        raise error(f"`{one.path.name}` and `{other.path.name}` are one run", "give two runs to compare")
    names = _names(one, other)
    sides = _seen(one, names[0]), _seen(other, names[1])
    try:
        paths = Trajectory(one.path), Trajectory(other.path)
        aside = _begin(sides, paths)
        common = Common(last)
        for step, mine, theirs in aligned(*paths):
            common.take(step, mine, theirs)
    except OSError as failure:
        raise error(f"cannot read `{failure.filename}`: {str(failure.strerror).lower()}") from None
    interval, within = _interval(sides, paths, common, warmup)
    return _said(sides, paths, common, interval, [*aside, *within])


def _said(
    sides: tuple[Side, Side],
    paths: tuple[Trajectory, Trajectory],
    common: Common,
    interval: Interval,
    notes: list[str],
) -> Comparison:
    facts = facts_between(*sides, (paths[0].facts, paths[1].facts))
    figures = [common.figure(name, interval) for name in (*MAIN, *BESIDE)]
    figures = [figure for figure in figures if figure.name in MAIN or figure.difference is not None]
    left, right = (each.loaded for each in sides)
    differing = difference(left.recipe, right.recipe, differences(left, right)) if left and right else None
    curves = tuple({name: list(curve.points) for name, curve in each.items()} for each in common.curves)
    relative = [point for point in curves[1].get(RELATIVE_LOSS, ()) if point[0] > interval.warmup]
    judged = None
    if differing:
        judged = verdict(Known(sides, (paths[0].head, paths[1].head), differing, facts, figures, relative))
    ends = [
        Ends(each.name, str(each.run.path), each.state, each.active, path.first, path.last)
        for each, path in zip(sides, paths, strict=True)
    ]
    notes = [*notes, *(note for pair in zip(sides, paths, strict=True) for note in _notes(*pair, figures))]
    return Comparison(ends[0], ends[1], facts, differing, interval, figures, judged, notes, curves)


def _names(one: RunDir, other: RunDir) -> tuple[str, str]:
    """Their names, or their paths where the names are the same."""
    names = one.path.resolve().name, other.path.resolve().name
    return names if names[0] != names[1] else (str(one.path), str(other.path))


def _seen(run: RunDir, name: str) -> Side:
    try:
        seen, _ = look_at(run)
    except OSError as failure:  # a folder that is not mine to write in
        return side(run, name, f"its state is not known: {str(failure.strerror).lower()}", False)
    return side(run, name, headline(seen).removeprefix(f"{seen.files.name}: "), seen.state.active)


def _begin(sides: tuple[Side, Side], paths: tuple[Trajectory, Trajectory]) -> list[str]:
    """Align an upcycled run, which counts from 1, with a dense one that counts on from the checkpoint of both."""
    for each, path in zip(sides, paths, strict=True):
        if not path.first:
            hint = f"`moekit status {each.run.path}` says what it does"
            raise error(f"run `{each.name}` has logged no step yet", hint)
    recipes = [each.recipe for each in sides]
    if None in recipes:
        return []
    parents = [recipe.checkpoint.from_run for recipe in recipes if recipe]
    upcycled = [bool(recipe.moe.use_upcycling) for recipe in recipes if recipe]
    if not parents[0] or parents[0] != parents[1] or upcycled[0] == upcycled[1]:
        return []
    dense = upcycled.index(False)
    log = sides[dense].loaded
    every = (log.recipe.log.tensorboard_interval if log else None) or 1
    paths[dense].begin = (paths[dense].first - 1) // every * every
    begin = paths[dense].begin
    return [f"Step n is iteration {begin:,} + n of `{sides[dense].name}`, which goes on from the same checkpoint."]


def _interval(
    sides: tuple[Side, Side], paths: tuple[Trajectory, Trajectory], common: Common, warmup: int | None
) -> tuple[Interval, list[str]]:
    """The steps that are compared, and what is to be said of their choice."""
    if not common.steps:
        ends = [f"{path.first:,} to {path.last:,}" for path in paths]
        what = f"`{sides[0].name}` and `{sides[1].name}` have no step in common: they have logged {' and '.join(ends)}"
        raise error(what, "runs are compared step by step")
    if warmup is None:
        assumed = max(_warmup(each.recipe) for each in sides)
        if found := common.interval(assumed):
            return found, []
        note = f"No step that both have is behind the learning rate's warm-up of {assumed:,}, so none is left out."
        if found := common.interval(0):
            return found, [note]
    elif found := common.interval(warmup):
        return found, []
    elif common.interval(0):
        what = f"no step that both have comes after `--warmup {warmup}`: the last is {common.last:,}"
        raise error(what, "leave out fewer steps, or let both train on")
    raise error(f"`{sides[0].name}` and `{sides[1].name}` have logged no metric in common")


def _warmup(recipe: Recipe | None) -> int:
    """Steps of the learning rate's warm-up."""
    if recipe is None:
        return 0
    schedule, train = recipe.schedule, recipe.train
    batch = train.global_batch_size or 1
    decay = schedule.decay_iters or train.iters or (schedule.decay_samples or train.samples or 0) // batch
    return max(
        schedule.warmup_iters or 0,
        (schedule.warmup_samples or 0) // batch,
        int((schedule.warmup_fraction or 0) * decay),
    )


def _notes(each: Side, path: Trajectory, figures: list[Figure]) -> list[str]:
    """What one run lacks, or should not be taken for."""
    said = []
    if each.loaded is None:
        said.append(f"The recipe of `{each.name}` cannot be read, so what it differs in is not known.")
    if each.active:
        said.append(f"`{each.name}` may not have ended: this is how far it has come.")
    if path.facts.forced:
        said.append(f"`{each.name}` routes at random: its loss says nothing, its speed is the control's (3.3).")
    if path.not_finite:
        said.append(f"The LM loss of `{each.name}` was no number at {path.not_finite:,} steps; they are left out.")
    if path.missing:
        said.append(f"MaxVio of `{each.name}` is not shown: {path.missing}.")
    return said
