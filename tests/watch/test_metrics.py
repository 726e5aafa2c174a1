"""Metrics of runs that were killed, resumed and are still going on."""

import json
import math
from pathlib import Path
from typing import Any

from moekit.watch.metrics import MetricsReader, attempts, history


def log(run: Path, attempt: int, *records: dict[str, Any] | str) -> None:
    folder = run / "attempts" / str(attempt)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for record in records:
            file.write(record if isinstance(record, str) else json.dumps(record) + "\n")


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {"step": number, "time": 100.0 + number, "metrics": metrics}


def test_steps_come_once_and_half_lines_wait(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path)
    assert reader.poll() == []
    line = json.dumps(step(2, loss=7.0)) + "\n"
    log(tmp_path, 1, step(1, loss=8.0), line[:15])
    assert [(s.step, dict(s.metrics)) for s in reader.poll()] == [(1, {"loss": 8.0})]
    assert reader.poll() == []
    log(tmp_path, 1, line[15:])
    assert [(s.attempt, s.step, s.time) for s in reader.poll()] == [(1, 2, 102.0)]


def test_attempts_in_numeric_order_and_later_ones_win(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path)
    log(tmp_path, 1, step(1, loss=8.0), step(2, loss=7.0, validation=7.5), step(3, loss=6.0), '{"step": 4, "ti')
    assert len(reader.poll()) == 3
    log(tmp_path, 10, step(3, loss=5.0), step(4, loss=4.0))
    log(tmp_path, 2, step(2, loss=6.9))
    assert [(s.attempt, s.step) for s in reader.poll()] == [(2, 2), (10, 3), (10, 4)]
    assert attempts(tmp_path) == [1, 2, 10]
    assert history(tmp_path) == {
        1: {"loss": 8.0},
        2: {"loss": 6.9, "validation": 7.5},
        3: {"loss": 5.0},
        4: {"loss": 4.0},
    }


def test_numbers_that_json_lacks_and_what_is_no_number(tmp_path: Path) -> None:
    log(tmp_path, 1, step(1, a="NaN", b="Infinity", c="-Infinity", d="text", e=None, f=3))
    metrics = history(tmp_path)[1]
    assert math.isnan(metrics.pop("a"))
    assert metrics == {"b": math.inf, "c": -math.inf, "f": 3}


def test_events(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path)
    log(tmp_path, 1, {"event": "config", "config": {"seed": 1, "lr": 2}, "time": 50.0}, step(1, loss=8.0))
    log(tmp_path, 2, {"event": "config", "config": {"seed": 3}, "time": 60.0})
    log(tmp_path, 2, {"event": "config", "config": {"slurm_job_name": "x"}, "time": 61.0})
    log(tmp_path, 2, {"event": "finish", "time": 70.0}, "[1]\n", '{"half{"step": 9}\n')
    assert [s.step for s in reader.poll()] == [1]
    assert reader.config == {"seed": 3, "slurm_job_name": "x"}
    assert reader.configs[1] == {"seed": 1, "lr": 2}
    assert reader.spans == {1: (50.0, 101.0), 2: (60.0, 70.0)}
    assert reader.finished == {2}
