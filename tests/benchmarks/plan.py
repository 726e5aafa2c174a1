"""Layouts that `moekit plan --search` works out a second, and how many times a loop over single layouts that is.

    python tests/benchmarks/plan.py [RECIPE [PROFILE]]

The loop calls the same formulas, legality, memory and time, with one layout at a time, as `moekit plan RECIPE` does;
both give the same numbers, or the benchmark ends with 1. Then the whole search, with its rules and steps.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from moekit.plan.desk import Wishes, question_of
from moekit.plan.search.best import TOGETHER, Question, search
from moekit.plan.search.grid import Points
from moekit.recipe.load import load

LAYOUTS, LOOPED = 50_000, 300
LEAST_PER_S = 1_000
"""10,000 in 10 seconds."""


def some_legal(question: Question, number: int) -> Points:
    """Random legal layouts of the grid."""
    dice, found = np.random.default_rng(0), [np.empty((0, len(question.grid.sizes)), np.int64)]
    while sum(map(len, found)) < number:
        points = np.column_stack([dice.integers(size, size=1_000_000) for size in question.grid.sizes])
        found.append(points[question.legal(points)])
    return np.vstack(found)[:number]


def judged(question: Question, points: Points) -> np.ndarray:
    """Legality, memory and time of layouts, some thousands together as the search takes them. `# (number, layout)`"""
    parts = []
    for begin in range(0, len(points), TOGETHER):
        part = points[begin : begin + TOGETHER]
        rows = question.rows(part[question.legal(part)])
        parts.append(np.stack([question.peak_bytes(rows), question.seconds(rows)]))
    return np.hstack(parts)


def main(recipe: str = "models/deepseek_v3_h100", profile: str = "h100-ib") -> int:
    """Print the figures; exit code 1 where they differ between the two, or fewer layouts than asked for are made."""
    question = question_of(Wishes(recipe, load(recipe), profile))
    points = some_legal(question, LAYOUTS)
    begin = time.perf_counter()
    together = judged(question, points)
    at_once = len(points) / (time.perf_counter() - begin)
    begin = time.perf_counter()
    alone = np.hstack([judged(question, point[None]) for point in points[:LOOPED]])
    one_by_one = LOOPED / (time.perf_counter() - begin)
    same = np.allclose(alone, together[:, :LOOPED], rtol=1e-12)
    print(f"{recipe} on {question.grid.world} GPUs: {at_once:,.0f} layouts/s together, {one_by_one:,.0f} one by one")
    print(f"  {at_once / one_by_one:,.0f} times as many; the numbers are {'the same' if same else 'NOT the same'}")
    begin = time.perf_counter()
    answer = search(question)
    seconds = time.perf_counter() - begin
    print(f"  the search: {answer.layouts:,} legal layouts, {answer.judged:,} worked out, {seconds:.1f} s")
    return 0 if same and at_once >= LEAST_PER_S else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
