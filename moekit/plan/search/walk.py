"""All legal points of a grid, in parts that fit a processor's memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moekit.plan.search.grid import KNOBS, Grid, Points
from moekit.plan.search.legal import parallel_legal, savings_legal
from moekit.plan.shape import Shape
from moekit.recipe.rules.violation import Target
from moekit.recipe.schema import Recipe

TOGETHER = 8192
"""Points of one part."""
_RANKS = KNOBS.index("recompute")
"""Knobs before this one say ranks and micro batches."""


def product(sizes: tuple[int, ...]) -> Points:
    """All places of lists of these sizes. `# (candidate, list)`"""
    return np.indices(sizes).reshape(len(sizes), -1).T


def walk(grid: Grid, shape: Shape, recipe: Recipe, target: Target) -> Iterator[Points]:
    """The legal points, those of one cut of the pipeline after each other."""
    sizes = grid.sizes
    rest = product(sizes[_RANKS:])
    ranks, at = product((*sizes[:_RANKS], *(1 for _ in sizes[_RANKS:]))), KNOBS.index("pipeline")
    for cut in range(sizes[at]):
        few = ranks[ranks[:, at] == cut]
        few = few[parallel_legal(grid, shape, recipe, few)]
        step = max(1, TOGETHER // len(rest))
        for begin in range(0, len(few), step):
            some = few[begin : begin + step]
            points = np.hstack([np.repeat(some[:, :_RANKS], len(rest), axis=0), np.tile(rest, (len(some), 1))])
            points = points[savings_legal(grid, shape, recipe, target, points)]
            if len(points):
                yield points
