"""The fastest layouts that fit and that every rule accepts."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from moekit.plan.candidates import Candidates, Flags, Floats
from moekit.plan.layout import Layout
from moekit.plan.memory.verdict import TIGHT_SHARE
from moekit.plan.search.child import child_of
from moekit.plan.search.grid import KNOBS, RANKS, Grid, Points
from moekit.plan.search.legal import legal, parallel_legal, savings_legal
from moekit.plan.search.rows import candidates_of
from moekit.plan.shape import Shape
from moekit.recipe.rules import violations
from moekit.recipe.rules.violation import Target
from moekit.recipe.schema import Recipe

TOGETHER = 4096
"""Layouts that are worked out at once, about: what fits a processor's cache and spares Python."""
SURVIVORS = 20


@dataclass(frozen=True)
class Question:
    """One recipe's search: what may vary, and how a layout is judged."""

    recipe: Recipe
    shape: Shape
    layout: Layout
    grid: Grid
    target: Target
    peak_bytes: Callable[[Candidates], Floats]
    """What the fullest GPU holds. `# (candidate,)`"""
    seconds: Callable[[Candidates], Floats]
    """A step's time. `# (candidate,)`"""
    capacity_bytes: float
    """What a GPU has."""
    time_mark: str
    """How sure times are: `calibrated` or `assumed`."""
    is_tight: bool = False
    """Whether layouts may need all that a GPU has, where none needs less."""

    @property
    def room_bytes(self) -> float:
        """What a layout may need."""
        return self.capacity_bytes * (1 if self.is_tight else TIGHT_SHARE)

    def legal(self, points: Points) -> Flags:
        """Whether each point may be a layout. `# (candidate,)`"""
        return legal(self.grid, self.shape, self.recipe, self.target, points)

    def rows(self, points: Points) -> Candidates:
        """The layouts at some points."""
        return candidates_of(self.grid, self.shape, self.layout, points)

    def turned(self, point: tuple[int, ...]) -> int:
        """Knobs that are elsewhere than the recipe has them."""
        return sum(value != own for value, own in zip(point, self.grid.own, strict=True))

    def refusal(self, point: tuple[int, ...]) -> str | None:
        """What `check` says against a layout; None: Megatron takes it."""
        child = child_of(self.grid, self.recipe, self.target, point)
        return next((one.what for one in violations(child, self.target) if one.level == "error"), None)

    def judged(self, points: Points) -> list[Found]:
        """Layouts with their memory and time, those that do not fit as well."""
        if not len(points):
            return []
        rows = self.rows(points)
        peaks, seconds = self.peak_bytes(rows), self.seconds(rows)
        return [
            Found(tuple(p), s, b) for p, s, b in zip(points.tolist(), seconds.tolist(), peaks.tolist(), strict=True)
        ]


@dataclass(frozen=True, order=True)
class Found:
    """One layout, judged."""

    point: tuple[int, ...]
    seconds: float
    peak_bytes: float


@dataclass
class Answer:
    """What a search found."""

    layouts: int = 0
    """Legal ones by the filter."""
    judged: int = 0
    """Those whose memory was worked out: no other can be among the fastest."""
    fitting: int = 0
    survivors: list[Found] = field(default_factory=list)
    """By time; of the layouts of the same ranks and micro batch the fastest alone."""
    refused: Counter[str] = field(default_factory=Counter)
    """Faster ones that a rule refuses, by what it says."""


def search(question: Question, wanted: int = SURVIVORS) -> Answer:
    """The `wanted` fastest layouts.

    Layouts of the same ranks differ in what is recomputed, moved and sent; none of them is faster than the one without
    recomputation and offloading, fit or not. So ranks are worked out in the order of that one's time, until nothing
    that is left can be faster than what is found.
    """
    answer = Answer()
    waiting: list[tuple[float, int, tuple[int, ...]]] = []
    peaks: dict[tuple[int, ...], float] = {}
    taken: set[tuple[int, ...]] = set()
    ranks = _ranks(question, answer)
    bounds = _bounds(question, ranks)
    order = np.argsort(bounds, kind="stable")
    rest = _product(question.grid.sizes[RANKS:])
    step = max(1, TOGETHER // len(rest))
    for begin in range(0, len(order), step):
        found = _fitting(question, answer, ranks[order[begin : begin + step]], rest)
        for one in found:
            heapq.heappush(waiting, (one.seconds, question.turned(one.point), one.point))
            peaks[one.point] = one.peak_bytes
        left = bounds[order[begin + step]] if begin + step < len(order) else np.inf
        while waiting and waiting[0][0] <= left and len(answer.survivors) < wanted:
            seconds, _, point = heapq.heappop(waiting)
            if point[:RANKS] in taken:
                continue
            if refusal := question.refusal(point):
                answer.refused[refusal] += 1
                continue
            taken.add(point[:RANKS])
            answer.survivors.append(Found(point, seconds, peaks[point]))
        if len(answer.survivors) == wanted:
            break
    return answer


def alike(question: Question, found: Found, slower: float) -> list[Found]:
    """Layouts of the same ranks and micro batch that fit and take up to `slower` seconds, with fewer changes than
    `found`, those with the fewest first."""
    rest = _product(question.grid.sizes[RANKS:])
    points = _crossed(np.array([found.point]), rest)
    judged = question.judged(points[question.legal(points)])
    fine = [one for one in judged if one.seconds <= slower and one.peak_bytes <= question.room_bytes]
    fewer = [one for one in fine if question.turned(one.point) < question.turned(found.point)]
    return sorted(fewer, key=lambda one: (question.turned(one.point), one.seconds))


def _ranks(question: Question, answer: Answer) -> Points:
    """Legal ranks and micro batches, each as a point without savings; counts all legal layouts of them."""
    grid, kept = question.grid, []
    rest = _product(grid.sizes[RANKS:])
    ranks = _product((*grid.sizes[:RANKS], *(1 for _ in rest[0])))
    ranks = ranks[parallel_legal(grid, question.shape, question.recipe, ranks)]
    for some in np.array_split(ranks, max(1, len(ranks) * len(rest) // 2**20)):
        fine = savings_legal(grid, question.shape, question.recipe, question.target, _crossed(some, rest))
        answer.layouts += int(fine.sum())
        kept.append(some[fine.reshape(len(some), len(rest)).any(axis=1)])
    return np.vstack(kept)


def _bounds(question: Question, ranks: Points) -> Floats:
    """The least time of any layout of each ranks. `# (ranks,)`"""
    grid = question.grid
    plain = _product(grid.sizes[RANKS:])
    column = {knob: place - RANKS for place, knob in enumerate(KNOBS)}
    no_offload = grid.offload.index(())
    plain = plain[(plain[:, column["recompute"]] == 0) & (plain[:, column["offload"]] == no_offload)]
    bounds = np.full(len(ranks), np.inf)
    step = max(1, TOGETHER // len(plain))
    for begin in range(0, len(ranks), step):
        points = _crossed(ranks[begin : begin + step], plain)
        fine = question.legal(points)
        seconds = np.full(len(points), np.inf)
        seconds[fine] = question.seconds(question.rows(points[fine])) if fine.any() else 0.0
        bounds[begin : begin + step] = seconds.reshape(-1, len(plain)).min(axis=1)
    return bounds


def _fitting(question: Question, answer: Answer, ranks: Points, rest: Points) -> Iterator[Found]:
    points = _crossed(ranks, rest)
    points = points[question.legal(points)]
    if not len(points):
        return
    answer.judged += len(points)
    peaks = question.peak_bytes(question.rows(points))
    fits = peaks <= question.room_bytes
    answer.fitting += int(fits.sum())
    if fits.any():
        points, peaks = points[fits], peaks[fits]
        seconds = question.seconds(question.rows(points))
        for point, one, peak in zip(points.tolist(), seconds.tolist(), peaks.tolist(), strict=True):
            yield Found(tuple(point), one, peak)


def _product(sizes: tuple[int, ...]) -> Points:
    """All places of lists of these sizes. `# (candidate, list)`"""
    return np.indices(sizes).reshape(len(sizes), -1).T


def _crossed(ranks: Points, rest: Points) -> Points:
    """Each of `ranks` with each of `rest`. `# (ranks x rest, knob)`"""
    return np.hstack([np.repeat(ranks[:, :RANKS], len(rest), axis=0), np.tile(rest, (len(ranks), 1))])
