"""A run as it is seen while it trains: curves, the newest numbers, layers, alerts; in constant memory."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moekit.watch.alerting import Setting
from moekit.watch.derive import RMS_LOGSUMEXP, DeadExpert, Derived, Deriver
from moekit.watch.facts import AUX_LOSSES, Facts
from moekit.watch.health import Alert, Health
from moekit.watch.metrics import LOSS, MetricsReader, Step
from moekit.watch.series import Series

TOKENS_PER_S = "tokens/s"
CURVES = (
    LOSS,
    "mtp_1 loss",
    "router/max_vio",
    "router/max_vio_micro",
    TOKENS_PER_S,
    "throughput",
    "grad-norm",
    *AUX_LOSSES.values(),
    RMS_LOGSUMEXP,
)
"""Those that are kept over the whole run, by their names in the stream; `throughput` is TFLOP/s of each GPU."""
_CURVE_POINTS = 1024
_MOST_ALERTS = 20
_MOST_NAMES = 4096
"""So many names are told apart; a stream has hundreds."""


@dataclass(frozen=True)
class LayerLoad:
    """One router in the newest counted iteration that was whole; dense layers have none."""

    name: str
    max_vio_micro: float | None
    max_vio_global: float | None


@dataclass(frozen=True)
class Picture:
    """Everything the view says, as values."""

    name: str
    state: str = ""
    """What the run is, in a sentence; from outside, since Slurm may have to be asked."""
    attempt: int = 0
    """The newest that has logged a step; 0 before the first."""
    step: int = 0
    time: float = 0.0
    """When that step was logged, in seconds since the epoch."""
    facts: Facts = field(default_factory=Facts)
    latest: dict[str, float] = field(default_factory=dict)
    """The newest value of each name, of the steps that count."""
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """(step, value), of long runs every so many."""
    best_loss: float | None = None
    layers: list[LayerLoad] = field(default_factory=list)
    counted_step: int = 0
    """The iteration that `layers` are from."""
    dead: list[DeadExpert] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    """The newest last, those that have ended too."""
    active: list[str] = field(default_factory=list)
    """Keys of those that have not ended."""
    missing: list[str] = field(default_factory=list)
    """Sentences on what cannot be shown, and why."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain values; what is no number is null."""
        plain: dict[str, Any] = _finite(asdict(self))
        return plain


class Watching:
    """Follows a run's files."""

    def __init__(self, run_dir: Path, control: str | None = None) -> None:
        self._run_dir = run_dir
        self._reader = MetricsReader(run_dir)
        self._deriver = Deriver(run_dir, self._reader)
        self._setting = Setting(run_dir, control)
        self._health = Health(self._setting.thresholds, Facts())
        self._curves = {name: Series(_CURVE_POINTS) for name in CURVES}
        self._latest: dict[str, float] = {}
        self._best: dict[int, float] = {}
        self._alerts: deque[Alert] = deque(maxlen=_MOST_ALERTS)
        self._newest: Step | None = None
        self._resumed_at = 0
        self._counted: Derived | None = None
        self._lost = 0

    def poll(self, limit: int) -> list[Alert] | None:
        """Take in what is new, at most so many steps; the alerts that begin, or None where nothing was new."""
        steps = self._reader.poll(limit)
        if steps:
            self._health.facts = self._setting.facts(self._reader.config)
        rows = self._deriver.derive(steps, limit)
        if not steps and not rows:
            return None
        for step in steps:
            self._step(step)
        for row in rows:
            self._derived(row)
        begun = self._health.take(steps, rows)
        self._alerts.extend(begun)
        return begun

    def picture(self, state: str = "") -> Picture:
        """What there is to see now."""
        newest = self._newest
        return Picture(
            name=self._run_dir.resolve().name,
            state=state,
            attempt=newest.attempt if newest else 0,
            step=newest.step if newest else 0,
            time=newest.time if newest else 0.0,
            facts=self._health.facts,
            latest=dict(self._latest),
            curves={name: list(curve.points) for name, curve in self._curves.items() if curve.last is not None},
            best_loss=min(self._best.values(), default=None),
            layers=_layers(self._counted),
            counted_step=self._counted.step if self._counted else 0,
            dead=list(self._counted.dead) if self._counted else [],
            alerts=list(self._alerts),
            active=list(self._health.active),
            missing=self._missing(),
        )

    def _step(self, step: Step) -> None:
        if self._newest is None or step.attempt > self._newest.attempt:
            self._begin(step)
        elif step.attempt < self._newest.attempt:
            return  # of an attempt that another has taken over from
        self._newest = step
        metrics = dict(step.metrics)
        seconds, batch_tokens = metrics.get("iteration-time"), self._health.facts.tokens_a_step
        if seconds and batch_tokens:
            metrics[TOKENS_PER_S] = batch_tokens / seconds
        loss = metrics.get(LOSS, math.nan)
        if math.isfinite(loss):
            self._best[step.attempt] = min(loss, self._best.get(step.attempt, loss))
        self._take(step.step, metrics)

    def _begin(self, step: Step) -> None:
        """Another attempt: what was logged from its first step on is taken back."""
        self._resumed_at = step.step
        for curve in self._curves.values():
            curve.cut(step.step)
        if self._counted and self._counted.step >= step.step:
            self._counted = None
        kept = [value for _, value in self._curves[LOSS].points]
        self._best = {0: min(kept)} if kept else {}

    def _derived(self, row: Derived) -> None:
        if self._newest and row.attempt < self._newest.attempt and row.step >= self._resumed_at:
            return
        if row.kind == "router":
            if "router/max_vio" not in row.values:
                self._lost += 1
                return
            self._counted = row
        self._take(row.step, row.values)

    def _take(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name in self._latest or len(self._latest) < _MOST_NAMES:
                self._latest[name] = value
            if name in self._curves and math.isfinite(value):
                self._curves[name].add(step, value)

    def _missing(self) -> list[str]:
        said = [self._setting.missing] if self._setting.missing else []
        if self._deriver.refused:
            said.append(f"The router is not shown: {self._deriver.refused}.")
        elif self._health.facts.scopes and self._counted is None and self._newest:
            every = self._reader.config.get("save_tokens_per_expert_interval")
            said.append(
                f"MaxVio comes with the first counts: every {every} steps."
                if every
                else "MaxVio is not shown: `monitor.tokens_per_expert_interval` is not set."
            )
        if self._deriver.since:
            said.append(
                f"Counts before step {self._deriver.since:,} are of another layout of ranks; they are left out."
            )
        if self._lost:
            said.append(f"{self._lost} counted steps lack a rank or a layer; they are left out.")
        return said


def _layers(counted: Derived | None) -> list[LayerLoad]:
    if counted is None:
        return []
    micro, whole = "router/max_vio_micro_", "router/max_vio_"
    names = [name.removeprefix(whole) for name in counted.values if name.startswith((f"{whole}layer_", f"{whole}mtp_"))]
    return [
        LayerLoad(name, counted.values.get(f"{micro}{name}"), counted.values.get(f"{whole}{name}")) for name in names
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
