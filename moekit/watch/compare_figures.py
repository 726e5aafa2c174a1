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


class _Metric:
    """The last values of one metric where both runs have it and of each alone, and its curves."""

    def __init__(self, last: int) -> None:
        self.pairs: deque[Pair] = deque(maxlen=last)
        self.alone: tuple[deque[tuple[int, float]], ...] = (deque(maxlen=last), deque(maxlen=last))
        self.curves = Series(_CURVE_POINTS), Series(_CURVE_POINTS)

    def take(self, step: int, one: float | None, other: float | None) -> bool:
        """A step at which one of them has it; whether both have a number there."""
        mine, theirs = one is not None and math.isfinite(one), other is not None and math.isfinite(other)
        if one is not None and mine:
            self.alone[0].append((step, one))
            self.curves[0].add(step, one)
        if other is not None and theirs:
            self.alone[1].append((step, other))
            self.curves[1].add(step, other)
            if one is not None and mine:
                self.pairs.append((step, one, other))
        return mine and theirs


class Common:
    """Takes the steps that both runs have, in order, and keeps what is said of them in the end: a bounded number."""

    def __init__(self, last: int) -> None:
        self._metrics = {name: _Metric(last) for name in (*MAIN, *BESIDE)}
        self._relative = Series(_CURVE_POINTS)
        self.steps, self.first, self.last = 0, 0, 0

    def take(self, step: int, one: Mapping[str, float], other: Mapping[str, float]) -> None:
        """One more step that both have."""
        if step_is_logged(one) and step_is_logged(other):
            self.steps, self.first, self.last = self.steps + 1, self.first or step, step
        for name, metric in self._metrics.items():
            mine, theirs = one.get(name), other.get(name)
            if mine is None and theirs is None:
                continue
            if metric.take(step, mine, theirs) and name == LOSS and mine:
                self._relative.add(step, 100 * ((theirs or 0.0) - mine) / mine)

    @property
    def curves(self) -> tuple[dict[str, Series], dict[str, Series]]:
        """Of each run, by name; `RELATIVE_LOSS` is with the second."""
        one, other = (
            {name: metric.curves[side] for name, metric in self._metrics.items() if metric.curves[side].last}
            for side in (0, 1)
        )
        return one, other | ({RELATIVE_LOSS: self._relative} if self._relative.last else {})

    def interval(self, warmup: int) -> Interval | None:
        """The last steps behind the warm-up; None where no metric is common to both there."""
        for metric in self._metrics.values():
            steps = [step for step, _, _ in metric.pairs if step > warmup]
            if steps:
                return Interval(steps[0], steps[-1], len(steps), self.steps, warmup)
        return None

    def figure(self, name: str, interval: Interval) -> Figure:
        """One metric over the interval, or at the last step behind the warm-up that both have it at."""
        known = self._metrics[name].pairs
        pairs = [pair for pair in known if interval.first <= pair[0] <= interval.last]
        if pairs:
            return figure_of(name, pairs)
        if known and known[-1][0] > interval.warmup:
            return figure_of(name, [known[-1]], at=known[-1][0])
        said = [
            [value for step, value in alone if interval.first <= step <= interval.last]
            for alone in self._metrics[name].alone
        ]
        one, other = (_middle(name)(values) if values else None for values in said)
        return Figure(name, one, other, None, None, None, 0)


def step_is_logged(metrics: Mapping[str, float]) -> bool:
    """Whether Megatron logged the step, and not the router's counts alone are there."""
    return not all(name.startswith("router/") for name in metrics)


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
