"""The side step: what a run's files say of its router beyond what Megatron logs, worked out while the run goes.

Names, as Trackio shows them, with their scopes (handbook 3.3, A.1; one scope's mean is never taken for another's):

    router/max_vio          MaxVio of the global batch: counts of all replicas and micro batches are added up first
    router/max_vio_micro    MaxVio of each micro batch of each expert parallel group, the mean over those
    router/rank_imbalance   tokens of the busiest expert parallel rank over the mean rank's, global batch; 1 is even
        each the mean over the MoE layers; for one layer, `_layer_3` or `_mtp_0_layer_0` is behind the name
    router/max_vio_gap      the second less the first: uneven in each micro batch, even over all (HB 1179)
    router/busiest_rank     the expert parallel rank, from 0, that has most tokens of all layers
    router/dead_experts     experts without a token in the counted iteration, over all layers
    router/longest_dead     for how many counted iterations in a row the longest of them had none
    router/missing_ranks    ranks whose counts are not there; then nothing else is said of the iteration
    router/missing_layers   the same of layers that some rank has and another has not
    z_loss_rms_logsumexp    root of the z-loss, from which Megatron has divided its coefficient (router.py:699; HB 680)
    nccl/socket             nodes whose NCCL says at the attempt's start that it uses TCP

Dense layers have no counts and are absent. `facts.py` says in which scope a run's balancer works.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moekit.problems import MoekitError
from moekit.watch.counts import IntervalCounts, LayerKey, RankLayout, TokensPerExpertReader
from moekit.watch.evenness import dead_experts, max_vio, max_vio_micro, rank_imbalance, rank_loads
from moekit.watch.metrics import MetricsReader, Step
from moekit.watch.series import Series
from moekit.watch.transport import socket_hosts

RMS_LOGSUMEXP = "z_loss_rms_logsumexp"
MOST_DEAD = 8
"""Of dead experts, so many are named: those that are longest."""


@dataclass(frozen=True)
class DeadExpert:
    """An expert that received nothing."""

    layer: str
    expert: int
    counts: int
    """For how many counted iterations in a row."""


@dataclass(frozen=True)
class Derived:
    """What was worked out for one step of one attempt. A step has at most one of each `kind`."""

    attempt: int
    step: int
    time: float
    """Seconds since the epoch: when Megatron logged the step, or between the ones around it."""
    values: dict[str, float]
    """By the names above."""
    kind: Literal["router", "losses", "log"] = "router"
    dead: tuple[DeadExpert, ...] = ()
    """The longest of them, at most `MOST_DEAD`."""
    hosts: tuple[str, ...] = ()
    """Those of `nccl/socket`, at most 16."""


class Deriver:
    """Works through a run's files as they grow, in constant memory.

    `refused` says in a sentence why there is nothing of the router, empty where there is or where nothing is known yet.
    `since` is the step before which counts are left out, as those of attempts on other ranks; 0 where none are.
    """

    def __init__(self, run_dir: Path, reader: MetricsReader | None = None) -> None:
        """`reader`: that of a caller who reads the metrics anyway, and gives the steps to `derive`."""
        self._run_dir = run_dir
        self._reader = reader or MetricsReader(run_dir)
        self._layout: RankLayout | None = None
        self._counts: TokensPerExpertReader | None = None
        self._dead = _Dead()
        self._attempts = Attempts()
        self.refused = ""
        self.since = 0

    def poll(self) -> list[Derived]:
        """What is new and whole; of a long run that is long, so whoever has to be small calls `derive` with parts."""
        return self.derive(self._reader.poll())

    def derive(self, steps: Sequence[Step], limit: int | None = None) -> list[Derived]:
        """The same from steps that the caller has read: losses first, then counts, each in the order it was written.

        Where an attempt repeats steps, its rows come after the earlier attempt's. An iteration whose counts were given
        out before they were whole comes again. With `limit`, as the steps were read with, counts come once no more
        steps do, and at most about so many.
        """
        logs = [self._log(step) for step in steps if self._attempts.add(step)]
        losses = [losses_of(step) for step in steps]
        if limit is not None and len(steps) >= limit:  # counts wait: it is the steps that say whose they are
            return [*filter(None, logs), *filter(None, losses)]
        counts = {count.iteration: count for count in self._poll_counts(limit)}  # of one iteration the last holds
        return [*filter(None, logs), *filter(None, losses), *filter(None, map(self._router, counts.values()))]

    def _log(self, step: Step) -> Derived | None:
        """What an attempt printed before its first step."""
        hosts = socket_hosts(self._run_dir / "attempts" / str(step.attempt) / "train.log")
        values = {"nccl/socket": float(len(hosts))}
        return Derived(step.attempt, step.step, step.time, values, "log", hosts=hosts) if hosts else None

    def _poll_counts(self, limit: int | None) -> list[IntervalCounts]:
        try:
            if not self.refused:
                self._lay_out()
            return self._counts.poll(limit) if self._counts else []
        except MoekitError as refused:
            self.refused, self._counts = refused.problems[0].what, None
            return []

    def _lay_out(self) -> None:
        """Read the counts by the layout of the newest attempt, from the first attempt on that all have it."""
        of = {attempt: self._reader.configs.get(attempt) for attempt in self._attempts.firsts}
        layouts = {attempt: RankLayout.from_args(config) for attempt, config in of.items() if config}
        if not layouts or (layout := layouts[max(layouts)]) is None or layout == self._layout:
            return
        others = [attempt for attempt, other in layouts.items() if other != layout]
        since = min(attempt for attempt in layouts if attempt > max(others, default=0))
        self.since = self._attempts.firsts[since] if others else 0
        self._layout = layout
        folder = self._run_dir / "checkpoints" / "tokens_per_expert"
        self._counts = TokensPerExpertReader(folder, layout, self.since)

    def _router(self, counts: IntervalCounts) -> Derived | None:
        assert self._layout is not None
        assert self._counts is not None
        last = counts.restarts >= self._counts.restarts
        attempt = self._attempts.of(counts.iteration, counts.restarts, last)
        time = self._attempts.time(attempt, counts.iteration)
        if not counts.coverage.complete:
            missing = {
                "router/missing_ranks": float(len(counts.coverage.missing_ranks)),
                "router/missing_layers": float(len(counts.coverage.partial_layers)),
            }
            return Derived(attempt, counts.iteration, time, missing)
        dead = self._dead.take(counts)
        values = router_values(counts, self._layout)
        if not values:
            return None
        values["router/dead_experts"] = float(len(dead))
        values["router/longest_dead"] = float(max((one.counts for one in dead), default=0))
        longest = sorted(dead, key=lambda one: -one.counts)[:MOST_DEAD]
        return Derived(attempt, counts.iteration, time, values, dead=tuple(longest))


def losses_of(step: Step) -> Derived | None:
    """What follows from a step's losses alone; None where nothing does."""
    z_loss = step.metrics.get("z_loss")
    if z_loss is None or not 0 <= z_loss < math.inf:
        return None
    return Derived(step.attempt, step.step, step.time, {RMS_LOGSUMEXP: math.sqrt(z_loss)}, "losses")


def router_values(counts: IntervalCounts, layout: RankLayout) -> dict[str, float]:
    """MaxVio in both scopes and the ranks' load, from complete counts; layers that received nothing are left out."""
    values: dict[str, float] = {}
    micro = {key: max_vio_micro(peaks, layout.num_experts) for key, peaks in counts.microbatches.items()}
    of = {
        "router/max_vio": {key: max_vio(load) for key, load in counts.layers.items()},
        "router/max_vio_micro": micro,
        "router/rank_imbalance": {key: rank_imbalance(load, layout) for key, load in counts.layers.items()},
    }
    for name, by_layer in of.items():
        known = {key: value for key, value in by_layer.items() if value is not None}
        values |= {f"{name}_{key.name}": value for key, value in known.items()}
        if known:
            values[name] = sum(known.values()) / len(known)
    if "router/max_vio_micro" in values:
        values["router/max_vio_gap"] = values["router/max_vio_micro"] - values["router/max_vio"]
    ranks = [sum(column) for column in zip(*(rank_loads(load, layout) for load in counts.layers.values()), strict=True)]
    if any(ranks):
        values["router/busiest_rank"] = float(ranks.index(max(ranks)))
    return values


class _Dead:
    """For how many counted iterations in a row each expert has received nothing."""

    def __init__(self) -> None:
        self._rows: dict[LayerKey, list[int]] = {}
        self._at = 0

    def take(self, counts: IntervalCounts) -> list[DeadExpert]:
        """The experts without a token; a restart counts anew, so that no iteration counts twice."""
        if counts.iteration <= self._at:
            self._rows.clear()
        self._at = counts.iteration
        found = []
        for key, load in counts.layers.items():
            if not any(load):
                continue  # nothing was routed here: that says nothing of an expert
            rows = self._rows.setdefault(key, [0] * len(load))
            idle = set(dead_experts(load))
            self._rows[key] = [row + 1 if expert in idle else 0 for expert, row in enumerate(rows)]
            found += [DeadExpert(key.name, expert, self._rows[key][expert]) for expert in sorted(idle)]
        return found


class Attempts:
    """Which attempt wrote an iteration's counts, and when: the files that hold them are the same for all attempts."""

    def __init__(self) -> None:
        self.firsts: dict[int, int] = {}
        """The first step of each."""
        self._last: dict[int, int] = {}
        self._times: dict[int, Series] = {}
        self._at, self._restarts = 0, 0

    def add(self, step: Step) -> bool:
        """Whether it is the first step of its attempt."""
        first = step.attempt not in self.firsts
        self.firsts.setdefault(step.attempt, step.step)
        self._last[step.attempt] = step.step
        self._times.setdefault(step.attempt, Series()).add(step.step, step.time)
        return first

    def of(self, iteration: int, restarts: int, last: bool) -> int:
        """Whose it is, 0 where nobody has logged anything; `last` says that no attempt has gone back since."""
        newest = max(self.firsts, default=0)
        did = [
            attempt
            for attempt, first in sorted(self.firsts.items())
            if first <= iteration and (attempt == newest or iteration <= self._last[attempt])
        ]
        if last:
            self._at = did[-1] if did else newest
        else:
            since = self._at + (restarts > self._restarts)
            self._at = next((attempt for attempt in did if attempt >= since), newest)
        self._restarts = restarts
        return self._at

    def time(self, attempt: int, iteration: int) -> float:
        """From the steps around it, of which long runs keep only some."""
        return (self._times[attempt].at(iteration) if attempt in self._times else None) or 0.0


def flatten(rows: Iterable[Derived]) -> dict[int, dict[str, float]]:
    """All values by step, in step order; what a later row says counts."""
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        merged.setdefault(row.step, {}).update(row.values)
    return dict(sorted(merged.items()))
