"""Means of the last values of a curve, with what they were and how noisy they are, in constant memory."""

from __future__ import annotations

import math
from collections import deque

from moekit.watch.series import Series


class Mean:
    """The mean of the last values, and what it was at earlier steps."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._last: deque[float] = deque(maxlen=window)
        self._means = Series()

    def add(self, step: int, value: float) -> float | None:
        """One more value, logged at `step`; the mean, None before the window is full."""
        self._last.append(value)
        if len(self._last) < self._window:
            return None
        now = sum(self._last) / self._window
        self._means.add(step, now)
        return now

    def at(self, step: int) -> float | None:
        """At a step; None where there is none yet."""
        return self._means.at(step)

    def cut(self, step: int) -> None:
        """Forget what is at a step and after it."""
        self._last.clear()
        self._means.cut(step)


class Lowest:
    """The mean of the last values, the lowest such mean so far, and the noise of such a mean."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._last: deque[float] = deque(maxlen=window)
        self._lowest = Series(256)
        self._variance, self._seen = 0.0, 0

    def add(self, step: int, value: float) -> tuple[float, float, float] | None:
        """(mean, lowest mean, standard error), None before the window is full."""
        if self._last:
            self._learn((value - self._last[-1]) ** 2 / 2)
        self._last.append(value)
        if len(self._last) < self._window:
            return None
        now = sum(self._last) / self._window
        if self._lowest.last is None or now < self._lowest.last[1]:
            self._lowest.add(step, now)
        assert self._lowest.last
        return now, self._lowest.last[1], math.sqrt(self._variance / self._window)

    def _learn(self, square: float) -> None:
        """Noise from one value to the next, in which a trend does not count, nor much a single spike."""
        self._seen = min(self._seen + 1, 50)
        most = math.inf if self._seen < 10 else 9 * self._variance + 1e-12
        self._variance += (min(square, most) - self._variance) / self._seen

    def cut(self, step: int) -> None:
        """Forget what is at a step and after it."""
        self._last.clear()
        self._lowest.cut(step)
