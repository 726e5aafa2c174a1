"""Two runs read side by side, step by step, in constant memory: each step once, as the attempt that counts logged it.

Where an attempt took over from an earlier one, what the earlier one logged from there on is no part of the run: the
weights behind it were thrown away.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from moekit.problems import MoekitError
from moekit.prove.compare import ONE_EXPERT_STEPS
from moekit.watch.counts import IntervalCounts, RankLayout, tokens_per_expert
from moekit.watch.derive import router_values
from moekit.watch.facts import Facts, facts_of
from moekit.watch.metrics import LOSS, MetricsReader, attempts
from moekit.watch.rankfile import Tail, parse
from moekit.watch.watching import TOKENS_PER_S

Row = tuple[int, dict[str, float]]
"""A step, counted from where the run's comparison begins, and everything that is known of it."""
_AT_ONCE = 5_000


class Trajectory:
    """A run's steps in rising order, with MaxVio at the counted ones; to be gone through once.

    What was come across so far: `facts`, `last` (the last step), `not_finite` (losses that were no number), `head` (the
    first steps that have a loss, for the one-expert check). `missing` says in a sentence why there is no MaxVio.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._reader = MetricsReader(run_dir)
        firsts = {number: first for number in attempts(run_dir) if (first := _first_step(run_dir, number))}
        self._ends = {
            number: min((first for later, first in firsts.items() if later > number), default=sys.maxsize)
            for number in firsts
        }
        """Of each attempt, the step from which on a later one counts; of one that began after this, nothing does."""
        self.first = min(firsts.values(), default=0)
        """The first step that any attempt has logged; 0 without any."""
        self.begin = 0
        """The step that is 0 in the rows, the run's own 0 unless somebody says otherwise."""
        self.last = 0
        self.not_finite = 0
        self.head: dict[int, dict[str, float]] = {}
        self.facts = Facts()
        self.missing = ""

    def rows(self) -> Iterator[Row]:
        """Each step once. Steps that were counted and not logged come alone, those after the last logged one never."""
        logged = self._logged()
        if (first := next(logged, None)) is None:
            return
        self.facts = facts_of(self._reader.config)
        counts = self._counts()
        count = next(counts, None)
        for step, metrics in chain([first], logged):
            while count is not None and count[0] < step:
                yield count[0] - self.begin, count[1]
                count = next(counts, None)
            if count is not None and count[0] == step:
                metrics |= count[1]
                count = next(counts, None)
            self._note(step, metrics)
            yield step - self.begin, metrics

    def _note(self, step: int, metrics: dict[str, float]) -> None:
        self.last = step
        if LOSS in metrics:
            self.not_finite += not math.isfinite(metrics[LOSS])
            if len(self.head) < ONE_EXPERT_STEPS:
                self.head[step] = metrics
        if self.facts.tokens_a_step and metrics.get("iteration-time"):
            metrics[TOKENS_PER_S] = self.facts.tokens_a_step / metrics["iteration-time"]

    def _logged(self) -> Iterator[Row]:
        """Each step with all that its lines say."""
        step, merged = 0, dict[str, float]()
        while steps := self._reader.poll(_AT_ONCE):
            for line in steps:
                if not step <= line.step < self._ends.get(line.attempt, 0):
                    continue
                if line.step > step and merged:
                    yield step, merged
                    merged = {}
                step = line.step
                merged |= line.metrics
        if merged:
            yield step, merged

    def _counts(self) -> Iterator[Row]:
        try:
            layout = RankLayout.from_args(self._reader.config)
            if layout is None:
                return
            every = self._reader.config.get("save_tokens_per_expert_interval")
            self.missing = "" if every else "`monitor.tokens_per_expert_interval` is not set"
            for count in tokens_per_expert(self._run_dir / "checkpoints" / "tokens_per_expert", layout):
                if values := _whole(count, layout):
                    yield count.iteration, values
        except MoekitError as refused:
            self.missing = refused.problems[0].what


def _whole(count: IntervalCounts, layout: RankLayout) -> dict[str, float]:
    """The router's means over the layers, of counts that lack nothing."""
    values = router_values(count, layout) if count.coverage.complete else {}
    return {name: value for name, value in values.items() if "layer_" not in name}


def _first_step(run_dir: Path, attempt: int) -> int | None:
    lines = Tail(run_dir / "attempts" / str(attempt) / "metrics.jsonl").lines()
    return next((int(record["step"]) for line in lines if (record := parse(line, "step"))), None)


def aligned(one: Trajectory, other: Trajectory) -> Iterator[tuple[int, dict[str, float], dict[str, float]]]:
    """The steps that both have. The longer run is read to its end, so that it is known where that is."""
    left, right = one.rows(), other.rows()
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        if a[0] == b[0]:
            yield a[0], a[1], b[1]
        behind = a[0] - b[0]
        if behind <= 0:
            a = next(left, None)
        if behind >= 0:
            b = next(right, None)
    for _ in chain(left, right):
        pass
