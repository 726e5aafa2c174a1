"""`moekit track`, as typed, on runs of this machine; and what a Space's hub may do to it."""

import fcntl
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_follower import config, environ, log, step

from moekit.track.space import SpaceCopy, need_token

pytest.importorskip("trackio")


def make(folder: Path, name: str, steps: int = 10) -> Path:
    """A run of this machine."""
    run = folder / "moekit-local" / "runs" / name
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("summary: tiny\n")
    log(run, 1, config(num_experts=None), *(step(i) for i in range(1, steps + 1)))
    return run


def moekit(folder: Path, *words: str, **extra: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "moekit", *words],
        cwd=folder,
        env=clean() | extra,
        capture_output=True,
        text=True,
        timeout=120,
    )


def clean() -> dict[str, str]:
    return {k: v for k, v in environ().items() if k not in ("MOEKIT_PROFILE", "SSH_CONNECTION")}


def ctrl_c_is_heard() -> None:
    """In a shell's background job it is not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def steps_of(folder: Path, run: str) -> list[int]:
    with sqlite3.connect(folder / "moekit-local" / "trackio" / "moekit.db") as connection:
        return [n for (n,) in connection.execute("SELECT step FROM metrics WHERE run_name = ? ORDER BY step", (run,))]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A run that its launch holds, until the file is closed."""
    run = make(tmp_path, "goes_on")
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield run, lock


def test_runs_are_followed_until_they_have_ended(tmp_path: Path, running: tuple[Path, Any]) -> None:
    run, lock = running
    make(tmp_path, "ended")
    words = [sys.executable, "-m", "moekit", "track", "--all", "--interval-s", "1"]
    first = subprocess.Popen(words, cwd=tmp_path, env=clean(), stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    said = [first.stdout.readline() for _ in range(3)]
    assert sorted(said[:2]) == ["ended: unknown\n", "goes_on: running\n"] or said[1] == "goes_on: running\n", said
    assert "ended: ended, all of it is in Trackio\n" in said

    second = moekit(tmp_path, "track", "goes_on")
    assert second.stdout == f"goes_on: followed already, by process {first.pid} on {socket.gethostname()}\n"
    assert second.returncode == 1

    log(run, 1, step(11))
    lock.close()
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 0
    assert out.endswith("goes_on: ended, all of it is in Trackio\n")
    assert steps_of(tmp_path, "goes_on") == list(range(1, 12))
    assert steps_of(tmp_path, "ended") == list(range(1, 11))

    again = moekit(tmp_path, "track", "--all")
    assert (again.stdout, again.returncode) == ("", 0)
    log(run, 2, config(num_experts=None), step(11), step(12))
    assert moekit(tmp_path, "track", "goes_on").returncode == 0
    assert steps_of(tmp_path, "goes_on") == list(range(1, 13))


def test_ctrl_c_and_once(tmp_path: Path, running: tuple[Path, Any]) -> None:
    once = moekit(tmp_path, "track", "goes_on", "--once")
    assert (once.stdout, once.returncode) == ("goes_on: running\n", 0)
    words = [sys.executable, "-m", "moekit", "track", "goes_on"]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=clean(), stdout=subprocess.PIPE, text=True, preexec_fn=ctrl_c_is_heard
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "goes_on: running\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("ended; the same command goes on\n", 130)
    assert steps_of(tmp_path, "goes_on") == list(range(1, 11))


def test_what_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "one")
    make(tmp_path / "there", "two")
    for words, said in {
        ("track",): "error: `moekit track` takes runs, or `--all`\n",
        ("track", "one", "--all"): "error: `moekit track` takes runs, or `--all`\n",
        ("track", "on"): "error: there is no run `on` in ",
        ("track", "one", "there/moekit-local/runs/two"): "error: the runs lie in ",
        ("track", "one", "--space", "mine"): "error: `mine` names no Space\n",
        ("track", "one", "--space", "a/b"): "error: `--space` needs HF_TOKEN, which is not set\n",
    }.items():
        done = moekit(tmp_path, *words)
        assert done.returncode == 1
        assert done.stderr.startswith(said), done.stderr
    nowhere = tmp_path / "empty"
    nowhere.mkdir()
    assert moekit(nowhere, "track", "--all").stderr.startswith("error: no profile says where runs lie\n")


def test_a_damaged_note_of_what_was_sent_is_made_again(tmp_path: Path) -> None:
    run = make(tmp_path, "one")
    (run / "track.json").write_text("{")
    assert moekit(tmp_path, "track", "one").returncode == 0
    assert json.loads((run / "track.json").read_text())["records"] == {"1": 10}
    assert steps_of(tmp_path, "one") == list(range(1, 11))


def test_a_run_without_metrics_is_no_run_in_trackio(tmp_path: Path) -> None:
    make(tmp_path, "early", steps=0).joinpath("attempts", "1", "metrics.jsonl").unlink()
    told = moekit(tmp_path, "track", "--all")
    assert (told.stdout.splitlines()[-1], told.returncode) == ("early: it has no metrics", 0)
    assert moekit(tmp_path, "track", "--all").stdout == ""


TOKEN = "hf_secretsecretsecret"


def test_a_hub_that_hangs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, "one")
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        copy = SpaceCopy("me/mine", "demo", limit_s=30)
        began = time.monotonic()
        assert copy.poll([run]) == ""
        assert time.monotonic() - began < 5, "following waits for the hub"
        hub.settimeout(60)
        asked, _ = hub.accept()
        with asked:
            assert asked.recv(65536)
            pid = copy._process.pid if copy._process else 0
            copy._limit_s = 0.1
            assert copy.poll([run]) == "`me/mine` was not brought up to date: the hub took longer than 0.1 s"
    assert not Path("/proc", str(pid)).exists()


def test_a_hub_that_is_not_there_disturbs_nothing(tmp_path: Path) -> None:
    make(tmp_path, "one")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}
    done = moekit(tmp_path, "track", "one", "--space", "me/mine", **hub)
    assert done.returncode == 0, done.stderr
    ended, copied = done.stdout.splitlines()[-2:]
    assert ended == "one: ended, all of it is in Trackio"
    assert copied.startswith("`me/mine` was not brought up to date: ")
    assert TOKEN not in done.stdout + done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert steps_of(tmp_path, "one") == list(range(1, 11))


def test_a_spaces_name_and_its_token() -> None:
    need_token("me/mine", {"HF_TOKEN": TOKEN})
    assert "HF_TOKEN" not in os.environ or os.environ["HF_TOKEN"] != TOKEN
