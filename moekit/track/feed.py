"""One run on its way into Trackio: what its files tell becomes rows, each with an id that is always the same.

A metric row's id is made of run, attempt and its number among the attempt's; a router row's and an alert's of run,
attempt, step and kind. So a pass that was killed anywhere can be made again. `track.json` in the run directory only
spares the next follower the work: it is written after Trackio has the rows.

Of a step that several attempts trained, the last one's values are shown. A new attempt's first step is found before any
of its rows are sent; from there on, what earlier attempts logged is deleted in Trackio, or not sent if it was not yet.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moekit.track.machine import machine_metrics, machine_refusal
from moekit.track.storage import Row, Storage, row_id, time_stamp
from moekit.watch.alerting import Setting
from moekit.watch.derive import Derived, Deriver, losses_of
from moekit.watch.facts import Facts
from moekit.watch.health import Alert, Health
from moekit.watch.metrics import MetricsReader, Step, attempts

STATE = "track.json"
"""In the run directory: where the metrics went, and how far that is."""
_AT_ONCE = 2000
_LATE_STEPS = 1000
"""How far behind the last one counts may still come; those before are not sent again."""
MISSING = "router/missing_ranks"
_IDS = uuid.UUID("6d6f656b-6974-4d61-8f52-756e526f7773")


class Feed:
    """What of a run is not in Trackio yet, and is sent; in constant memory, however long the run.

    Args:
        run_dir: `<shared_root>/runs/<name>`.
        name: the run's name in Trackio, unique in the project; the run directory's where None.
        remembers: whether `track.json` is read and written. Without, all is sent again.
    """

    _last: str
    """The id of the last metric row that was sent; empty if none was, or where a later attempt may have deleted it."""
    _complete: dict[str, int] | None

    def __init__(self, run_dir: Path, storage: Storage, name: str | None = None, remembers: bool = True) -> None:
        self.run_dir = run_dir.resolve()
        self._storage = storage
        self._name = name or self.run_dir.name
        self._to = {"trackio_dir": str(storage.trackio_dir), "project": storage.project, "run": self._name}
        self._run_id = uuid.uuid5(_IDS, f"{storage.project}/{self._name}").hex
        self._state = self.run_dir / STATE if remembers else None
        self._begin(self._read_state())

    def send_all(self) -> None:
        """Send everything that Trackio does not have yet."""
        while self.send_some():
            pass

    def send_some(self) -> bool:
        """Send some of what is new; whether there was any. Raises what Trackio and the file system raise."""
        if self._last and not self._storage.has(self._last):
            self._begin({})  # Trackio's data are gone: all of it again
        steps = self._metrics.poll(_AT_ONCE)
        derived = self._derive(steps)
        alerts = self._health.take(steps, derived)
        rows = [*self._find_attempts(steps), *self._metric_rows(steps), *self._derived_rows(derived)]
        rows += map(self._alert, alerts)
        if rows:
            self._storage.send(self._with_config(rows))
            self._last = next((row["log_id"] for row in reversed(rows) if row["kind"] == "metric"), self._last)
            self._write_state()
        return bool(steps or derived)

    @property
    def is_complete(self) -> bool:
        """Whether all there is was sent, as `complete` noted, and nothing has come since."""
        return self._complete == self._sizes() and (self.is_empty or self._storage.has(self._last))

    @property
    def is_empty(self) -> bool:
        """Whether the run has logged nothing so far."""
        return not self._first_steps

    def complete(self) -> None:
        """Note that all there is was sent: the run has ended."""
        self._complete = self._sizes()
        self._write_state()

    def _sizes(self) -> dict[str, int]:
        """The bytes of metrics of each attempt."""
        files = {number: self.run_dir / "attempts" / str(number) / "metrics.jsonl" for number in attempts(self.run_dir)}
        return {str(number): file.stat().st_size for number, file in files.items() if file.exists()}

    def _begin(self, state: dict[str, Any]) -> None:
        """Read the run from its beginning, and send what comes after `state`."""
        self._metrics = MetricsReader(self.run_dir)
        self._config_sent: dict[str, Any] = {}
        self._seen: dict[int, int] = {}  # records of each attempt, up to where it is read
        self._sent_records = {int(attempt): number for attempt, number in state.get("records", {}).items()}
        self._first_steps = {int(attempt): step for attempt, step in state.get("first_steps", {}).items()}
        self._last = state.get("last", "")
        self._complete = state.get("complete")
        self._sent_derived = {int(attempt): step for attempt, step in state.get("derived", {}).items()}
        self._deriver = Deriver(self.run_dir, self._metrics)
        self._setting = Setting(self.run_dir)
        self._health = Health(self._setting.thresholds, Facts())
        self._refused = ""
        self._told: set[int] = set()

    def _find_attempts(self, steps: Iterable[Step]) -> list[Row]:
        """Make way for attempts that are new: their first steps are known from here on; an alert for each."""
        rows = []
        new = set(attempts(self.run_dir)) | {step.attempt for step in steps}
        for attempt in sorted(new - self._first_steps.keys()):
            if (first := _first_step(self.run_dir, attempt)) is None:
                rows += self._refused_nodes(attempt)
                continue
            self._storage.forget(self._run_id, attempt, first.step)
            self._last = ""  # it may be among them
            if self._first_steps:
                rows.append(self._resumed(first))
            self._first_steps[attempt] = first.step
            if measured := machine_metrics(self.run_dir / "attempts" / str(attempt)):
                rows.append(self._row(attempt, "machine", first.step, first.time, measured))
        return rows

    def _refused_nodes(self, attempt: int) -> list[Row]:
        """An alert for an attempt that never trained, since its nodes were not fit; once."""
        sentence, step, at = machine_refusal(self.run_dir / "attempts" / str(attempt))
        if not sentence or attempt in self._told:
            return []
        self._told.add(attempt)
        identity = {"kind": "alert", "alert_id": row_id(self._run_id, attempt, "refused")}
        words = {"title": f"attempt {attempt} was refused its nodes", "text": sentence, "level": "warn"}
        return [{**identity, **self._place(step, at), **words}]

    def _counts(self, attempt: int, step: int) -> bool:
        """Whether no later attempt trained the step again."""
        return all(step < first for later, first in self._first_steps.items() if later > attempt)

    def _metric_rows(self, steps: Iterable[Step]) -> list[Row]:
        rows = []
        for step in steps:
            number = self._seen[step.attempt] = self._seen.get(step.attempt, 0) + 1
            if number <= self._sent_records.get(step.attempt, 0):
                continue
            self._sent_records[step.attempt] = number
            if self._counts(step.attempt, step.step):
                losses = losses_of(step)
                metrics = {**step.metrics, **(losses.values if losses else {})}
                rows.append(self._row(step.attempt, f"m{number:010}", step.step, step.time, metrics))
        return rows

    def _derive(self, steps: list[Step]) -> list[Derived]:
        """What the side step makes of them and of the counts; why there is nothing of the router is said once."""
        derived = self._deriver.derive(steps, _AT_ONCE)
        if self._deriver.refused and not self._refused:
            print(f"{self._name}: {self._deriver.refused}", file=sys.stderr, flush=True)
        self._refused = self._deriver.refused
        if steps:
            self._health.facts = self._setting.facts(self._metrics.config)
        return derived

    def _derived_rows(self, derived: Iterable[Derived]) -> list[Row]:
        """Those of the router; what follows from the losses stands beside them (`_metric_rows`)."""
        rows = []
        for one in derived:
            attempt = max(one.attempt, 1)
            sent = self._sent_derived.get(attempt, 0)
            if one.kind != "router" or not self._counts(attempt, one.step) or one.step < sent - _LATE_STEPS:
                continue
            self._sent_derived[attempt] = max(sent, one.step)
            # Counts that lack a rank come again, should they become whole.
            rest = f"r{one.step:010}{'.missing' if MISSING in one.values else ''}"
            rows.append(self._row(attempt, rest, one.step, one.time, one.values))
        return rows

    def _alert(self, alert: Alert) -> Row:
        identity = {"kind": "alert", "alert_id": row_id(self._run_id, alert.attempt, f"{alert.key}.{alert.step}")}
        words = {"title": alert.title, "text": alert.text, "level": alert.level}
        return {**identity, **self._place(alert.step, alert.time), **words}

    def _resumed(self, step: Step) -> Row:
        title = f"attempt {step.attempt} resumes at step {step.step}"
        text = "what earlier attempts logged from there on is not shown"
        identity = {"kind": "alert", "alert_id": row_id(self._run_id, step.attempt, "resumed")}
        return {**identity, **self._place(step.step, step.time), "title": title, "text": text, "level": "info"}

    def _row(self, attempt: int, rest: str, step: int, at: float, metrics: Mapping[str, float]) -> Row:
        identity = {"kind": "metric", "log_id": row_id(self._run_id, attempt, rest)}
        return {**identity, **self._place(step, at), "metrics": dict(metrics)}

    def _place(self, step: int, at: float) -> Row:
        names = {"project": self._to["project"], "run": self._name, "run_id": self._run_id}
        return {**names, "step": step, "timestamp": time_stamp(at)}

    def _with_config(self, rows: list[Row]) -> list[Row]:
        """`rows`, with Megatron's arguments on the first metric where Trackio was not told them yet."""
        first = next((row for row in rows if row["kind"] == "metric"), None)
        if first is None or self._metrics.config == self._config_sent:
            return rows
        self._config_sent = dict(self._metrics.config)
        begun, _ = self._metrics.spans[min(self._metrics.spans)]
        group = _group(self.run_dir) or self._to["project"]
        ours = {"_Created": time_stamp(begun), "_Group": group, "_Username": None}
        config = {key.lstrip("_"): value for key, value in self._config_sent.items()} | ours  # `_` is Trackio's own
        return [{**row, "config": config} if row is first else row for row in rows]

    def _read_state(self) -> dict[str, Any]:
        """What was sent; nothing where it was sent elsewhere, or cannot be read."""
        try:
            state: dict[str, Any] = json.loads(self._state.read_text()) if self._state else {}
        except (FileNotFoundError, ValueError):
            return {}
        return state if state.get("to") == self._to else {}

    def _write_state(self) -> None:
        if self._state is None:
            return
        state = {
            "to": self._to,
            "first_steps": self._first_steps,
            "records": self._sent_records,
            "derived": self._sent_derived,
            "last": self._last,
            "complete": self._complete,
        }
        temporary = self.run_dir / f"{STATE}.{os.getpid()}"
        temporary.write_text(json.dumps(state, indent=1) + "\n")
        temporary.replace(self._state)


def _first_step(run_dir: Path, attempt: int) -> Step | None:
    """The first step that an attempt logged."""
    return next(MetricsReader(run_dir)._read(attempt), None)


def _group(run_dir: Path) -> str | None:
    """The sweep that a run belongs to, as its provenance says: Trackio shows its runs together."""
    try:
        group: str | None = json.loads((run_dir / "provenance.json").read_text(encoding="utf-8")).get("group")
    except (OSError, ValueError):
        return None
    return group
