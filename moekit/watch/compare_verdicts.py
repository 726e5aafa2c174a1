"""What the handbook expects of two runs, and whether these two do so: only of what their recipes differ in alone.

"HB 2661" is a line of the handbook. Losses and speeds have noise: a value nearer to its bound than two standard errors
decides nothing, and a check then holds neither way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev

from moekit.problems import MoekitError, Problem
from moekit.prove import alike, judge
from moekit.prove.compare import ONE_EXPERT_STEPS
from moekit.prove.runs import SOFTWARE, Run
from moekit.watch.alerting import thresholds
from moekit.watch.chart import Points
from moekit.watch.compare_facts import Fact, Side
from moekit.watch.compare_figures import TFLOPS, Figure, spread
from moekit.watch.compare_recipes import Difference
from moekit.watch.health import Thresholds
from moekit.watch.metrics import LOSS

FP8_LOSS, NVFP4_LOSS = 0.25, 0.4
"""Percent of BF16's LM loss: HB 2661 and HB 2657."""
BLOCKS = 12
"""A growth is seen in the medians of so many equal parts of a training."""
FEWEST = 2 * BLOCKS
_OF_A_MEDIAN = 1.2533
"""Its standard error over a mean's, of normal values."""
_NOTABLE = 0.1
"""Of its bound: what a gap has to grow by to be called growing."""


@dataclass(frozen=True)
class Check:
    """One thing that is held against a bound."""

    what: str
    value: float | None
    bound: float
    unit: str
    holds: bool | None
    """None where the noise is too large to tell, or too little is there."""
    error: float | None = None
    """The value's standard error."""


@dataclass(frozen=True)
class Verdict:
    """Whether two runs do what they should."""

    what: str
    source: str
    checks: tuple[Check, ...] = ()
    refused: str = ""
    """Why it is not judged, in a sentence without a full stop; empty where it is."""

    @property
    def holds(self) -> bool | None:
        """Whether every check does; None where that is not known."""
        said = [check.holds for check in self.checks]
        if self.refused or not said:
            return None
        return False if False in said else None if None in said else True


@dataclass(frozen=True)
class Known:
    """Everything a verdict is made from."""

    sides: tuple[Side, Side]
    heads: tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]
    """The first steps of each."""
    difference: Difference
    facts: Sequence[Fact]
    figures: Sequence[Figure]
    relative: Points
    """LM loss of the second less the first, in percent of the first, behind the warm-up; of long runs every so many."""


def verdict(known: Known) -> Verdict | None:
    """The one that fits what the recipes differ in; None where the handbook says nothing of it."""
    theme = known.difference.theme
    judges: dict[str | None, tuple[str, str, Callable[[Known], tuple[Check, ...]]]] = {
        "fp8": ("FP8 against BF16", "handbook 3.7, HB 2661", _fp8),
        "nvfp4": ("NVFP4 against BF16", "handbook 3.7, HB 2657", _nvfp4),
        "forced balance": ("a learned router against forced even routing", "handbook 3.3, HB 864", _forced),
        "one expert": ("an MoE of one expert against its dense model", "handbook 2.5, HB 413 and 3533", _one_expert),
        "upcycling": ("upcycled against dense and continued, at equal tokens", "handbook 3.6, HB 1790", _upcycled),
    }
    if theme not in judges:
        return None
    what, source, judged = judges[theme]
    try:
        return Verdict(what, source, judged(known))
    except MoekitError as refused:
        first, *more = refused.problems
        return Verdict(what, source, refused=first.what + (f", and {len(more)} more" if more else ""))


def _fp8(known: Known) -> tuple[Check, ...]:
    _only_the_theme(known, "loss")
    points, loss = _low_less_full(known), _figure(known, LOSS)
    full = loss.one if known.difference.asked else loss.other
    if loss.difference is None or not full:
        raise MoekitError(Problem("", "they have no LM loss in common"))
    apart = 100 * (loss.difference if known.difference.asked else -loss.difference) / full
    error = None if loss.noise is None else 100 * _error(loss) / full
    near = _within("LM loss, FP8 less BF16, over the interval", apart, FP8_LOSS, error)
    return near, _growth([value for _, value in points], FP8_LOSS)


def _nvfp4(known: Known) -> tuple[Check, ...]:
    _only_the_theme(known, "loss")
    values = [value for _, value in _low_less_full(known)]
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return (_within("LM loss, NVFP4 less BF16, mean behind the warm-up", fmean(values), NVFP4_LOSS, error),)


def _forced(known: Known) -> tuple[Check, ...]:
    """The learned router's gap in speed; the limit is the alert's (`monitor.alert_tflops_gap`), HB 864 names none."""
    _only_the_theme(known, "speed")
    speed = _figure(known, TFLOPS)
    pair = (speed.one, speed.other)
    control, learned = pair[known.difference.asked], pair[1 - known.difference.asked]
    if not control or learned is None or speed.difference is None:
        raise MoekitError(Problem("", "they have no TFLOP/s in common (`log.throughput`, `log.timers_to_tensorboard`)"))
    recipe = known.sides[1 - known.difference.asked].recipe
    limit = (thresholds(recipe.monitor).tflops_gap if recipe else 0) or Thresholds().tflops_gap
    gap = 100 * (1 - learned / control)
    error = None if speed.noise is None else 100 * _error(speed) / control
    return (_below("TFLOP/s that the learned router is under the control", gap, 100 * limit, error, "%"),)


def _one_expert(known: Known) -> tuple[Check, ...]:
    result = judge.one_expert(*_dense_and_moe(known))
    return tuple(
        Check(
            f"{check.what}, first {ONE_EXPERT_STEPS} steps",
            check.largest if math.isfinite(check.largest) else None,
            check.bound,
            "",
            check.holds,
        )
        for check in result.checks
    )


def _upcycled(known: Known) -> tuple[Check, ...]:
    """Whether the lead that upcycling gives is there: its loss is below the dense one's after as many tokens."""
    if problems := list(alike.of_one_checkpoint(*_dense_and_moe(known))):
        raise MoekitError(*problems)
    loss = _figure(known, LOSS)
    if loss.difference is None:
        raise MoekitError(Problem("", "they have no LM loss in common"))
    lead = loss.difference if known.difference.asked else -loss.difference
    error = None if loss.noise is None else _error(loss)
    return (_below("LM loss, upcycled less dense, over the interval", lead, 0.0, error, ""),)


def _dense_and_moe(known: Known) -> tuple[Run, Run]:
    """Both as a proof takes them; their first steps are enough for it."""
    runs = []
    for side, head in zip(known.sides, known.heads, strict=True):
        if side.loaded is None:
            raise MoekitError(Problem("", f"the recipe of `{side.name}` cannot be read"))
        software = {name: side.software.get(name) for name in SOFTWARE} | {"moekit": side.provenance.get("moekit")}
        runs.append(Run(side.name, str(side.run.path), side.loaded, head, software))
    return (runs[0], runs[1]) if known.difference.asked else (runs[1], runs[0])


def _only_the_theme(known: Known, bearing: str) -> None:
    """Refuse where something else may be the reason."""
    problems = []
    if others := known.difference.others:
        problems.append(Problem("", f"the recipes differ in {_listed(others)} as well"))
    for fact in known.facts:
        if fact.same is False and fact.bearing in (bearing, "both"):
            problems.append(Problem("", f"{fact.name} differs"))
    if problems:
        raise MoekitError(*problems)


def _listed(names: Sequence[str]) -> str:
    shown = " and ".join(f"`{name}`" for name in names[:2])
    return shown + (f" and {len(names) - 2} more fields" if len(names) > 2 else "")


def _low_less_full(known: Known) -> Points:
    """The relative difference of the losses, in percent, of the lower precision less the higher one."""
    if not known.relative:
        raise MoekitError(Problem("", "they have no LM loss in common"))
    if known.difference.asked:
        return known.relative
    return [(step, 100 * (1 / (1 + value / 100) - 1)) for step, value in known.relative if value > -100]


def _figure(known: Known, name: str) -> Figure:
    return next(figure for figure in known.figures if figure.name == name)


def _error(figure: Figure) -> float:
    """The standard error of a median of so many, of which single ones have the figure's noise."""
    return _OF_A_MEDIAN * (figure.noise or 0.0) / math.sqrt(figure.steps)


def _within(what: str, value: float, bound: float, error: float | None) -> Check:
    """A difference that may go either way, in percent."""
    return Check(what, value, bound, "%", _is_below(abs(value), bound, error), error)


def _below(what: str, value: float, bound: float, error: float | None, unit: str) -> Check:
    return Check(what, value, bound, unit, _is_below(value, bound, error), error)


def _is_below(value: float, bound: float, error: float | None) -> bool | None:
    if error is None or abs(value - bound) < 2 * error:
        return None
    return value < bound


def _growth(values: Sequence[float], bound: float) -> Check:
    """How much further from zero the last third's blocks lie than the first third's, and whether that is a trend.

    It is one where the middle third lies between them, and it exceeds both twice the noise of such a difference, which
    is how far neighbouring blocks are apart, and a tenth of the bound.
    """
    what, notable = "growth of that difference, first third to last", _NOTABLE * bound
    if len(values) < FEWEST:
        return Check(f"{what}: takes {FEWEST} steps behind the warm-up", None, notable, "%", None)
    size = len(values) / BLOCKS
    blocks = [median(values[round(i * size) : round((i + 1) * size)]) for i in range(BLOCKS)]
    third = BLOCKS // 3
    first, middle, last = (median(blocks[i * third : (i + 1) * third]) for i in range(3))
    sign = math.copysign(1.0, last)
    grown = sign * (last - first)
    error = spread([b - a for a, b in pairwise(blocks)]) / math.sqrt(2) * _OF_A_MEDIAN * math.sqrt(2 / third)
    grows = grown > max(notable, 2 * error) and sign * first <= sign * middle <= sign * last
    return Check(what, grown, notable, "%", not grows, error)
