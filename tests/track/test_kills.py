"""Followers killed at random moments while the run goes on, two at once, and a file system that gives out."""

import gc
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_follower import command, config, count, environ, follow_once, log, rows, run_dir, step, values

pytest.importorskip("trackio")

KILLS = """
import os, random, signal, sys, threading, time
from pathlib import Path
import trackio.fragments, trackio.sqlite_storage
from moekit.track.follower import follow

run, random.seed, got = Path(sys.argv[1]), random.seed(int(sys.argv[2])), 0
for _ in range(int(sys.argv[3])):
    pid = os.fork()
    if pid == 0:
        try:
            follow(run, "demo", stop=threading.Event(), interval_s=0.01)
        finally:
            os._exit(1)
    time.sleep(random.uniform(0.0, 0.6))
    os.kill(pid, signal.SIGKILL)
    got += os.waitpid(pid, 0)[1] == signal.SIGKILL
print(got)
"""


def write_on(run: Path, ended: threading.Event) -> None:
    """Two ranks in two attempts, of which the second begins with steps that the first had; half lines, as they come."""
    pauses = random.Random(1)
    for attempt, steps in ((1, range(1, 4001)), (2, range(3001, 7001))):
        log(run, attempt, config())
        for first in range(steps.start, steps.stop, 50):
            part = range(first, first + 50)
            lines = "".join(json.dumps(step(i, **{"lm loss": attempt / i})) + "\n" for i in part)
            cut = pauses.randrange(len(lines))
            log_raw(run, attempt, lines[:cut])
            time.sleep(pauses.uniform(0, 0.15))
            log_raw(run, attempt, lines[cut:])
            count(run, range(first + 9, first + 50, 10), busy=2 + attempt)
    ended.set()


def log_raw(run: Path, attempt: int, text: str) -> None:
    with (run / "attempts" / str(attempt) / "metrics.jsonl").open("a") as file:
        file.write(text)


@pytest.mark.long
def test_killed_at_random_moments_no_row_is_lost_or_doubled(tmp_path: Path) -> None:
    run, ended = run_dir(tmp_path), threading.Event()
    seed = str(random.randrange(10**9))
    print("seed", seed)
    writer = threading.Thread(target=write_on, args=(run, ended))
    writer.start()
    env = environ(TRACKIO_DIR=str((tmp_path / "root" / "trackio").resolve()))
    killed = subprocess.run(
        [sys.executable, "-c", KILLS, str(run), seed, "40"], capture_output=True, text=True, timeout=300, env=env
    )
    assert killed.stdout == "40\n", killed.stderr
    writer.join()
    follow_once(run)
    assert values(run, "lm loss") == {i: (1 if i <= 3000 else 2) / i for i in range(1, 7001)}
    found = values(run, "router/max_vio_layer_1")
    assert set(found) == set(range(10, 7001, 10))
    assert found[3000] == pytest.approx(1 / 3)
    assert found[3010] == pytest.approx(3 / 7)
    with sqlite3.connect(run.parents[1] / "trackio" / "demo.db") as connection:
        titles = Counter(title for (title,) in connection.execute("SELECT title FROM alerts"))
    assert titles["attempt 2 resumes at step 3001"] == 1


def test_a_second_follower_waits_for_the_first(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    log(run, 1, config(), *(step(i) for i in range(1, 101)))
    first = subprocess.Popen(command(run, "--interval-s", "0.1"), stdin=subprocess.PIPE, env=environ())
    assert first.stdin is not None
    wait_until(lambda: (run / "track.json").exists())
    second = subprocess.Popen(
        command(run, "--interval-s", "0.1"), stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environ(), text=True
    )
    assert second.stdin is not None
    assert second.stderr is not None
    assert f"followed already, by process {first.pid} on " in second.stderr.readline()
    first.kill()
    first.wait()
    log(run, 1, *(step(i) for i in range(101, 111)))
    second.stdin.close()
    assert second.wait(60) == 0
    assert set(values(run, "lm loss")) == set(range(1, 111))


def wait_until(true: "object", timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def following(tmp_path: Path) -> Iterator[tuple[Path, "subprocess.Popen[str]"]]:
    """A run that is being followed, with ten steps in Trackio."""
    run = run_dir(tmp_path)
    log(run, 1, config(), *(step(i) for i in range(1, 11)))
    process = subprocess.Popen(
        command(run, "--interval-s", "0.1"),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ(),
        text=True,
    )
    wait_until(lambda: (run / "track.json").exists())
    yield run, process
    process.kill()
    process.communicate()


def end(process: "subprocess.Popen[str]") -> str:
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return said


def test_trackios_directory_is_removed_meanwhile(following: tuple[Path, "subprocess.Popen[str]"]) -> None:
    run, process = following
    shutil.rmtree(run.parents[1] / "trackio")
    log(run, 1, step(11))
    end(process)
    assert set(values(run, "lm loss")) == set(range(1, 12))


def test_trackios_directory_takes_no_writing_for_a_while(following: tuple[Path, "subprocess.Popen[str]"]) -> None:
    run, process = following
    folder = run.parents[1] / "trackio"
    away = folder.with_name("away")
    folder.rename(away)
    folder.write_text("no directory")
    log(run, 1, step(11))
    assert process.stderr is not None
    assert "trying again" in process.stderr.readline()
    folder.unlink()
    away.rename(folder)
    end(process)
    assert set(values(run, "lm loss")) == set(range(1, 12))


@pytest.mark.skipif(os.geteuid() != 0, reason="a full file system is mounted for it")
def test_the_disk_is_full_for_a_while(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    folder = run.parents[1] / "trackio"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=True)
    try:
        log(run, 1, config(), *(step(i) for i in range(1, 5001)))
        process = subprocess.Popen(
            command(run, "--interval-s", "0.1"), stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environ(), text=True
        )
        assert process.stderr is not None
        assert "full" in process.stderr.readline()
        subprocess.run(["mount", "-o", "remount,size=50m", str(folder)], check=True)
        end(process)
        assert set(values(run, "lm loss")) == set(range(1, 5001))
        gc.collect()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        log(run, 1, step(5001))
        refused = subprocess.run(command(run), stdin=subprocess.DEVNULL, capture_output=True, env=environ(), timeout=60)
        assert refused.returncode != 0
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        follow_once(run)
        assert set(values(run, "lm loss")) == set(range(1, 5002))
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


STREAM = """
import os, sys
from pathlib import Path
from moekit.track.feed import Feed
from moekit.track.storage import Storage

def peak_mib():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024

run, sent = Path(sys.argv[1]), 0
feed = Feed(run, Storage(Path(sys.argv[2]), "demo"))
while feed.send_some():
    sent += 1
    if sent == 20:
        print(peak_mib())
print(peak_mib())
"""


@pytest.mark.long
def test_a_long_stream_takes_no_more_memory_than_a_short_one(tmp_path: Path) -> None:
    """With MOEKIT_STREAM_LINES=10000000, ten minutes and 6 GB of disk."""
    lines = int(os.environ.get("MOEKIT_STREAM_LINES", "500000"))
    run = run_dir(tmp_path)
    log(run, 1, config(num_experts=None))
    with (run / "attempts" / "1" / "metrics.jsonl").open("a") as file:
        for number in range(1, lines + 1):
            record = f'{{"lm loss": {8 - 4 * number / lines:.5f}, "z_loss": 0.25}}'
            file.write(f'{{"step": {number}, "time": {1.8e9 + number}, "metrics": {record}}}\n')
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(run), str(tmp_path / "trackio")],
        capture_output=True,
        text=True,
        timeout=3600,
        env=environ(),
    )
    assert done.returncode == 0, done.stderr
    early, last = map(float, done.stdout.split())
    print(early, last)
    assert last < early + 10
    with sqlite3.connect(tmp_path / "trackio" / "demo.db") as connection:
        assert connection.execute("SELECT count(*), min(step), max(step) FROM metrics").fetchone() == (lines, 1, lines)
        for number in range(1, lines, lines // 7):
            (metrics,) = connection.execute("SELECT metrics FROM metrics WHERE step = ?", (number,)).fetchone()
            assert json.loads(metrics) == {
                "lm loss": pytest.approx(8 - 4 * number / lines, abs=1e-5),
                "z_loss": 0.25,
                "z_loss_rms_logsumexp": 0.5,
            }


def test_ctrl_c_is_the_parents(following: tuple[Path, "subprocess.Popen[str]"]) -> None:
    run, process = following
    process.send_signal(signal.SIGINT)
    log(run, 1, step(11))
    end(process)
    assert len(rows(run)) == 11
