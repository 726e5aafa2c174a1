"""`moekit track` beside a real Slurm: through a requeue, until the run has ended."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from test_runs import Moekit, make_profile, moekit, run_of  # noqa: F401  # a fixture among them
from test_runs_requeue import launch, wait_for

pytest.importorskip("trackio")
pytestmark = pytest.mark.slurm

TRAINER = """#!/bin/bash
# In the place of Python: steps 1 to 12 and a failure, then 11 to 20.
folder=attempts/$MOEKIT_ATTEMPT
mkdir -p "$folder/exit"
reach() { for ((step = $1; step <= $2; step++)); do
    echo "{\\"step\\": $step, \\"time\\": 1.0, \\"metrics\\": {\\"lm loss\\": $MOEKIT_ATTEMPT}}"
    done >>"$folder/metrics.jsonl"; }
end() { for ((r = 0; r < 8; r++)); do
    echo "{\\"code\\": $1, \\"reason\\": \\"$2\\", \\"time\\": 1.0}" >"$folder/exit/rank$r.json"; done; exit "$1"; }
save() { mkdir -p checkpoints; cp -r ../../complete "checkpoints/$(printf iter_%07d "$1")"
    echo "$1" >checkpoints/latest_checkpointed_iteration.txt; }
if [[ $MOEKIT_ATTEMPT = 1 ]]; then save 10; reach 1 12; end 1 "RuntimeError: once"; fi
until [[ -e go ]]; do sleep 0.1; done
reach 11 20; save 4768; end 0
"""


@pytest.fixture
def profile(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = make_profile(slurm, "track", TRAINER)
    monkeypatch.setenv("MOEKIT_PROFILE", str(path))
    return path


def test_a_run_that_comes_back_is_followed_to_its_end(slurm: Cluster, moekit: Moekit, tmp_path: Path) -> None:  # noqa: F811
    launch(moekit, tmp_path, "tracked")
    words = [sys.executable, "-m", "moekit", "track", "tracked", "--interval-s", "1"]
    env = {**os.environ, "TRACKIO_STORAGE_MODE": "sqlite"}
    tracker = subprocess.Popen(
        words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    run = run_of(slurm, "tracked").path
    wait_for(run / "attempts" / "2", timeout_s=120)
    assert tracker.poll() is None, "it does not wait for the next attempt"
    (run / "go").touch()
    said, _ = tracker.communicate(timeout=180)
    assert tracker.returncode == 0, said
    assert said.splitlines()[-1] == "tracked: ended, all of it is in Trackio"
    with sqlite3.connect(slurm.shared_root / "trackio" / "moekit.db") as connection:
        query = (
            "SELECT step, json_extract(metrics, '$.\"lm loss\"') FROM metrics WHERE run_name = 'tracked' ORDER BY step"
        )
        found = connection.execute(query).fetchall()
    assert found == [(step, 1 if step <= 10 else 2) for step in range(1, 21)]
