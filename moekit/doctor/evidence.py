"""What a run left, gathered once: its numbers and their alerts, its recipe, its attempts, and what its logs say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from moekit.doctor.causes import first
from moekit.doctor.traces import Traces, of_run
from moekit.doctor.triage import Hit, Triage, read_log
from moekit.launch.rundir import RunDir
from moekit.recipe.load import load_partly
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import Sizes, sizes
from moekit.runs.history import History
from moekit.watch.health import Alert
from moekit.watch.watching import Picture, Watching

_STEPS_AT_ONCE = 20_000
_MOST_ALERTS = 1000
_MOST_LOGS = 4
"""Logs of so many attempts are read, the newest."""
_LINES_OF_A_LOG = 10**12
"""More than any has."""
_FINE = ("ended", "stopped")


@dataclass(frozen=True)
class Log:
    """What one log of an attempt says."""

    attempt: int
    path: Path
    """Empty of standard input."""
    triage: Triage


@dataclass(frozen=True)
class Evidence:
    """What there is to judge by."""

    picture: Picture
    alerts: list[Alert]
    """All that ever began, the first thousand."""
    recipe: Recipe
    history: History
    logs: list[Log]
    """Of the newest attempts that ended badly or run, the newest first."""
    missing: list[str] = field(default_factory=list)
    """What could not be looked at, and why: sentences."""
    traces: Traces = field(default_factory=Traces)

    @property
    def sizes(self) -> Sizes | None:
        """The recipe's sizes."""
        return sizes(self.recipe)

    @property
    def began(self) -> set[str]:
        """Keys of the alerts."""
        return {alert.key for alert in self.alerts}

    def values(self, name: str, before: int | None = None) -> list[float]:
        """A curve's values, those of steps before one where it is named."""
        points = self.picture.curves.get(name, [])
        return [value for step, value in points if before is None or step < before]

    def hit(self, key: str) -> bool:
        """Whether a log names a cause."""
        return any(key in log.triage.hits for log in self.logs)


def gather(run: RunDir, history: History) -> Evidence:
    """Read it all, in constant memory.

    Raises:
        MoekitError: the run's recipe cannot be read at all.
    """
    watching = Watching(run.path)
    alerts: list[Alert] = []
    while (begun := watching.poll(_STEPS_AT_ONCE)) is not None:
        alerts += begun[: _MOST_ALERTS - len(alerts)]
    picture = watching.picture()
    logs = list(_logs(run, history))
    missing = list(picture.missing)
    if not picture.step:
        missing.append("No step was logged, so nothing is said from numbers.")
    if history.starts and not logs and history.starts[-1].attempt.ending.kind not in _FINE:
        missing.append("The newest attempt has no log.")
    traces = of_run(run, max((log.triage.peak_mib for log in logs), default=0.0) / 1024)
    missing += traces.missing
    return Evidence(picture, alerts, load_partly(str(run.recipe)).recipe, history, logs, missing, traces)


def _logs(run: RunDir, history: History) -> Iterator[Log]:
    """The newest attempts' logs; an attempt that ended as it should is read where it is the newest alone."""
    newest = history.starts[-1].attempt.number if history.starts else 0
    chosen = [
        start.attempt
        for start in reversed(history.starts)
        if start.attempt.number == newest or start.attempt.ending.kind not in _FINE
    ]
    for attempt in chosen[:_MOST_LOGS]:
        paths = [run.attempt(attempt.number).train_log]
        if attempt.job:  # what happened around the training: containers, mounts
            paths.insert(0, run.job_log(attempt.job))
        for path in paths:
            with suppress(OSError), path.open("rb") as file:
                yield Log(attempt.number, path, read_log(file, attempt.number > 1))


def causes_of(logs: Sequence[Log]) -> list[tuple[Log, Hit]]:
    """What the logs of one attempt name, the first cause first."""
    hits: dict[str, tuple[int, Log, Hit]] = {}
    for place, log in enumerate(logs):
        for hit in log.triage.found:
            hits.setdefault(hit.key, (place * _LINES_OF_A_LOG + hit.line_number, log, hit))
    survived = {key for key, (_, log, hit) in hits.items() if log.triage.went_on(hit)}
    return [hits[key][1:] for key in first(((key, at) for key, (at, _, _) in hits.items()), survived)]
