"""What is worth an alert in a run's numbers, as they come; pure, in constant memory.

"HB 1919" is a line of the handbook. Where it names a limit, that is the default; the others are ours, each with its
reason. Every limit is a field `monitor.alert_*` of the recipe, and 0 there switches its alert off.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from moekit.watch.derive import RMS_LOGSUMEXP, Derived
from moekit.watch.facts import Facts
from moekit.watch.metrics import LOSS, Step
from moekit.watch.smooth import Lowest, Mean

Level = Literal["info", "warn", "error"]
"""Trackio's."""
WARM_UP_STEPS = 100
"""From the run's beginning: a fresh router is as uneven as one that is forced to be, and gets better (HB 806)."""
AFTER_RESUME_STEPS = 10
"""Left out: optimizer and scaling factors find their way back, which is no fault of the run."""
_LOSS_WINDOW, _Z_WINDOW, _SPEED_WINDOW, _AUX_WINDOW = 10, 20, 20, 20
_UNEVEN_COUNTS = 3
"""MaxVio is high in so many counted iterations in a row."""
_NORM = "experts/norm_"
NORM_HIGH, NORM_LOW = f"{_NORM}max_over_median", f"{_NORM}min_over_median"
"""Largest and smallest expert output norm of a layer over the layer's median (A.1), by layer with `_layer_3` behind."""


@dataclass(frozen=True)
class Thresholds:
    """The limits; 0 is off."""

    loss_above_best: float = 0.1
    """Nats. HB 1919: above the lowest loss so far, after Qwen3.8-Next's criterion."""
    max_vio: float = 1.0
    """With an aux loss near its floor. HB 3542 names no number; at 1 the busiest expert has twice its share."""
    aux_near_floor: float = 0.05
    """How near is near (HB 3542, 932)."""
    aux_under_floor: float = 0.05
    """How far under is not noise (HB 932: 1 is even, and flat probabilities read as 1)."""
    z_loss_rise: float = 2.0
    """In RMS logsumexp. HB 3561 names no number; 2 means exp(logit) has grown sevenfold, and bf16's steps doubled."""
    expert_norm: float = 10.0
    """A factor. HB 1919: 14 times the median went to 5,700 times."""
    dead_expert_counts: float = 5
    """Counted iterations in a row without a token: one alone may be chance."""
    tflops_gap: float = 0.1
    """A part of the control's. HB 864 names no number."""
    socket: bool = True
    """NCCL says `Using network Socket`: 25 times slower across nodes (HB 3549)."""


@dataclass(frozen=True)
class Alert:
    """Something that has begun. `key` is the same whenever it begins again."""

    key: str
    attempt: int
    step: int
    time: float
    """Seconds since the epoch."""
    level: Level
    title: str
    text: str
    """Why that matters, and where to look."""
    value: float
    threshold: float
    """What `value` is past."""


class Health:
    """Takes a run's steps and what was derived of them, in the order they come; an alert is given once until it ends.

    `active` has those that have not ended.
    """

    def __init__(self, thresholds: Thresholds, facts: Facts) -> None:
        self.facts = facts
        """Replaced once the run's arguments are known."""
        self.active: dict[str, Alert] = {}
        self._limits = thresholds
        self._attempt = 0
        self._resumed_at = 0
        self._loss = Lowest(_LOSS_WINDOW)
        self._z = Lowest(_Z_WINDOW)
        self._aux: dict[str, Mean] = {}
        self._tflops: deque[float] = deque(maxlen=_SPEED_WINDOW)
        self._norms: dict[str, float] = {}
        self._uneven = 0
        self._new: list[Alert] = []

    def take(self, steps: Sequence[Step], derived: Sequence[Derived]) -> list[Alert]:
        """The alerts that begin."""
        self._new = []
        for step in steps:
            if step.attempt > self._attempt:
                self._begin(step)
            if step.attempt == self._attempt:
                self._step(step)
        for row in derived:
            if row.kind == "log":
                self._socket(row)
            elif row.attempt == self._attempt:
                self._z_loss(row)
                self._router(row)
        return self._new

    def _begin(self, step: Step) -> None:
        """Another attempt: what an earlier one logged from its first step on does not count any more."""
        resumed = self._attempt > 0
        self._attempt = step.attempt
        self._resumed_at = step.step if resumed else -AFTER_RESUME_STEPS
        self._loss.cut(step.step)
        self._z.cut(step.step)
        self._tflops.clear()
        self._uneven = 0
        self.active.pop("socket", None)
        for mean in self._aux.values():
            mean.cut(step.step)

    def _step(self, step: Step) -> None:
        metrics = step.metrics
        if (loss := metrics.get(LOSS)) is not None:
            self._loss_not_finite(step, loss)
        if step.step < self._resumed_at + AFTER_RESUME_STEPS:
            return
        if loss is not None and math.isfinite(loss):
            self._loss_above_best(step, loss)
        for name in self.facts.aux_losses:
            if (value := metrics.get(name)) is not None and math.isfinite(value):
                mean = self._aux.setdefault(name, Mean(_AUX_WINDOW))
                self._aux_under_floor(step, name, mean.add(step.step, value))
        if (speed := metrics.get("throughput")) is not None:
            self._speed(step, speed)
        for name in metrics:
            if name.startswith(_NORM):
                self._norm(step, name, metrics[name])

    def _begins(self, key: str, begins: bool, ends: bool) -> bool:
        """Whether an alert begins; one that ends is dropped. Between the two limits it stays what it was, so that noise
        does not repeat it."""
        if key in self.active:
            if ends:
                del self.active[key]
            return False
        return begins

    def _raise(
        self, at: Step | Derived, key: str, level: Level, title: str, text: str, value: float, threshold: float
    ) -> None:
        self.active[key] = alert = Alert(key, at.attempt, at.step, at.time, level, title, text, value, threshold)
        self._new.append(alert)

    def _loss_not_finite(self, step: Step, loss: float) -> None:
        # HB 3558: comes without a sign before it. Part of the loss's alert, so off with it.
        wrong = not math.isfinite(loss)
        if self._limits.loss_above_best and self._begins("loss_not_finite", wrong, not wrong):
            why = "`moekit why` says what became of the attempt; a NaN that another GPU gets too is no bad GPU's (3.6)"
            self._raise(step, "loss_not_finite", "error", f"lm loss is {loss}", why, loss, math.inf)

    def _loss_above_best(self, step: Step, loss: float) -> None:
        # HB 1919. Means of ten steps, and beyond ten times their noise: 0.1 is within a small batch's, and the best of
        # a million such means lies five times below them all.
        if not self._limits.loss_above_best or (found := self._loss.add(step.step, loss)) is None:
            return
        now, best, noise = found
        limit = best + max(self._limits.loss_above_best, 10 * noise)
        if self._begins("loss_above_best", now > limit, now < (best + limit) / 2):
            title = f"lm loss is {now:.3f}, {now - best:.3f} above its best"
            why = f"means of {_LOSS_WINDOW} logged steps; see z-loss, gradient norm and MaxVio before it (3.6)"
            self._raise(step, "loss_above_best", "warn", title, why, now, limit)

    def _aux_under_floor(self, step: Step, name: str, mean: float | None) -> None:
        # HB 932: even probabilities or even choices make it 1.
        floor, key = self.facts.aux_floor, f"{name}_under_floor"
        limit = floor - self._limits.aux_under_floor
        if not self._limits.aux_under_floor or mean is None or step.step < WARM_UP_STEPS or self.facts.forced:
            return
        if self._begins(key, mean < limit, mean > (limit + floor) / 2):
            why = "experts chosen most have the smaller mean probability: this loss does not even the load (3.3)"
            self._raise(step, key, "warn", f"{name} is {mean:.3f}, under its floor of {floor:.3g}", why, mean, limit)

    def _speed(self, step: Step, speed: float) -> None:
        # HB 864: what uneven load costs is the gap to the control with forced even routing.
        self._tflops.append(speed)
        control, limit = self.facts.control_tflops, self._limits.tflops_gap
        if not control or not limit or self.facts.forced or len(self._tflops) < _SPEED_WINDOW:
            return
        now = median(self._tflops)
        gap = 1 - now / control
        if self._begins("tflops_gap", gap > limit, gap < limit * 0.8):
            title = f"{now:.1f} TFLOP/s, {gap:.0%} under the control's {control:.1f}"
            why = "the busiest expert parallel rank sets the step's time; see MaxVio and rank imbalance (3.3)"
            self._raise(step, "tflops_gap", "warn", title, why, gap, limit)

    def _norm(self, step: Step, name: str, value: float) -> None:
        # HB 1919: one expert running wild, or one that is dead, while the loss is flat.
        factor, high = self._limits.expert_norm, name.startswith(NORM_HIGH)
        if not factor or not math.isfinite(value) or step.step < WARM_UP_STEPS:
            return
        was = self._norms.setdefault(name, value)
        was = self._norms[name] = min(was, value) if high else max(was, value)
        limit = was * factor if high else was / factor
        begins, ends = (value > limit, value < limit / 2) if high else (value < limit, value > limit * 2)
        if self._begins(name, begins, ends):
            layer = name.removeprefix(NORM_HIGH if high else NORM_LOW).strip("_").replace("_", " ")
            which = f"{'largest' if high else 'smallest'} expert norm{' of ' if layer else ''}{layer}"
            why = f"it was {was:.3g}: {'an expert is running wild' if high else 'an expert is dying'} (3.6)"
            self._raise(step, name, "warn", f"{which} is {value:.3g} times the median", why, value, limit)

    def _socket(self, row: Derived) -> None:
        # HB 3549. On one node nothing goes through it.
        if self._limits.socket and self.facts.multi_node and self._begins("socket", bool(row.hosts), False):
            title = f"NCCL uses TCP sockets on {', '.join(row.hosts)}"
            why = "it found no plug-in for the fabric; `NCCL_DEBUG=INFO` says why, in train.log (2.2, 3.7)"
            self._raise(row, "socket", "error", title, why, len(row.hosts), 0)

    def _z_loss(self, row: Derived) -> None:
        # HB 3561: rises before a spike. Where a NaN comes and this was flat, it is something else.
        rms, rise = row.values.get(RMS_LOGSUMEXP), self._limits.z_loss_rise
        if rms is None or not rise or (found := self._z.add(row.step, rms)) is None or row.step < WARM_UP_STEPS:
            return
        now, lowest, _ = found
        if self._begins("z_loss_rise", now > lowest + rise, now < lowest + rise / 2):
            title = f"RMS logsumexp of the router is {now:.2f}, {now - lowest:.2f} above its lowest"
            why = f"mean of {_Z_WINDOW} steps; larger logits are rounded more coarsely: fp32 router, z-loss (3.1)"
            self._raise(row, "z_loss_rise", "warn", title, why, now, lowest + rise)

    def _router(self, row: Derived) -> None:
        if "router/max_vio" in row.values and row.step >= WARM_UP_STEPS and not self.facts.forced:
            self._dead(row)
            self._blind(row)

    def _blind(self, row: Derived) -> None:
        # HB 3542: the loss reads as even when the router's probabilities are flat, whatever the load.
        means = [mean for one in self._aux.values() if (mean := one.at(row.step)) is not None]
        limit, near = self._limits.max_vio, self._limits.aux_near_floor
        if not means or not limit or not near:
            return
        scope = "micro batch" if "micro batch" in self.facts.scopes else "global batch"
        vio = row.values["router/max_vio_micro" if scope == "micro batch" else "router/max_vio"]
        over = max(means) - self.facts.aux_floor
        self._uneven = self._uneven + 1 if over < near and vio > limit else 0
        if self._begins("aux_blind", self._uneven >= _UNEVEN_COUNTS, over > 1.2 * near or vio < 0.8 * limit):
            title = f"MaxVio is {vio:.2f} though the balancing loss is {max(means):.3f}"
            why = f"{scope}, mean of the layers; the loss does not see the load where probabilities are flat (3.3)"
            self._raise(row, "aux_blind", "warn", title, why, vio, limit)

    def _dead(self, row: Derived) -> None:
        # HB 1919: the loss does not show it. HB 3569: under an aux loss, the coefficient is too small.
        limit, longest = self._limits.dead_expert_counts, row.values["router/longest_dead"]
        if limit and self._begins("dead_expert", longest >= limit, longest < limit):
            dead = [one for one in row.dead if one.counts >= limit]
            names = ", ".join(f"{one.layer.replace('_', ' ')} expert {one.expert}" for one in dead[:3])
            why = f"no token in {longest:.0f} counted iterations in a row; balance more strongly (3.3)"
            more = " and others" if len(dead) > 3 else ""
            self._raise(row, "dead_expert", "warn", f"dead: {names}{more}", why, longest, limit)
