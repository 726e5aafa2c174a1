"""Feeds Trackio from a run's files, as a process of its own: neither training nor launch depends on Trackio's health.

    python -m moekit.track.follower RUN_DIR --project P [--name NAME] [--trackio-dir DIR] [--interval-s 10]

It follows until its standard input closes, which a dead parent's does too, makes a last pass and ends.

One Trackio run per moekit run, over all its attempts. Every row has an id made from run, step and kind, and Trackio
takes an id once (`track/storage.py`), so a pass that was killed anywhere can be made again. `track.json` in the run
directory only spares the next follower the work: it is written after Trackio has the rows.

A step that a resumed attempt repeats: where Trackio has none of it yet, the later attempt's values are sent; rows that
Trackio already has stay as they are, since it can only append. An alert marks the step from which an attempt resumed.
`metrics.jsonl` keeps both, and moekit's own views take the later one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moekit.problems import MoekitError, print_problems
from moekit.track.dashboard import trackio_dir as default_trackio_dir
from moekit.track.storage import Row, Storage, need_trackio, time_stamp
from moekit.watch.counts import IntervalCounts, RankLayout, TokensPerExpertReader, max_vio
from moekit.watch.metrics import MetricsReader, Step

STATE = "track.json"
"""In the run directory: where the metrics went, and the last step sent of each attempt and of the router's counts."""
_ROWS_AT_ONCE = 2000
_IDS = uuid.UUID("6d6f656b-6974-4d61-8f52-756e526f7773")


def follow_once(run_dir: Path, project: str, name: str | None = None, trackio_dir: Path | None = None) -> int:
    """Send everything that Trackio does not have yet; the number of rows sent.

    Args:
        run_dir: `<shared_root>/runs/<name>`.
        project: Trackio's project.
        name: the run's name in Trackio, unique in the project; the run directory's where None.
        trackio_dir: where Trackio keeps its data; `<shared_root>/trackio` where None. A process serves one.

    Raises:
        MoekitError: Trackio is not installed or refuses the project's name.
    """
    return _Follower(run_dir, project, name, trackio_dir).send_new()


def follow(
    run_dir: Path,
    project: str,
    name: str | None = None,
    trackio_dir: Path | None = None,
    *,
    stop: threading.Event,
    interval_s: float = 10.0,
) -> None:
    """Send what is new every `interval_s` seconds until `stop`, then a last time. Arguments as in `follow_once`.

    A pass that fails (a full disk, a locked database) is made again, from the last one that did not; the last raises.
    """
    follower = _Follower(run_dir, project, name, trackio_dir)
    while True:
        stopping = stop.is_set()
        try:
            follower.send_new()
        except MoekitError:
            raise
        except Exception as failure:
            if stopping:
                raise
            print(f"{type(failure).__name__}: {failure}; trying again", file=sys.stderr, flush=True)
            follower = _Follower(run_dir, project, name, trackio_dir)
        if stopping:
            return
        stop.wait(interval_s)


def start(run_dir: Path, project: str, name: str | None = None) -> subprocess.Popen[bytes]:
    """Start a follower's process, its messages in `<run>/track.log`; `stop` ends it, and so does the caller's own end.

    Raises:
        MoekitError: Trackio is not installed.
    """
    need_trackio()
    command = [sys.executable, "-m", "moekit.track.follower", str(run_dir), "--project", project]
    with (run_dir / "track.log").open("ab") as log:
        return subprocess.Popen(
            command if name is None else [*command, "--name", name],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is the caller's: the follower's last pass comes after it
        )


def stop(process: subprocess.Popen[bytes], timeout_s: float = 30.0) -> bool:
    """Let a started follower make its last pass; False if it failed or took longer and was killed.

    It is gone then, whatever the user types: Ctrl-C makes nothing faster here.
    """
    assert process.stdin is not None
    deadline = time.monotonic() + timeout_s
    while process.returncode is None:
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            process.stdin.close()
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return process.returncode == 0


class _Follower:
    """One run on its way into Trackio."""

    def __init__(self, run_dir: Path, project: str, name: str | None, trackio_dir: Path | None) -> None:
        self._run_dir = run_dir.resolve()
        trackio_dir = (trackio_dir or default_trackio_dir(run_dir)).resolve()
        self._to = {"trackio_dir": str(trackio_dir), "project": project, "run": name or self._run_dir.name}
        self._run_id = uuid.uuid5(_IDS, f"{project}/{self._to['run']}").hex
        self._storage = Storage(trackio_dir, project)
        self._metrics = MetricsReader(self._run_dir)
        self._config_sent: dict[str, Any] = {}
        self._counts: TokensPerExpertReader | None = None
        self._counts_refused = False
        self._lines: dict[tuple[int, int], int] = {}  # of (attempt, step), how many so far, from 0
        self._first_steps: dict[int, int] = {}
        self._times: dict[int, float] = {}
        self._sent_steps, self._sent_router = self._read_state()

    def send_new(self) -> int:
        """One pass: read what is new, give it to Trackio, note it; the number of rows."""
        rows = [*self._metric_rows(self._metrics.poll()), *self._router_rows(self._poll_counts())]
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            self._storage.send(self._with_config(rows[first : first + _ROWS_AT_ONCE]))
        if rows:
            self._write_state()
        return len(rows)

    def _metric_rows(self, steps: Iterable[Step]) -> list[Row]:
        """A row for each line that was not sent before; of lines with one id, that of the later attempt."""
        rows: dict[str, Row] = {}
        for step in steps:
            self._times[step.step] = step.time
            place = (step.attempt, step.step)
            number = self._lines[place] = self._lines.get(place, -1) + 1  # a step may be logged in several lines
            if step.attempt not in self._first_steps:
                self._first_steps[step.attempt] = step.step
                if len(self._first_steps) > 1 and step.attempt not in self._sent_steps:
                    rows[f"resumed/{step.attempt}"] = self._resumed(step)
            if step.step >= self._sent_steps.get(step.attempt, 0):
                key = f"{step.step}/{number}"
                rows[key] = self._row(key, step.step, step.time, dict(step.metrics))
                self._sent_steps[step.attempt] = step.step
        return list(rows.values())

    def _poll_counts(self) -> list[IntervalCounts]:
        """The counts that are new; none of a dense run, nor of one whose counts cannot be read, which is said once."""
        try:
            if self._counts is None and not self._counts_refused:
                layout = RankLayout.from_args(self._metrics.config)
                if layout is not None:
                    folder = self._run_dir / "checkpoints" / "tokens_per_expert"
                    self._counts = TokensPerExpertReader(folder, layout)
            return self._counts.poll() if self._counts is not None else []
        except MoekitError as refused:
            print_problems(refused.problems)
            self._counts, self._counts_refused = None, True
            return []

    def _router_rows(self, intervals: Iterable[IntervalCounts]) -> list[Row]:
        """A row of MaxVio by layer, and their mean, for each interval that is complete."""
        rows = []
        for interval in intervals:
            if interval.iteration <= self._sent_router or not interval.coverage.complete:
                continue
            found = {f"router/max_vio_{key.name}": max_vio(counts) for key, counts in interval.layers.items()}
            values = {name: vio for name, vio in found.items() if vio is not None}
            if values:
                values["router/max_vio"] = sum(values.values()) / len(values)
                at = self._times.get(interval.iteration, time.time())
                rows.append(self._row(f"{interval.iteration}/router", interval.iteration, at, values))
                self._sent_router = interval.iteration
        return rows

    def _resumed(self, step: Step) -> Row:
        title = f"attempt {step.attempt} resumes at step {step.step}"
        text = "steps that are here already stay as the earlier attempt logged them"
        identity = {"kind": "alert", "alert_id": self._id(f"resumed/{step.attempt}")}
        return {**identity, **self._place(step.step, step.time), "title": title, "text": text, "level": "info"}

    def _row(self, key: str, step: int, at: float, metrics: dict[str, float]) -> Row:
        return {"kind": "metric", "log_id": self._id(key), **self._place(step, at), "metrics": metrics}

    def _place(self, step: int, at: float) -> Row:
        names = {"project": self._to["project"], "run": self._to["run"], "run_id": self._run_id}
        return {**names, "step": step, "timestamp": time_stamp(at)}

    def _id(self, key: str) -> str:
        return uuid.uuid5(_IDS, f"{self._run_id}/{key}").hex

    def _with_config(self, rows: list[Row]) -> list[Row]:
        """`rows`, with Megatron's arguments on the first metric where Trackio was not told them yet."""
        first = next((row for row in rows if row["kind"] == "metric"), None)
        if first is None or self._metrics.config == self._config_sent:
            return rows
        self._config_sent = dict(self._metrics.config)
        begun, _ = self._metrics.spans[min(self._metrics.spans)]
        group = _group(self._run_dir) or self._to["project"]
        ours = {"_Created": time_stamp(begun), "_Group": group, "_Username": None}
        config = {key.lstrip("_"): value for key, value in self._config_sent.items()} | ours  # `_` is Trackio's own
        return [{**row, "config": config} if row is first else row for row in rows]

    def _read_state(self) -> tuple[dict[int, int], int]:
        """What was sent; nothing where it was sent elsewhere, or where Trackio's data are gone."""
        try:
            state = json.loads((self._run_dir / STATE).read_text())
        except FileNotFoundError:
            return {}, 0
        if state["to"] != self._to or not self._storage.has_data():
            return {}, 0
        return {int(attempt): step for attempt, step in state["steps"].items()}, state["router"]

    def _write_state(self) -> None:
        temporary = self._run_dir / f"{STATE}.{os.getpid()}"
        state = {"to": self._to, "steps": self._sent_steps, "router": self._sent_router}
        temporary.write_text(json.dumps(state, indent=1) + "\n")
        temporary.replace(self._run_dir / STATE)


def _group(run_dir: Path) -> str | None:
    """The sweep that a run belongs to, as its provenance says: Trackio shows its runs together."""
    try:
        group: str | None = json.loads((run_dir / "provenance.json").read_text(encoding="utf-8")).get("group")
    except (OSError, ValueError):
        return None
    return group


def main() -> int:
    """Follow until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m moekit.track.follower")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--project", required=True)
    parser.add_argument("--name")
    parser.add_argument("--trackio-dir", type=Path)
    parser.add_argument("--interval-s", type=float, default=10.0)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent; its last metrics still come
    closed = threading.Event()

    def wait_for_parent() -> None:
        while sys.stdin.buffer.read(1024):
            pass
        closed.set()

    threading.Thread(target=wait_for_parent, daemon=True).start()
    try:
        follow(
            options.run_dir,
            options.project,
            options.name,
            options.trackio_dir,
            stop=closed,
            interval_s=options.interval_s,
        )
    except MoekitError as refused:
        print_problems(refused.problems)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
