"""What two runs' common steps say: medians over one interval, and how noisy their difference is. No effects.

Steps are paired, so that what both runs share, the data of a step above all, cancels out of the difference. Its noise
is 1.4826 times the median absolute deviation of the pairs' differences, the standard deviation of normal ones: how far
single steps lie from it. A difference that is no larger is said to be within the noise. Nobody learns from two runs how
far two others, with other seeds, would be apart: that takes repeats.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from moekit.watch.metrics import LOSS
from moekit.watch.series import Series
from moekit.watch.watching import TOKENS_PER_S

MAX_VIO, MAX_VIO_MICRO, TFLOPS = "router/max_vio", "router/max_vio_micro", "throughput"
MAIN = (LOSS, MAX_VIO, MAX_VIO_MICRO, TFLOPS)
"""Always said together: one alone misleads (handbook 3.0)."""
BESIDE = ("lm loss validation", TOKENS_PER_S, "grad-norm", "peak_memory_gib", "peak_rss_gib", "num-zeros")
"""Where both runs have them."""
HIGHEST = ("peak_memory_gib", "peak_rss_gib")
"""Of these the highest of the interval counts: it is what runs out of memory."""
RELATIVE_LOSS = "LM loss, B less A, % of A"
FEWEST = 5
"""Pairs that a noise takes."""
_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, of a normal distribution."""
_CURVE_POINTS = 1024

Pair = tuple[int, float, float]
"""(step, value in A, value in B)."""


@dataclass(frozen=True)
class Figure:
    """One metric in both runs."""

    name: str
    one: float | None
    other: float | None
    """Medians over the interval, or of `HIGHEST` the maximum; None where it is not there."""
    difference: float | None
    """Of the second less the first: the median of the steps' differences, None without common steps."""
    relative: float | None
    """The same as a part of the first; None where that is 0."""
    noise: float | None
    """None where fewer than `FEWEST` steps say it, and of maxima."""
    steps: int
    """How many both have."""
    at: int | None = None
    """The last step that both have it at, where the interval has none."""

    @property
    def is_clear(self) -> bool | None:
        """Whether the difference is more than noise; None where nobody can tell."""
        if self.difference is None or self.noise is None:
            return None
        return abs(self.difference) > self.noise


@dataclass(frozen=True)
class Interval:
    """The steps that the medians are over."""

    first: int
    last: int
    steps: int
    """How many of them both have logged."""
    common: int
    """How many both have logged altogether."""
    warmup: int
    """Steps up to here are left out; 0 where all that both have are within the warm-up."""


class Common:
    """Takes the steps that both runs have, in order, and keeps what is said of them in the end: a bounded number."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._pairs: dict[str, deque[Pair]] = {}
        self._alone: tuple[dict[str, deque[tuple[int, float]]], ...] = ({}, {})
        self.curves: tuple[dict[str, Series], ...] = ({}, {})
        """Of each run, by name; `RELATIVE_LOSS` is with the second."""
        self.steps, self.first, self.last = 0, 0, 0

    def take(self, step: int, one: Mapping[str, float], other: Mapping[str, float]) -> None:
        """One more step that both have."""
        if step_is_logged(one) and step_is_logged(other):
            self.steps, self.first, self.last = self.steps + 1, self.first or step, step
        for name in (*MAIN, *BESIDE):
            values = [metrics.get(name, math.nan) for metrics in (one, other)]
            known = [math.isfinite(value) for value in values]
            if all(known):
                self._pairs.setdefault(name, deque(maxlen=self._last)).append((step, values[0], values[1]))
            for side, value in enumerate(values):
                if known[side]:
                    self._alone[side].setdefault(name, deque(maxlen=self._last)).append((step, value))
                    self.curves[side].setdefault(name, Series(_CURVE_POINTS)).add(step, value)
            if name == LOSS and all(known) and values[0]:
                relative = 100 * (values[1] - values[0]) / values[0]
                self.curves[1].setdefault(RELATIVE_LOSS, Series(_CURVE_POINTS)).add(step, relative)

    def interval(self, warmup: int) -> Interval | None:
        """The last steps behind the warm-up; None where no metric is common to both there."""
        for name in (*MAIN, *BESIDE):
            steps = [step for step, _, _ in self._pairs.get(name, ()) if step > warmup]
            if steps:
                return Interval(steps[0], steps[-1], len(steps), self.steps, warmup)
        return None

    def figure(self, name: str, interval: Interval) -> Figure:
        """One metric over the interval, or at the last step behind the warm-up that both have it at."""
        known = self._pairs.get(name, ())
        pairs = [pair for pair in known if interval.first <= pair[0] <= interval.last]
        if pairs:
            return figure_of(name, pairs)
        if known and known[-1][0] > interval.warmup:
            return figure_of(name, [known[-1]], at=known[-1][0])
        said = [
            [value for step, value in alone.get(name, ()) if interval.first <= step <= interval.last]
            for alone in self._alone
        ]
        one, other = (_middle(name)(values) if values else None for values in said)
        return Figure(name, one, other, None, None, None, 0)


def step_is_logged(metrics: Mapping[str, float]) -> bool:
    """Whether Megatron logged the step, and not the router's counts alone are there."""
    return any(not name.startswith("router/") for name in metrics)


def figure_of(name: str, pairs: Sequence[Pair], at: int | None = None) -> Figure:
    """What pairs of values say."""
    middle = _middle(name)
    one, other = middle([a for _, a, _ in pairs]), middle([b for _, _, b in pairs])
    apart = [b - a for _, a, b in pairs]
    difference = other - one if name in HIGHEST else median(apart)
    noise = spread(apart) if len(pairs) >= FEWEST and name not in HIGHEST else None
    return Figure(name, one, other, difference, difference / abs(one) if one else None, noise, len(pairs), at)


def spread(values: Sequence[float]) -> float:
    """The standard deviation as the median absolute deviation says it: no single value decides it."""
    middle = median(values)
    return _TO_SIGMA * median(abs(value - middle) for value in values)


def _middle(name: str) -> Callable[[Sequence[float]], float]:
    return max if name in HIGHEST else median
