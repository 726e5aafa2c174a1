"""Timelines to shares of the step. Pure.

Every instant of the recording belongs to one family, so shares add up to 1: an instant that several share is computing
first, in the order of `FAMILIES`, then all-to-all, then other communication. What is left is idle. So all-to-all's
share is what is exposed: no kernel computes meanwhile, on whatever stream. The rest of it is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from moekit.profile.families import ALL_TO_ALL, FAMILIES, IDLE
from moekit.profile.intervals import NOTHING, Intervals, joined, length, own_time, union
from moekit.profile.timeline import Timeline


@dataclass(frozen=True)
class Stream:
    """One stream of a GPU, or one thread."""

    name: str
    busy_ns: dict[str, int]
    """By family, those that run in it."""


@dataclass(frozen=True)
class Shares:
    """Where the time of one rank's recording went, in nanoseconds."""

    name: str
    source: str
    on_cpu: bool
    steps: int | None
    whole_ns: int
    share_ns: dict[str, int]
    """By family and `idle`, adding up to `whole_ns`."""
    busy_ns: dict[str, int]
    """By family: how long it ran, whatever else ran."""
    streams: tuple[Stream, ...]
    unnamed_sends: int = 0
    skipped: int = 0

    @property
    def exposed_ns(self) -> int:
        """All-to-all while nothing computes."""
        return self.share_ns[ALL_TO_ALL]

    @property
    def hidden_ns(self) -> int:
        """All-to-all behind computing."""
        return self.busy_ns[ALL_TO_ALL] - self.exposed_ns


@dataclass(frozen=True)
class Waiting:
    """All-to-all's milliseconds a step, beside those under forced balance (handbook 3.7, HB 2153)."""

    all_to_all_ms: float
    balanced_ms: float
    step_ms: float
    balanced_step_ms: float

    @property
    def waiting_ms(self) -> float:
        """What forced balance takes away: waiting for the rank with most tokens."""
        return max(0.0, self.all_to_all_ms - self.balanced_ms)

    @property
    def moving_ms(self) -> float:
        """What it leaves: mostly the transfer itself."""
        return min(self.all_to_all_ms, self.balanced_ms)


def shares_of(timeline: Timeline) -> Shares:
    """Where one timeline's time went."""
    if timeline.on_cpu:
        return _of_operators(timeline)
    by_stream: dict[str, dict[str, int]] = {}
    by_family: dict[str, list[Intervals]] = {}
    for (stream, family), recorded in timeline.parts.items():
        merged = union(recorded)
        by_stream.setdefault(stream, {})[family] = length(merged)
        by_family.setdefault(family, []).append(merged)
    covered, share, busy = NOTHING, {}, {}
    for family in FAMILIES:
        own = joined(by_family.get(family, []))
        both = joined([covered, own])
        share[family], busy[family] = length(both) - length(covered), length(own)
        covered = both
    whole = timeline.window[1] - timeline.window[0]
    share[IDLE] = whole - length(covered)
    return _shares(timeline, whole, share, busy, by_stream)


def _of_operators(timeline: Timeline) -> Shares:
    """Of the thread that computes most: each operator's time without the operators that it calls."""
    threads: dict[str, list[tuple[str, Intervals]]] = {}
    for (thread, family), recorded in timeline.parts.items():
        threads.setdefault(thread, []).append((family, recorded))
    by_thread = {name: length(joined(recorded for _, recorded in parts)) for name, parts in threads.items()}
    training = max(by_thread, key=lambda name: by_thread[name])
    begin, end = timeline.window
    families = [family for family, _ in threads[training]]
    times = np.clip(np.concatenate([recorded for _, recorded in threads[training]]), begin, end)
    owners = np.repeat(np.arange(len(families)), [len(recorded) for _, recorded in threads[training]])
    own = own_time(times)
    busy = dict.fromkeys(FAMILIES, 0)
    for number, family in enumerate(families):
        busy[family] += int(own[owners == number].sum())
    share = {**busy, IDLE: end - begin - sum(busy.values())}
    return _shares(timeline, end - begin, share, busy, {training: {f: ns for f, ns in busy.items() if ns}})


def _shares(
    timeline: Timeline, whole: int, share: dict[str, int], busy: dict[str, int], streams: dict[str, dict[str, int]]
) -> Shares:
    found = sorted((Stream(name, times) for name, times in streams.items()), key=lambda one: -sum(one.busy_ns.values()))
    return Shares(
        timeline.name,
        timeline.source,
        timeline.on_cpu,
        timeline.steps,
        whole,
        share,
        busy,
        tuple(found),
        timeline.unnamed_sends,
        timeline.skipped,
    )


def part(ranks: Sequence[Shares], family: str) -> float:
    """The share of a family, or of `idle`, in the recordings of all ranks together."""
    return sum(rank.share_ns[family] for rank in ranks) / (sum(rank.whole_ns for rank in ranks) or 1)


def waiting(ranks: Sequence[Shares], balanced: Sequence[Shares]) -> Waiting | None:
    """All-to-all of a step beside that under forced balance, mean of ranks; None where steps were not counted."""

    def per_step_ms(those: Sequence[Shares], all_to_all: bool) -> float:
        times = [(one.busy_ns[ALL_TO_ALL] if all_to_all else one.whole_ns) / (one.steps or 1) for one in those]
        return sum(times) / len(times) / 1e6

    if not all(one.steps for one in (*ranks, *balanced)):
        return None
    return Waiting(
        per_step_ms(ranks, True), per_step_ms(balanced, True), per_step_ms(ranks, False), per_step_ms(balanced, False)
    )


def last_to_arrive(ranks: Sequence[Shares]) -> tuple[Shares, float] | None:
    """The GPU rank that is least in all-to-all, with the ranks' median in nanoseconds: who comes last never waits.

    None where ranks differ by less than a tenth of the median, or fewer than two were recorded.
    """
    if len(ranks) < 2 or any(rank.on_cpu for rank in ranks):
        return None
    usual = median(rank.busy_ns[ALL_TO_ALL] for rank in ranks)
    least = min(ranks, key=lambda rank: rank.busy_ns[ALL_TO_ALL])
    return (least, usual) if least.busy_ns[ALL_TO_ALL] < 0.9 * usual else None
