"""The guard alone: nothing of a command outlives the holder of its pipe."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moekit.launch import guard

STUBBORN = """
trap '' TERM
setsid bash -c 'trap "" TERM; sleep 1000 & echo $! >> pids; echo $$ >> pids; wait' &
(setsid sleep 1000 & echo $! >> pids)
echo $$ >> pids; touch ready; wait
"""


def start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-I", guard.__file__, *command]
    return subprocess.Popen(arguments, cwd=folder, stdin=subprocess.PIPE, start_new_session=True)


def alive(pid: int) -> bool:
    status = Path("/proc", str(pid), "stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: object, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137)])
def test_the_commands_exit_code(tmp_path: Path, script: str, code: int) -> None:
    assert start(tmp_path, "bash", "-c", script).wait(60) == code


def test_what_a_command_leaves_running_is_stopped_with_it(tmp_path: Path) -> None:
    assert start(tmp_path, "bash", "-c", "setsid sleep 1000 & echo $! > pid; exit 3").wait(60) == 3
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_polite_command_may_end_in_order(tmp_path: Path) -> None:
    process = start(
        tmp_path, "bash", "-c", "trap 'echo saved > saved; exit 4' TERM; touch ready; while :; do sleep 0.1; done"
    )
    wait_until((tmp_path / "ready").exists)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 4
    assert (tmp_path / "saved").exists()


def test_sigkill_of_the_holder_stops_what_ignores_sigterm_in_other_sessions(tmp_path: Path) -> None:
    holder = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-I", {guard.__file__!r}, "bash", "-c", {STUBBORN!r}],
                 stdin=subprocess.PIPE, start_new_session=True)
time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", holder], cwd=tmp_path)
    wait_until(lambda: (tmp_path / "ready").exists() and len((tmp_path / "pids").read_text().split()) == 4)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert all(map(alive, pids))
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    wait_until(lambda: not any(map(alive, pids)))
    assert time.monotonic() - began > guard.GRACE_S / 2  # SIGTERM came first, and its time was given


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_guard_stops_the_command(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "bash", "-c", "echo $$ > pid; exec sleep 1000")
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.send_signal(number)
    assert process.wait(60) == 143
    assert not alive(int((tmp_path / "pid").read_text()))


def test_descendants_are_found_across_sessions() -> None:
    process = subprocess.Popen(["bash", "-c", "setsid sleep 1000 & wait"], start_new_session=True)
    try:
        wait_until(lambda: len(guard.descendants(process.pid)) == 1)
        assert process.pid in guard.descendants(os.getpid())
    finally:
        for pid in [*guard.descendants(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.wait()
