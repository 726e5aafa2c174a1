"""What `moekit plan` is asked, and the way from there to an answer: the edge to profiles and files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moekit.cluster.profile import Cluster, find_cluster
from moekit.plan.given import Given
from moekit.plan.plan import Plan, plan_of_given
from moekit.plan.report import model
from moekit.problems import error
from moekit.recipe.load import Loaded
from moekit.writing import write_whole

if TYPE_CHECKING:
    from moekit.plan.candidates import Candidates, Floats
    from moekit.plan.estimate import Estimate
    from moekit.plan.load import Load
    from moekit.plan.search.best import Question
    from moekit.plan.search.choice import Searched
    from moekit.plan.search.steps import Step


@dataclass(frozen=True)
class Wishes:
    """A recipe, and what is asked of it."""

    given: str
    """As the user calls it."""
    loaded: Loaded
    profile: str | None = None
    vocab_size: int | None = None
    gpus: int | None = None
    micro_batch: int | None = None
    rank_imbalance: float | None = None
    counts: str | None = None
    maxvio: float | None = None

    def asked(self) -> Loaded:
        """The recipe with what is asked otherwise."""
        from moekit.rehearse.edit import changed

        new = {"parallel.gpus": self.gpus, "train.micro_batch_size": self.micro_batch}
        said = {name: value for name, value in new.items() if value is not None}
        return Loaded(
            changed(self.loaded.recipe, said), self.loaded.source, self.loaded.name, variant=self.loaded.variant
        )

    def cluster(self) -> Cluster:
        """The profile."""
        return find_cluster(self.profile)


def estimated(wishes: Wishes, given: Given, plan: Plan) -> Estimate | str:
    """Memory and time of a recipe, or why they cannot be told.

    Raises:
        MoekitError: the cluster or what is said of the load cannot be used.
    """
    from moekit.plan.estimate import estimate_of, unmodelled

    if reason := unmodelled(given):
        return reason
    return estimate_of(given, plan, wishes.cluster(), _load(wishes, plan))


def _load(wishes: Wishes, plan: Plan) -> Load:
    """How uneven experts are."""
    from moekit.plan.load import load_of

    counts = None if wishes.counts is None else _counts(wishes.counts, wishes.profile)
    return load_of(plan.shape, wishes.rank_imbalance, counts, wishes.maxvio, plan.layout.expert_tensor)


def _counts(given: str, profile: str | None) -> Path:
    """The folder or file of a path, or of a run's name."""
    if Path(given).exists():
        return Path(given)
    from moekit.runs.look import find_run, roots

    return find_run(given, [] if "/" in given else roots(profile)).path


def remedies(wishes: Wishes, found: Estimate | str) -> list[Step]:
    """Single changes with which a recipe fits that does not, the fastest first."""
    if isinstance(found, str) or found.verdict.fit == "fits" or wishes.loaded.recipe.train.global_batch_size is None:
        return []
    from moekit.plan.search.steps import alone

    return alone(question_of(wishes))


def lines(plan: Plan, found: Estimate | str, cures: Sequence[Step] = ()) -> Iterator[str]:
    """A plan in one screen."""
    yield from model.model_lines(plan)
    yield ""
    if isinstance(found, str):
        yield found
    else:
        from moekit.plan.bars import lines as bar_lines
        from moekit.plan.report.memory import chart_of, verdict_line
        from moekit.plan.report.search import remedy_lines
        from moekit.plan.report.time import ground_lines, time_lines

        if found.refused:
            yield f"`moekit check` refuses this recipe on {found.cluster.name}: {found.refused}"
            yield ""
        yield from bar_lines(chart_of(found), _width())
        yield verdict_line(found)
        if found.verdict.fit != "fits":
            yield from remedy_lines(cures, float(found.time.seconds[0]))
        yield ""
        yield from time_lines(plan, found)
        yield ""
        yield from ground_lines(found)
    if plan.notes:
        yield ""
        yield from model.note_lines(plan)


def _width() -> int:
    return max(60, min(120, shutil.get_terminal_size((100, 24)).columns))


def explained(plan: Plan, found: Estimate | str, what: str) -> Iterator[str]:
    """The terms of memory, of time, or of the experts' exchange."""
    from moekit.plan.report import memory, time, traffic

    if what == "traffic":
        return traffic.explained_traffic(plan.shape, None if isinstance(found, str) else found)
    if isinstance(found, str):
        return iter([found])
    return memory.explained_memory(found) if what == "memory" else time.explained_time(found)


def as_values(plan: Plan, found: Estimate | str, cures: Sequence[Step]) -> dict[str, Any]:
    """All of a plan, for JSON."""
    from moekit.plan.report import values

    said = {
        "remedies": [
            {"changes": step.changes, "seconds": step.found.seconds, "needed_bytes": step.found.peak_bytes}
            | {"changes_training": step.changes_training}
            for step in cures
        ]
    }
    return values.as_values(plan) | values.of_estimate(found) | said


def write_picture(plan: Plan, found: Estimate | str, cures: Sequence[Step], path: Path) -> None:
    """Write the bars, as a page with the text of the plan below them where FILE is .html.

    Raises:
        MoekitError: there is nothing to draw, or FILE is neither or cannot be written.
    """
    from moekit.plan import bars
    from moekit.plan.report.memory import chart_of
    from moekit.plan.report.time import time_chart

    if isinstance(found, str):
        raise error(found, "there is nothing to draw")
    charts = [chart_of(found), time_chart(found)]
    if path.suffix not in (".html", ".svg"):
        raise error(f"`{path}` is no .html or .svg", "`--report plan.html` or `--report plan.svg`")
    text = bars.svg(*charts) if path.suffix == ".svg" else bars.html(plan.name, charts, lines(plan, found, cures))
    write_whole(path, text)


def question_of(wishes: Wishes) -> Question:
    """What a search of a recipe asks, and how it judges.

    Raises:
        MoekitError: memory and time cannot be told.
    """
    from moekit.plan.estimate import estimate_of, unmodelled
    from moekit.plan.memory.model import memory
    from moekit.plan.search.best import Question
    from moekit.plan.search.choice import dividing
    from moekit.plan.search.grid import grid_of
    from moekit.plan.time.step import step_time

    given = Given.of(dividing(wishes.asked()))
    if reason := unmodelled(given):
        raise error(reason, "a search is made of both")
    plan, cluster = plan_of_given(given, wishes.vocab_size), wishes.cluster()
    load = _load(wishes, plan)
    own = estimate_of(given, plan, cluster, load)

    def peak_bytes(rows: Candidates) -> Floats:
        return memory(plan.shape, own.facts, rows, load.most(rows)).fullest

    def seconds(rows: Candidates) -> Floats:
        return step_time(plan.shape, own.facts, rows, own.hardware, load.most(rows)).seconds

    grid = grid_of(given, plan.shape, plan.layout, cluster)
    recipe, capacity = given.loaded.recipe, own.verdict.capacity_bytes
    return Question(recipe, plan.shape, plan.layout, grid, cluster, peak_bytes, seconds, capacity, own.time_mark)


def searched(wishes: Wishes) -> Searched:
    """The layouts of a recipe.

    Raises:
        MoekitError: as `question_of`; no layout fits, or the rules refuse all that do.
    """
    question = question_of(wishes)
    from moekit.plan.search.choice import searched as search

    return search(question)


def search_lines(found: Searched) -> Iterator[str]:
    """A search as text."""
    from moekit.plan.report.search import search_lines as text

    return text(found)


def search_values(found: Searched) -> Mapping[str, Any]:
    """A search, for JSON."""
    from moekit.plan.search.choice import as_values as values

    return values(found)


def write_child(found: Searched, wishes: Wishes, path: Path) -> None:
    """Write the layout that is taken as a recipe."""
    from moekit.plan.search.choice import write_child as write

    write(found, wishes.loaded.recipe, wishes.given, path)
