"""From the recipe's layout to another, one change at a time: gains do not add, so each is to be measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from moekit.plan.search.best import Found, Question
from moekit.plan.search.cuts import Cut
from moekit.plan.search.grid import KNOBS, Grid, Recompute
from moekit.recipe.schema import Recipe

_PER_MICRO_BATCH = ("aux_loss", "quantile_balancing")
"""Methods that balance the tokens of one micro batch."""


@dataclass(frozen=True)
class Step:
    """One change, or several that Megatron takes only together, and the layout with it."""

    changes: tuple[str, ...]
    """`tensor 1 -> 2` and the like."""
    changes_training: bool
    found: Found


def changes_training(question: Question, point: tuple[int, ...]) -> bool:
    """Whether the model would learn otherwise: a micro batch is what some balancing methods even out (handbook 3.3)."""
    place = KNOBS.index("micro_batch")
    return point[place] != question.grid.own[place] and _balances_micro_batches(question.recipe)


def _balances_micro_batches(recipe: Recipe) -> bool:
    return bool(recipe.moe.num_experts) and any(method in _PER_MICRO_BATCH for method in recipe.balance.type or ())


def alone(question: Question) -> list[Step]:
    """Every single change of the recipe's layout that fits and that the rules accept, fastest first."""
    own = question.grid.own
    points = [
        (*own[:place], value, *own[place + 1 :])
        for place, size in enumerate(question.grid.sizes)
        for value in range(size)
        if value != own[place]
    ]
    legal = [point for point, fine in zip(points, question.legal(np.array(points)), strict=True) if fine]
    judged = question.judged(np.array(legal).reshape(-1, len(KNOBS)))
    found = sorted((one for one in judged if one.peak_bytes <= question.room_bytes), key=lambda one: one.seconds)
    return [_step(question, own, one) for one in found if question.refusal(one.point) is None]


def path(question: Question, goal: tuple[int, ...]) -> Iterator[Step]:
    """Changes that lead from the recipe's layout to `goal`, at each turn the one that fits and is fastest then.

    Where Megatron takes none of them alone, the fewest that it takes together.
    """
    at = question.grid.own
    while at != goal:
        left = [place for place, value in enumerate(goal) if value != at[place]]
        best = next(filter(None, (_turn(question, at, goal, left, number) for number in range(1, len(left) + 1))))
        yield _step(question, at, best)
        at = best.point


def _turn(question: Question, at: tuple[int, ...], goal: tuple[int, ...], left: list[int], number: int) -> Found | None:
    """The best layout with `number` of the changes that are left; None: Megatron takes no such."""
    points = [
        tuple(goal[place] if place in some else value for place, value in enumerate(at))
        for some in combinations(left, number)
    ]
    legal = [point for point, fine in zip(points, question.legal(np.array(points)), strict=True) if fine]
    taken = [point for point in legal if point == goal or question.refusal(point) is None]
    judged = question.judged(np.array(taken).reshape(-1, len(KNOBS)))
    return min(judged, key=lambda one: (one.peak_bytes > question.room_bytes, one.seconds), default=None)


def _step(question: Question, before: tuple[int, ...], found: Found) -> Step:
    changes = tuple(
        f"{_NAMES.get(knob, knob.replace('_', ' '))} {shown_value(question.grid, knob, old)} -> "
        f"{shown_value(question.grid, knob, new)}"
        for knob, old, new in zip(KNOBS, before, found.point, strict=True)
        if old != new
    )
    turned = before[KNOBS.index("micro_batch")] != found.point[KNOBS.index("micro_batch")]
    return Step(changes, turned and _balances_micro_batches(question.recipe), found)


_NAMES = {"overlap": "expert overlap"}


def shown_value(grid: Grid, knob: str, place: int) -> str:
    """A knob's value for people."""
    match getattr(grid, "cuts" if knob == "pipeline" else knob)[place]:
        case Cut(pipeline, virtual):
            return f"{pipeline} x {virtual} virtual" if virtual > 1 else str(pipeline)
        case Recompute(granularity, modules):
            return "full" if granularity == "full" else "+".join(modules) or granularity or "none"
        case bool(on):
            return "on" if on else "off"
        case tuple(modules):
            return "+".join(modules) or "none"
        case value:
            return str(value)
