"""A run's log, followed over attempts; tests/slurm has it with real jobs."""

import fcntl
import io
import subprocess
import sys
from pathlib import Path

from moekit.launch.rundir import RunDir
from moekit.runs.logs import Follower, last_lines, newest_log


def write(run: RunDir, attempt: int, text: str) -> None:
    run.attempt(attempt).path.mkdir(parents=True, exist_ok=True)
    with run.attempt(attempt).train_log.open("a") as log:
        log.write(text)


def test_attempts_are_copied_one_after_another(tmp_path: Path) -> None:
    run, out, said = RunDir(tmp_path), io.BytesIO(), []
    follower = Follower(run, 2, out, said.append)
    follower.copy("7")
    assert follower.silent
    (tmp_path / "slurm-7.log").write_text("waiting for nodes\n")
    follower.copy("7;alps")
    write(run, 1, "a\nb\nc\nhalf")
    follower.copy("7")
    write(run, 1, " a line\n")
    follower.copy("7")
    write(run, 1, "the end\n")
    write(run, 2, "came and went\n")
    write(run, 3, "third\n")
    follower.copy("8")
    follower.copy("8")
    assert out.getvalue().decode() == ("waiting for nodes\nc\nhalf a line\nthe end\ncame and went\nthird\n")
    logs = [tmp_path / "slurm-7.log", *(run.attempt(number).train_log for number in (1, 2, 3))]
    assert said == [f"==> {log} <==" for log in logs]
    assert newest_log(run, "7") == logs[-1]


def test_the_end_of_a_large_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 3_000_000 + b"\nlast \xff\n")
    assert last_lines(log, 1) == (b"last \xff\n", 3_000_008)
    assert len(last_lines(log, 2)[0]) == 2**20
    assert last_lines(log, 0)[0] == b""


def test_a_run_on_this_machine_is_followed_and_stopped(tmp_path: Path) -> None:
    """Stopped as Ctrl-C does: by SIGINT to the launch that holds it."""
    run = RunDir(tmp_path / "runs/x")
    write(run, 1, "it begins\n")
    run.recipe.touch()
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        launch = subprocess.Popen(["sleep", "600"], pass_fds=[lock.fileno()])
        lock.write(f"{launch.pid}\n")
    moekit = [sys.executable, "-m", "moekit"]
    words = [*moekit, "logs", "-f", str(run.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "it begins\n"
        assert follower.poll() is None
        done = subprocess.run([*moekit, "cancel", str(run.path)], capture_output=True, text=True)
        assert done.stdout == f"x: process {launch.pid} on this machine told to stop\n"
        assert launch.wait(20) == -2
        _, err = follower.communicate(timeout=60)
    assert err.endswith("x: killed\n")
    done = subprocess.run([*moekit, "cancel", str(run.path)], capture_output=True, text=True)
    assert (done.returncode, "run `x` is not being trained on this machine: it is killed" in done.stderr) == (1, True)
