"""The metrics of a run, from `attempts/N/metrics.jsonl`: what Megatron logged, one line a step.

The writer is `moekit/job/wandb_face.py` on the last rank. Steps are Megatron's iterations, counted from 1. Lines that a
killed process left half written are passed over; those still being written wait.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from moekit.job.hooks import end_iteration
from moekit.watch.rankfile import Tail

LOSS = "lm loss"
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass(frozen=True)
class Step:
    """What was logged at one step of one attempt; a step may come in several lines, each with other metrics."""

    attempt: int
    step: int
    time: float
    """Seconds since the epoch."""
    metrics: Mapping[str, float]


def attempts(run_dir: Path) -> list[int]:
    """The attempts of a run that have a folder, in order."""
    return sorted(int(path.name) for path in (run_dir / "attempts").glob("*") if path.name.isdecimal())


class MetricsReader:
    """Follows a run's metrics over all its attempts, also those that begin later.

    What `poll` has come across so far is kept by attempt: `configs`, Megatron's arguments; `spans`, the first and the
    last time of any line, in seconds since the epoch; `finished`, the attempts whose training ended by itself.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._tails: dict[int, Tail] = {}
        self.configs: dict[int, dict[str, Any]] = {}
        self.spans: dict[int, tuple[float, float]] = {}
        self.finished: set[int] = set()

    @property
    def config(self) -> dict[str, Any]:
        """Megatron's arguments in the newest attempt that told them, empty if none did."""
        return self.configs[max(self.configs)] if self.configs else {}

    def poll(self, limit: int | None = None) -> list[Step]:
        """The steps written since the last call, by attempt and then as written: a later one of the same step wins.

        With `limit`, at most so many; the next call goes on.
        """
        return list(islice((step for attempt in attempts(self._run_dir) for step in self._read(attempt)), limit))

    def _read(self, attempt: int) -> Iterator[Step]:
        path = self._run_dir / "attempts" / str(attempt) / "metrics.jsonl"
        for line in self._tails.setdefault(attempt, Tail(path)).lines():
            if (record := _record(line)) is None:
                continue
            if (time := record.get("time")) is not None:
                self.spans[attempt] = (self.spans.get(attempt, (time, time))[0], time)
            if record.get("event") == "config":
                self.configs.setdefault(attempt, {}).update(record["config"])
            elif record.get("event") == "finish":
                self.finished.add(attempt)
            elif "step" in record:
                yield Step(attempt, int(record["step"]), float(record["time"]), _numbers(record["metrics"]))


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode())
    except ValueError:  # half a line of a process that was killed, with another's first one behind it
        return None
    return record if isinstance(record, dict) else None


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, with `NaN` and the infinities as floats again."""
    return {
        name: number
        for name, value in metrics.items()
        if isinstance(number := _NOT_FINITE.get(value) if isinstance(value, str) else value, (float, int))
    }


def history(run_dir: Path) -> dict[int, dict[str, float]]:
    """All metrics by step, in step order; where attempts repeat a step, what the later one logged counts."""
    return merge(MetricsReader(run_dir).poll())


def merge(steps: list[Step]) -> dict[int, dict[str, float]]:
    """Metrics by step, in step order, later ones over earlier ones."""
    merged: dict[int, dict[str, float]] = {}
    for step in steps:
        merged.setdefault(step.step, {}).update(step.metrics)
    return dict(sorted(merged.items()))


def last_step(steps: Iterable[Step], attempt: int) -> int:
    """The last step that an attempt came to, as far as it logged them; 0 if none."""
    return max((step.step for step in steps if step.attempt == attempt), default=0)


def at_end(last_step: int, total_steps: int, exit_interval: int | None, log_interval: int | None) -> bool:
    """Whether the last step that was logged is the last of a training, or of one that `exit_interval` ends."""
    end = end_iteration(max(last_step - 1, 0), total_steps, exit_interval)
    return last_step > max(0, end - (log_interval or 1))
