"""A running training on the terminal: a line each log interval, and on a terminal one moving line below.

What is shown is read from the run's files, as any other view reads it: `attempts/N/metrics.jsonl` and the counts of
tokens per expert. `Follow` turns them into rows, `Display` prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from moekit.problems import MoekitError, Problem
from moekit.watch.counts import IntervalCounts, RankLayout, TokensPerExpertReader
from moekit.watch.evenness import max_vio
from moekit.watch.metrics import LOSS, MetricsReader, Step

MOST_ROWS = 60
"""Rows of a whole run, however short its log interval."""
VALIDATION_LOSS = "lm loss validation"
BRIEF = ("run", "data", "warning", "training")
"""Facts of a launch that are told where it is one of several."""


@dataclass(frozen=True)
class Row:
    """A log interval; None is what the run does not have, or not yet."""

    step: int
    loss: float | None
    """LM loss in nats, mean over the interval."""
    balance_loss: float | None
    """Load-balancing loss, mean over the interval and the layers; 1 is even, before its coefficient."""
    max_vio: float | None
    """At this step, mean over the layers."""
    tokens_per_s: float | None
    left_s: float | None


def rows_every(log_interval: int, total_steps: int) -> int:
    """Steps between rows: the log interval, or as many of it as keep a run within `MOST_ROWS`."""
    return log_interval * max(1, -(-total_steps // (log_interval * MOST_ROWS)))


class Follow:
    """One attempt's rows, as its files grow."""

    def __init__(self, run_dir: Path, attempt: int, total_steps: int, tokens_per_step: int, every: int) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._total = total_steps
        self._tokens_per_step = tokens_per_step
        self._every = every
        self._reader = MetricsReader(run_dir)
        self._counts: TokensPerExpertReader | None = None
        self._counts_refused = False
        self._window: list[Step] = []
        self._before: Step | None = None
        self._max_vio: dict[int, float] = {}
        self._step_s: float | None = None
        self.step = 0
        """The last step read."""
        self.validation_loss: float | None = None
        """In nats, once the run has validated."""
        self.problems: list[Problem] = []
        """Why there is no MaxVio, until it has been said."""

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step, at the pace of the last interval; validation and the last save come on top."""
        return self._step_s * (self._total - self.step) if self._step_s else None

    def poll(self) -> list[Row]:
        """The rows that are complete since the last call."""
        steps = [step for step in self._reader.poll() if step.attempt == self._attempt]
        self._read_counts()  # after the metrics: a step's counts are written before its metrics
        return [row for step in steps if (row := self._take(step))]

    def _take(self, step: Step) -> Row | None:
        self.validation_loss = step.metrics.get(VALIDATION_LOSS, self.validation_loss)
        if LOSS not in step.metrics:  # a further line of a step that was taken
            return None
        self.step = step.step
        self._window.append(step)
        if step.step < self._total and step.step // self._every == (self._window[0].step - 1) // self._every:
            return None
        row = self._row(step.step)
        self._window, self._before = [], step
        return row

    def _row(self, step: int) -> Row:
        timed = [self._before, *self._window] if self._before else self._window
        seconds = [(b.time - a.time) / (b.step - a.step) for a, b in pairwise(timed)]
        if seconds:
            self._step_s = median(seconds)  # the middle one: the pause of a checkpoint or a validation is no step
        counted = [iteration for iteration in self._max_vio if step - self._every < iteration <= step]
        return Row(
            step,
            _mean(self._window, LOSS),
            _mean(self._window, "load_balancing_loss"),
            self._max_vio[max(counted)] if counted else None,
            self._tokens_per_step / self._step_s if self._step_s else None,
            self.left_s,
        )

    def _read_counts(self) -> None:
        for interval in self._new_counts():
            layers = [vio for counts in interval.layers.values() if (vio := max_vio(counts)) is not None]
            if layers and interval.coverage.complete:
                self._max_vio[interval.iteration] = fmean(layers)

    def _new_counts(self) -> list[IntervalCounts]:
        """None of a dense run, nor of one whose counts cannot be read."""
        try:
            if self._counts is None and not self._counts_refused:
                layout = RankLayout.from_args(self._reader.configs.get(self._attempt, {}))
                if layout is not None:
                    folder = self._run_dir / "checkpoints" / "tokens_per_expert"
                    self._counts = TokensPerExpertReader(folder, layout)
            return self._counts.poll() if self._counts is not None else []
        except MoekitError as refused:
            self._counts, self._counts_refused = None, True
            self.problems += refused.problems
            return []


def _mean(steps: list[Step], ending: str) -> float | None:
    """Mean of the metric whose name is or ends with `ending` (Megatron has several load-balancing losses)."""
    values = [
        value
        for step in steps
        for name, value in step.metrics.items()
        if name.endswith(ending) and not name.startswith("moe/")
    ]
    return fmean(values) if values else None


class Display:
    """Prints a launch: plain lines, and on a terminal a moving line below them. `NO_COLOR` is respected.

    A `brief` one leaves out the rows, and the facts but `BRIEF`.
    """

    def __init__(self, has_router: bool, console: Console | None = None, brief: bool = False) -> None:
        self.brief = brief
        self._console = console or Console(highlight=False)
        self._has_router = has_router
        self._has_header = False
        self._moving: Progress | None = None

    def say(self, text: str, style: str = "") -> None:
        """A line of its own, as it is."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def text(self, text: Text) -> None:
        """A text that brings its own lines and colours."""
        self._console.print(text, soft_wrap=True, end="")

    @property
    def width(self) -> int:
        """Columns to fill."""
        return min(self._console.width, 100)

    def fact(self, name: str, text: str) -> None:
        """One of the lines that say what is done, by its name."""
        if self.brief and name not in BRIEF:
            return
        self._console.print(Text.assemble((f"  {name:<10}", "dim"), text), soft_wrap=True)

    @contextmanager
    def moving(self, text: str, total_steps: int | None) -> Iterator[None]:
        """Show a moving line with a bar of `total_steps`, on a terminal only."""
        words, left = TextColumn("{task.description}"), TextColumn("{task.fields[left]}")
        columns = (SpinnerColumn(), words, BarColumn(bar_width=32), left)
        off = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=off) as moving:
            moving.add_task(text, total=total_steps, left="")
            self._moving = moving
            try:
                yield
            finally:
                self._moving = None

    def move(self, text: str, step: int, left_s: float | None) -> None:
        """Bring the moving line up to date."""
        if self._moving:
            left = f"{clock(left_s)} left" if left_s else ""
            self._moving.update(self._moving.task_ids[0], description=text, completed=step, left=left)

    def _header(self) -> None:
        router = f"{'balance loss':>14}{'MaxVio':>9}" if self._has_router else ""
        self.say(f"{'iteration':>9}{'LM loss':>12}{router}{'tokens/s':>11}{'time left':>12}", "bold")

    def row(self, row: Row, total_steps: int) -> None:
        """One log interval; the first brings the names of the columns."""
        if self.brief:
            return
        if not self._has_header:
            self._header()
            self._has_header = True
        router = f"{_number(row.balance_loss, '.3f'):>14}{_number(row.max_vio, '.2f'):>9}" if self._has_router else ""
        left = clock(row.left_s) if row.left_s is not None else "-"
        step = f"{row.step}/{total_steps}"
        self.say(f"{step:>9}{_number(row.loss, '.3f'):>12}{router}{_number(row.tokens_per_s, ',.0f'):>11}{left:>12}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def clock(seconds: float) -> str:
    """`3:05`, or `1:03:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
