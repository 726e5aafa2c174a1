"""A comparison as text and as a picture: made from values alone, no row wider than the terminal where it can be."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from moekit.problems import CONTROL
from moekit.recipe.load import show
from moekit.watch.chart import Points, curve
from moekit.watch.compare import Comparison, Ends
from moekit.watch.compare_facts import Bearing, Fact
from moekit.watch.compare_figures import FEWEST, MAIN, MAX_VIO, MAX_VIO_MICRO, RELATIVE_LOSS, TFLOPS, Figure
from moekit.watch.compare_recipes import Change
from moekit.watch.compare_verdicts import Check, Verdict
from moekit.watch.metrics import LOSS
from moekit.watch.svg import Panel
from moekit.watch.watching import TOKENS_PER_S

_NAMES: dict[str, tuple[str, str]] = {
    LOSS: ("LM loss", ".4f"),
    MAX_VIO: ("MaxVio, global batch", ".3f"),
    MAX_VIO_MICRO: ("MaxVio, micro batch", ".3f"),
    TFLOPS: ("TFLOP/s a GPU", ",.1f"),
    "lm loss validation": ("validation loss", ".4f"),
    TOKENS_PER_S: ("tokens/s", ",.0f"),
    "grad-norm": ("gradient norm", ".3f"),
    "peak_memory_gib": ("peak memory, GiB", ".2f"),
    "peak_rss_gib": ("peak resident, GiB", ".2f"),
    "num-zeros": ("zero gradients", ",.0f"),
}
"""How each metric is called and written."""
_BEARING: dict[Bearing, str] = {
    "loss": "losses of the same step say nothing of each other",
    "speed": "speed and memory are not to be compared",
    "both": "may be the reason for any difference",
}
_PANELS = (
    ("LM loss, nats per token", LOSS),
    ("MaxVio of the global batch, mean of the layers", MAX_VIO),
    ("MaxVio of micro batches, mean of the layers", MAX_VIO_MICRO),
    ("TFLOP/s of each GPU", TFLOPS),
    ("tokens/s", TOKENS_PER_S),
    ("gradient norm", "grad-norm"),
    ("validation loss", "lm loss validation"),
)
_SAME = "the recipes are the same, so all that differs is noise, or what they ran on"
_MOST_CHANGES = 4
_MIN_WIDTH = 60
_LEGEND = 20
"""Characters of a run's name beside a curve."""


def lines(comparison: Comparison, width: int, chart_rows: int = 6) -> list[str]:
    """The whole text."""
    rows = [
        *_head(comparison),
        "",
        *_facts(comparison),
        "",
        *_figures(comparison),
        *_charts(comparison, max(width, _MIN_WIDTH), chart_rows),
        "",
        *_verdict(comparison),
        *(f"  {note}" for note in comparison.notes),
    ]
    return [CONTROL.sub("?", row).rstrip() for row in rows]


def panels(comparison: Comparison) -> list[Panel]:
    """The curves for `moekit.watch.svg`."""
    one, other = comparison.curves
    names = [f"{letter} {run.name[-_LEGEND:]}" for letter, run in (("A", comparison.one), ("B", comparison.other))]
    drawn = [
        Panel(title, {names[0]: one.get(name, []), names[1]: other.get(name, [])})
        for title, name in _PANELS
        if name in one or name in other
    ]
    apart = Panel(RELATIVE_LOSS, {"B less A": other.get(RELATIVE_LOSS, [])})
    return [*drawn[:1], apart, *drawn[1:]]


def _head(comparison: Comparison) -> Iterator[str]:
    width = max(len(comparison.one.name), len(comparison.other.name))
    for letter, run in (("A", comparison.one), ("B", comparison.other)):
        yield f"{letter}  {run.name:{width}}  {_ends(run)}"


def _ends(run: Ends) -> str:
    state = f", {run.state}" if run.state else ""
    return f"steps {run.first:,} to {run.last:,}{state}"


def _facts(comparison: Comparison) -> Iterator[str]:
    """What both have in common, and what not, plainly."""
    spoilt = comparison.spoilt
    unknown = any(fact.same is None and fact.bearing == "loss" for fact in comparison.facts)
    comparable = "Comparable, as far as is known" if unknown else "Comparable"
    yield f"Not comparable: other {' and '.join(spoilt)}" if spoilt else comparable
    width = max(len(fact.name) for fact in comparison.facts)
    for fact in comparison.facts:
        yield f"  {fact.name:{width}}  {_fact(fact)}"
    if comparison.difference is None:
        return
    groups = comparison.difference.groups
    many = f"DIFFER in {len(groups)} groups: no figure is down to one of them alone"
    said = (
        many if len(groups) > 1 else "differ in one group" if groups else "the same, but for what is logged and saved"
    )
    yield f"  {'recipes':{width}}  {said}"
    longest = max((len(name) for name in groups), default=0)
    for name, changes in groups.items():
        for number, change in enumerate(_changes(name, changes)):
            yield f"  {'':{width}}  {'' if number else name:{longest}}  {change}"
    if any(len(changes) > _MOST_CHANGES for changes in groups.values()):
        recipes = [shlex.quote(show(Path(run.path, "recipe.yaml"))) for run in (comparison.one, comparison.other)]
        yield f"  {'':{width}}  all of them: moekit diff {' '.join(recipes)}"


def _fact(fact: Fact) -> str:
    if fact.same is False:
        return f"DIFFERS: {fact.one} in A, {fact.other} in B; {_BEARING[fact.bearing]}"
    if fact.same is None:
        return "not known" if fact.one == fact.other else f"{fact.one} in A, {fact.other} in B"
    return fact.one if fact.one == fact.other else f"{fact.one} in A, {fact.other} in B: the same"


def _changes(group: str, changes: Sequence[Change]) -> list[str]:
    if len(changes) > _MOST_CHANGES:
        return [f"{len(changes)} fields"]
    return [f"{name.removeprefix(f'{group}.')} {_value(was)} → {_value(now)}" for name, was, now in changes]


def _value(value: Any) -> str:
    text = "unset" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _figures(comparison: Comparison) -> Iterator[str]:
    interval = comparison.interval
    behind = f", behind a warm-up of {interval.warmup:,}" if interval.warmup else ""
    yield (
        f"Medians over the last {interval.steps:,} of {interval.common:,} steps that both have: "
        f"{interval.first:,} to {interval.last:,}{behind}"
    )
    yield f"  {'':19}{'A':>10}{'B':>10}{'B less A':>11}{'':>9}{'noise':>9}"
    beside = False
    for figure in comparison.figures:
        if figure.name not in MAIN and not beside:
            beside = True
            yield ""
        yield _figure(figure)


def _figure(figure: Figure) -> str:
    name, form = _NAMES[figure.name]

    def number(value: float | None, sign: str = "") -> str:
        return "-" if value is None else format(value, f"{sign}{form}")

    part = 100 * (figure.relative or 0.0)
    relative = "" if figure.relative is None else f"{part:+.2f}%" if abs(part) < 100 else f"{part:+,.0f}%"
    noise = "" if figure.noise is None else f"±{number(figure.noise)}"
    values = f"{number(figure.one):>10}{number(figure.other):>10}{number(figure.difference, '+'):>11}"
    row = f"  {name:19}{values}{relative:>9}"
    return f"{row}{noise:>9}  {_remark(figure)}" if noise else f"{row}  {_remark(figure)}"


def _remark(figure: Figure) -> str:
    if figure.difference is None:
        return "not logged" if figure.one is None and figure.other is None else "only one has it"
    if figure.at is not None:
        return f"at step {figure.at:,}"
    if figure.noise is None:
        few = figure.steps < FEWEST
        return f"{figure.steps} {'step' if figure.steps == 1 else 'steps'}" if few else "the highest"
    if figure.difference == figure.noise == 0:
        return "the same"
    return "" if figure.is_clear else "in noise"


def _charts(comparison: Comparison, width: int, rows: int) -> Iterator[str]:
    """LM loss, MaxVio and TFLOP/s beside each other over the same steps: A the line, B the diamonds."""
    one, other = comparison.curves
    vio = MAX_VIO if MAX_VIO in one or MAX_VIO in other else MAX_VIO_MICRO
    shown = [
        (title, one.get(name, []), other.get(name, []), label)
        for title, name, label in (
            ("LM loss", LOSS, "{:.2f}".format),
            ("MaxVio", vio, "{:.2f}".format),
            ("TFLOP/s", TFLOPS, "{:.0f}".format),
        )
        if len(one.get(name, ())) > 1 or len(other.get(name, ())) > 1
    ]
    if not shown:
        return
    every = [x for _, mine, theirs, _ in shown for x, _ in (*mine, *theirs)]
    each = (width - 2) // len(shown)
    drawn = [
        _chart(title, mine, theirs, label, each - 2, rows, (min(every), max(every)))
        for title, mine, theirs, label in shown
    ]
    yield ""
    for parts in zip_longest(*drawn, fillvalue=""):
        yield "  " + "".join(f"{part:{each}}" for part in parts)


def _chart(
    title: str,
    one: Points,
    other: Points,
    label: Callable[[float], str],
    width: int,
    rows: int,
    x_range: tuple[float, float],
) -> list[str]:
    have = ", ".join(text for text, points in (("A line", one), ("B ◆", other)) if points)
    return [f"{title}: {have}"[:width], *curve(one, _thinned(other, x_range, width // 4), width, rows, label, x_range)]


def _thinned(points: Points, x_range: tuple[float, float], most: int) -> list[tuple[float, float]]:
    """The means of so many equal parts of the axis: diamonds that leave the line to be seen."""
    low, high = x_range
    parts: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        parts.setdefault(min(most - 1, int((x - low) / ((high - low) or 1) * most)), []).append((x, y))
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts.values()]


def _verdict(comparison: Comparison) -> Iterator[str]:
    verdict = comparison.verdict
    if verdict is None:
        if comparison.difference is not None:
            same = not comparison.difference.groups
            yield f"No verdict: {_SAME if same else 'the handbook has no bound for what these recipes differ in'}"
        return
    yield f"{verdict.what[0].upper()}{verdict.what[1:]} ({verdict.source}): {_outcome(verdict)}"
    for check in verdict.checks:
        yield f"  {_check(check)}"


def _outcome(verdict: Verdict) -> str:
    if verdict.refused:
        return f"not judged, {verdict.refused}"
    return {True: "holds", False: "DOES NOT HOLD", None: "undecided"}[verdict.holds]


def _check(check: Check) -> str:
    mark = {True: "holds    ", False: "FAILS    ", None: "undecided"}[check.holds]
    unit = f" {check.unit}" if check.unit else ""
    if check.value is None:
        return f"{mark}  {check.what}"
    error = f" ± {check.error:.2g}" if check.error is not None else ""
    return f"{mark}  {check.what}: {check.value:+.4g}{error}{unit}, bound {check.bound:g}{unit}"
