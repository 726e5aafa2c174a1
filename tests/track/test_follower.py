"""The follower into the real Trackio: exactly once, through kills, restarts and everything that is half written."""

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trackio")

CONFIG = {
    "world_size": 2,
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "_is_global_batch_size_explicitly_specified": True,
}


def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "runs" / "small moe"
    path.mkdir(parents=True)
    return path


def log(run: Path, attempt: int, *records: dict[str, Any] | str) -> None:
    folder = run / "attempts" / str(attempt)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for record in records:
            file.write(record if isinstance(record, str) else json.dumps(record) + "\n")


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {"step": number, "time": 1.8e9 + number, "metrics": metrics or {"lm loss": 1 / number, "grad-norm": 0.5}}


def config(**changes: Any) -> dict[str, Any]:
    return {"event": "config", "config": CONFIG | changes, "time": 1.8e9}


def count(run: Path, iterations: range, busy: int = 3) -> None:
    folder = run / "checkpoints" / "tokens_per_expert"
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        with (folder / f"rank{rank}.jsonl").open("a") as file:
            for iteration in iterations:
                for layer in range(2):
                    tpe = [[busy, 1], [1, 1]] if layer else [[1, 1], [1, 1]]
                    record = {"iter": iteration, "block": "decoder", "layer": layer, "tpe": tpe}
                    file.write(json.dumps(record) + "\n")


def command(run: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "moekit.track.follower", str(run), "--project", "demo", *extra]


def environ(**extra: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRACKIO_", "HF_"))}
    return inherited | extra


def follow_once(run: Path, **extra: str) -> str:
    """A follower whose standard input is closed from the start: one pass, or two."""
    done = subprocess.run(
        command(run), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, env=environ(**extra)
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def rows(run: Path) -> list[tuple[str, int, dict[str, Any]]]:
    database = run.parents[1] / "trackio" / "demo.db"
    with sqlite3.connect(database) as connection:
        found = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step, id").fetchall()
    return [(name, number, json.loads(metrics)) for name, number, metrics in found]


def number_of_rows(run: Path) -> int:
    try:
        with sqlite3.connect(f"file:{run.parents[1]}/trackio/demo.db?mode=ro", uri=True) as connection:
            return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0])
    except sqlite3.OperationalError:  # not made yet, or only just
        return 0


def values(run: Path, metric: str) -> dict[int, Any]:
    found = [(number, metrics[metric]) for _, number, metrics in rows(run) if metric in metrics]
    assert len(found) == len(dict(found)), "a step that is there twice"
    return dict(found)


def test_metrics_and_max_vio_arrive_once(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(), *(step(i) for i in range(1, 21)), step(20, validation=2.0), {"event": "finish"})
    count(run, range(10, 21, 10))
    follow_once(run)
    follow_once(run)
    assert values(run, "lm loss") == {i: 1 / i for i in range(1, 21)}
    assert values(run, "validation") == {20: 2.0}
    assert values(run, "router/max_vio_layer_0") == {10: 0.0, 20: 0.0}
    assert values(run, "router/max_vio_layer_1") == pytest.approx({10: 1 / 3, 20: 1 / 3})
    assert values(run, "router/max_vio") == pytest.approx({10: 1 / 6, 20: 1 / 6})
    assert {name for name, _, _ in rows(run)} == {"small moe"}
    state = json.loads((run / "track.json").read_text())
    assert (state["records"], state["first_steps"]) == ({"1": 21}, {"1": 1})


def test_trackio_shows_one_run_with_its_config_and_its_times(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(), step(1), step(2, **{"lm loss": "NaN", "grad-norm": "Infinity"}))
    (run / "provenance.json").write_text('{"group": "a sweep"}')
    follow_once(run)
    script = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("demo")
logs = SQLiteStorage.get_logs("demo", run.name)
print(json.dumps({"name": run.name, "config": run.config, "logs": logs}))
"""
    environment = environ(TRACKIO_DIR=str(run.parents[1] / "trackio"))
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout.splitlines()[-1])
    assert told["name"] == "small moe"
    assert told["config"]["num_experts"] == 4
    assert told["config"]["_Group"] == "a sweep"
    assert told["config"]["is_global_batch_size_explicitly_specified"] is True
    first, second = told["logs"]
    assert first["timestamp"].startswith("2027-01-15T08:00:01")
    assert math.isnan(second["lm loss"])
    assert math.isinf(second["grad-norm"])


def test_a_resumed_attempt_adds_what_is_new(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(), *(step(i) for i in range(1, 31)), '{"step": 31, "time": 18000')
    follow_once(run)
    log(run, 2, config(), *(step(i, **{"lm loss": 100.0}) for i in range(21, 41)))
    follow_once(run)
    follow_once(run)
    assert values(run, "lm loss") == {i: 1 / i if i <= 20 else 100.0 for i in range(1, 41)}
    with sqlite3.connect(run.parents[1] / "trackio" / "demo.db") as connection:
        assert connection.execute("SELECT title, step, level FROM alerts ORDER BY step").fetchall() == [
            ("attempt 2 resumes at step 21", 21, "info"),
            ("lm loss is 100.000, 99.933 above its best", 40, "warn"),
        ]


def test_of_attempts_not_yet_sent_the_later_wins(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(), *(step(i) for i in range(1, 31)))
    log(run, 2, config(), *(step(i, **{"lm loss": 100.0}) for i in range(21, 41)))
    follow_once(run)
    assert values(run, "lm loss") == {i: 1 / i if i <= 20 else 100.0 for i in range(1, 41)}


@pytest.mark.parametrize("wait_for_rows", [0, 1, 5000])
def test_killed_midway_and_made_again(tmp_path: Path, wait_for_rows: int) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(), *(step(i) for i in range(1, 12001)))
    count(run, range(100, 12001, 100))
    follower = subprocess.Popen(command(run), stdin=subprocess.PIPE, env=environ())
    while number_of_rows(run) < wait_for_rows and follower.poll() is None:
        time.sleep(0.002)
    follower.send_signal(signal.SIGKILL)
    assert follower.wait() == -signal.SIGKILL
    assert wait_for_rows <= number_of_rows(run) < 12000, "the kill came too late to be one midway"
    follow_once(run)
    steps = Counter(number for _, number, metrics in rows(run) if "lm loss" in metrics)
    assert steps == dict.fromkeys(range(1, 12001), 1)
    assert set(values(run, "router/max_vio")) == set(range(100, 12001, 100))


def test_without_track_json_nothing_comes_twice(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(), *(step(i) for i in range(1, 11)))
    follow_once(run)
    (run / "track.json").unlink()
    follow_once(run)
    assert len(rows(run)) == 10


def test_trackios_data_gone_are_sent_again(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(), *(step(i) for i in range(1, 11)))
    follow_once(run)
    for file in (run.parents[1] / "trackio").glob("demo.*"):
        file.unlink()
    follow_once(run)
    assert len(rows(run)) == 10


def test_follows_until_the_parent_is_gone(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(), step(1))
    follower = subprocess.Popen(command(run, "--interval-s", "0.2"), stdin=subprocess.PIPE, env=environ())
    assert follower.stdin is not None
    deadline = time.monotonic() + 30
    while not (run / "track.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(rows(run)) == 1
    follower.send_signal(signal.SIGINT)
    log(run, 1, step(2))
    log(run, 2, config(), step(2), step(3))
    follower.stdin.close()
    assert follower.wait(30) == 0
    assert set(values(run, "lm loss")) == {1, 2, 3}


def test_start_and_stop(tmp_path: Path) -> None:
    from moekit.track import follower

    run = run_dir(tmp_path)
    log(run, 1, config(), step(1))
    process = follower.start(run, "demo")
    log(run, 1, step(2))
    assert follower.stop(process)
    assert set(values(run, "lm loss")) == {1, 2}
    assert (run / "track.log").exists()


STOPS = """
import signal, subprocess, sys
from pathlib import Path
from moekit.track import follower

signal.signal(signal.SIGINT, signal.default_int_handler)
slow = [sys.executable, "-c", "import sys, time; sys.stdin.read(); time.sleep(float(sys.argv[1]))", sys.argv[1]]
process = subprocess.Popen(slow, stdin=subprocess.PIPE, start_new_session=True)
print(process.pid, flush=True)
print(follower.stop(process, float(sys.argv[2])))
"""


@pytest.mark.parametrize(("takes_s", "timeout_s", "stopped"), [("1.5", "60", "True"), ("600", "1.5", "False")])
def test_ctrl_c_does_not_leave_a_follower_behind(takes_s: str, timeout_s: str, stopped: str) -> None:
    command = [sys.executable, "-c", STOPS, takes_s, timeout_s]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        for _ in range(5):
            time.sleep(0.2)
            caller.send_signal(signal.SIGINT)
        out, err = caller.communicate(timeout=60)
    assert (out, err, caller.returncode) == (f"{stopped}\n", "", 0)
    assert not Path("/proc", str(pid)).exists()


def test_network_file_systems_go_through_the_inbox(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(), *(step(i) for i in range(1, 11)))
    follow_once(run, TRACKIO_STORAGE_MODE="jsonl")
    (run / "track.json").unlink()
    follow_once(run, TRACKIO_STORAGE_MODE="jsonl")
    trackio_dir = run.parents[1] / "trackio"
    assert not (trackio_dir / "demo.db").exists()
    take_in = "from trackio import fragments; print(fragments.import_inbox_dir())"
    subprocess.run([sys.executable, "-c", take_in], check=True, timeout=60, env=environ(TRACKIO_DIR=str(trackio_dir)))
    assert len(rows(run)) == 10


def test_dense_and_pipelined_runs_have_no_router_rows(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(pipeline_model_parallel_size=2), step(10))
    count(run, range(10, 11))
    assert "cannot be told apart" in follow_once(run)
    assert len(rows(run)) == 1
    dense = run_dir(tmp_path / "dense")
    log(dense, 1, config(num_experts=None), step(10))
    count(dense, range(10, 11))
    assert follow_once(dense) == ""
    assert len(rows(dense)) == 1


def test_the_hub_is_not_asked(tmp_path: Path) -> None:
    """A hub that takes the connection and never answers, as a firewall may look; `trackio.init` would wait for it."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(0.1)
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        run = run_dir(tmp_path)
        log(run, 1, config(), step(1))
        follow_once(run, HF_ENDPOINT=endpoint, HF_TOKEN="hf_notatoken")
        with pytest.raises(TimeoutError):
            hub.accept()
    assert len(rows(run)) == 1


def test_refusals_are_messages(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    arguments = [sys.executable, "-m", "moekit.track.follower", str(run), "--project", "registry-x"]
    refused = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: Trackio has no project `registry-x`: ")
    missing = "import sys; sys.modules['trackio'] = None; from moekit.track.follower import main; sys.exit(main())"
    without = subprocess.run(
        [sys.executable, "-c", missing, str(run), "--project", "demo"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert without.returncode == 1
    assert without.stderr == "error: the dashboard needs trackio\n    hint: run `pip install 'moekit[track]'`\n"
