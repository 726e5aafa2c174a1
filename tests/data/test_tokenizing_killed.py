"""Killed at any moment, `moekit data tokenize` leaves no process, and its rerun makes what an undisturbed run makes."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tokenized import (
    children,
    command,
    is_alive,
    make_root,
    make_texts,
    moekit,
    visible,
    write_description,
    write_texts,
)


def prepared(tmp_path: Path, files: int = 4, documents: int = 12) -> tuple[Path, Path]:
    """The description and the shared root of a small data set."""
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", make_texts(files, documents))
    return write_description(tmp_path / "some.yaml", tmp_path / "text", tasks=2), root


def with_workers(words: list[str], workers: int) -> tuple[subprocess.Popen[str], list[int]]:
    """Start the command and wait for its workers."""
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(found := children(running.pid)) < workers:
        assert running.poll() is None, running.communicate()
        time.sleep(0.01)
    return running, found


def gone(processes: list[int]) -> bool:
    """Whether they have all ended, within some seconds."""
    patience = time.monotonic() + 20
    while any(map(is_alive, processes)) and time.monotonic() < patience:
        time.sleep(0.02)
    return not any(map(is_alive, processes))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_end_it_ends_its_workers_and_says_how_to_go_on(tmp_path: Path, number: int, code: int):
    description, root = prepared(tmp_path, documents=3000)
    running, workers = with_workers(command(description, root, "--workers", "2"), 2)
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (code, "", "stopped; the same command goes on where it was\n")
    assert gone(workers)


def test_killed_it_leaves_no_worker_and_the_rerun_is_not_locked_out(tmp_path: Path):
    description, root = prepared(tmp_path, documents=3000)
    running, workers = with_workers(command(description, root, "--workers", "2"), 2)
    running.kill()
    running.communicate()
    assert gone(workers)
    assert moekit(description, root).returncode == 0


def test_a_worker_that_is_killed_is_told_with_its_file_and_the_others_end(tmp_path: Path):
    description, root = prepared(tmp_path, documents=3000)
    running, workers = with_workers(command(description, root, "--workers", "2"), 2)
    os.kill(workers[0], signal.SIGKILL)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (1, "")
    assert err.startswith(f"{tmp_path}/text/00")
    assert ".jsonl: the worker of this file was killed by SIGKILL, as the system does where memory runs out\n" in err
    assert "hint: give it more `memory_gib` or take fewer workers" in err
    assert gone(workers)


@pytest.mark.long
def test_at_fifty_moments(tmp_path: Path):
    """Parent or worker, in runs that go on where the killed one was; each finished set is compared."""
    description, root = prepared(tmp_path, files=6, documents=600)
    folder = root / "data" / "some"
    start = time.monotonic()
    assert moekit(description, root, "--workers", "2").returncode == 0
    longest_s = time.monotonic() - start
    expected = visible(folder)
    records = {path.name for path in (folder / "shards").iterdir()}
    shutil.rmtree(folder)
    choice, killed, finished = random.Random(8), 0, 0
    while killed < 50:
        running = subprocess.Popen(
            command(description, root, "--workers", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            running.wait(choice.uniform(0.2, 1.3) * longest_s)
        except subprocess.TimeoutExpired:
            workers = children(running.pid)
            victim = choice.choice([running.pid, *workers])
            os.kill(victim, signal.SIGKILL)
            killed += 1
            err = running.communicate(timeout=60)[1]
            assert "Traceback" not in err
            assert running.returncode in (1, -signal.SIGKILL, 0)
            assert gone(workers)
        else:
            running.communicate()
        if running.returncode == 0:
            finished += 1
            assert visible(folder) == expected
            assert {path.name for path in (folder / "shards").iterdir()} == records
            shutil.rmtree(folder)
        elif (folder / "shards").is_dir():
            whole = {path.stem for path in (folder / "shards").glob("*.json")}
            for name, data in visible(folder).items():
                if name.startswith(tuple(f"some_{task}_" for task in whole)):
                    assert data == expected[name]
    assert moekit(description, root, "--workers", "2").returncode == 0
    assert visible(folder) == expected
    print(f"{killed} kills, {finished} finished sets between")
