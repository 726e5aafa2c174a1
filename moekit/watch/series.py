"""A curve of any length in constant memory: every so many points become one."""

from __future__ import annotations

import math
from bisect import bisect_left

MOST_POINTS = 2048


class Series:
    """A curve whose points may be any number: when there are too many, every second one goes, from then on too.

    The last point is always there. Points are in the order of x; one that falls back takes back all from there on.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._kept: list[tuple[float, float]] = []
        self._every = 1
        self._skipped = 0
        self._last: tuple[float, float] | None = None

    def add(self, x: float, y: float) -> None:
        """One more point, after all others or instead of those from `x` on."""
        if self._last is not None and x <= self._last[0]:
            self.cut(x)
        self._last = (x, y)
        self._skipped += 1
        if self._skipped < self._every and self._kept:
            return
        self._skipped = 0
        self._kept.append((x, y))
        if len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self._every *= 2

    def cut(self, x: float) -> None:
        """Take back what is at `x` and after it."""
        while self._kept and self._kept[-1][0] >= x:
            self._kept.pop()
        if self._last is not None and self._last[0] >= x:
            self._last = self._kept[-1] if self._kept else None
            self._skipped = self._every  # the next one is kept

    def at(self, x: float) -> float | None:
        """The value at `x`, between the points around it or that of the nearest end; None without any."""
        points = self.points
        if not points:
            return None
        after = bisect_left(points, (x, -math.inf))
        if after == 0 or after == len(points) or points[after][0] == x:
            return points[min(after, len(points) - 1)][1]
        (left, before), (right, then) = points[after - 1], points[after]
        return before + (then - before) * (x - left) / (right - left)

    @property
    def points(self) -> list[tuple[float, float]]:
        """What is left of them, and the last."""
        return self._kept if self._last is None or self._kept[-1:] == [self._last] else [*self._kept, self._last]

    @property
    def last(self) -> tuple[float, float] | None:
        """The newest."""
        return self._last
