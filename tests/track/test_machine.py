"""What preflight measured, in Trackio beside the run that trained on it."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trackio")

from test_follower import config, follow_once, log, rows, run_dir, step

VERDICT = {"across": 76.0, "share": 0.985, "inside": {"n1": 331.0, "n2": 329.5}, "allreduce": 398.52}


def alerts(run: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(run.parents[1] / "trackio" / "demo.db") as connection:
        return connection.execute("SELECT title, text, level, step FROM alerts ORDER BY step, title").fetchall()


def test_bandwidths_stand_at_the_attempts_first_step(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    (run / "attempts/1/preflight").mkdir(parents=True)
    (run / "attempts/1/preflight/verdict.json").write_text(json.dumps(VERDICT))
    log(run, 1, config(), step(1), step(2))
    follow_once(run)
    follow_once(run)
    measured = [(number, metrics) for _, number, metrics in rows(run) if "machine/alltoall_gb_s" in metrics]
    assert measured == [
        (
            1,
            {
                "machine/alltoall_gb_s": 76.0,
                "machine/alltoall_share_of_baseline": 0.985,
                "machine/alltoall_inside_gb_s": 329.5,
                "machine/allreduce_gb_s": 398.52,
            },
        )
    ]


def test_refused_nodes_are_an_alert(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    (run / "attempts/1").mkdir(parents=True)
    (run / "attempts/1/refused.json").write_text('{"sentence": "preflight: n3: slow", "bad": {"n3": "slow"}}')
    (run / "attempts/1/decision.json").write_text('{"step": 0, "time": 1800000000.0}')
    log(run, 2, config(), step(1))
    follow_once(run)
    follow_once(run)
    assert alerts(run) == [("attempt 1 was refused its nodes", "preflight: n3: slow", "warn", 0)]
    assert [number for _, number, _ in rows(run)] == [1]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"across": null, "inside": {}}'])
def test_a_damaged_verdict_is_none(tmp_path: Path, text: str) -> None:
    from moekit.track.machine import machine_metrics

    (tmp_path / "preflight").mkdir()
    (tmp_path / "preflight" / "verdict.json").write_text(text)
    assert machine_metrics(tmp_path) == {}
