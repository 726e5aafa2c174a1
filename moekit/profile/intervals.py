"""Arithmetic of time intervals in whole nanoseconds. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]
"""(interval, 2): begin and end, the end excluded."""

NOTHING: Intervals = np.empty((0, 2), np.int64)


def union(intervals: Intervals) -> Intervals:
    """The same time as disjoint intervals in order; those that touch become one, empty ones vanish."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return NOTHING
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    ends = np.maximum.accumulate(intervals[:, 1])
    first = np.concatenate([[True], intervals[1:, 0] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([intervals[first, 0], ends[last]], axis=1)


def joined(parts: Iterable[Intervals]) -> Intervals:
    """The time in any of the parts."""
    return union(np.concatenate([NOTHING, *parts]))


def length(disjoint: Intervals) -> int:
    """Nanoseconds of disjoint intervals."""
    return int((disjoint[:, 1] - disjoint[:, 0]).sum())


def own_time(intervals: Intervals) -> NDArray[np.int64]:
    """Of nested intervals the nanoseconds that belong to each and to none inside it, in the order given.

    They are one thread's calls: two either nest or do not meet. One that leaves its parent is cut at the parent's end.
    """
    own: NDArray[np.int64] = np.maximum(intervals[:, 1] - intervals[:, 0], 0)
    open_calls: list[tuple[int, int]] = []  # (place, end)
    for place in np.lexsort((-intervals[:, 1], intervals[:, 0])).tolist():
        begin, end = (int(value) for value in intervals[place])
        while open_calls and open_calls[-1][1] <= begin:
            open_calls.pop()
        if open_calls:
            parent, parents_end = open_calls[-1]
            end = min(end, parents_end)
            own[place] = end - begin
            own[parent] -= end - begin
        open_calls.append((place, end))
    return own
