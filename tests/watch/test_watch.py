"""`moekit watch` as a process: of runs that go on, have ended, have nothing yet, in a terminal and in a pipe."""

import fcntl
import json
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
import xml.dom.minidom
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CAPTURE = Path(__file__).parent / "data" / "run"
MOEKIT = [sys.executable, "-m", "moekit"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The captured run, as one that ended on this machine."""
    run = Path(shutil.copytree(CAPTURE, tmp_path / "moekit-local" / "runs" / "demo"))
    (run / "recipe.yaml").write_text("base: quickstart\n")
    (run / "end").write_text("160\n0\n")
    return run


def watch(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "COLUMNS": "80", "LINES": "24", **environ}
    return subprocess.run(
        [*MOEKIT, "watch", *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )


@contextmanager
def training(run: Path) -> Iterator[None]:
    """The run is one that a launch on this machine holds."""
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def log(run: Path, attempt: int, steps: range, loss: float) -> None:
    with (run / "attempts" / str(attempt) / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "time": 1.8e9 + step, "metrics": {"lm loss": loss}}) + "\n")


def test_once(run: Path, tmp_path: Path) -> None:
    done = watch(tmp_path, "demo", "--once")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("  demo  ")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "step 160 of 160, attempt 2" in done.stdout
    assert "micro batch   ▁▁▁▁" in done.stdout or "micro batch   ▁▁▂" in done.stdout
    assert "no alerts" in done.stdout
    assert "\x1b" not in done.stdout
    assert watch(tmp_path, str(run), "--once").stdout == done.stdout  # from another root: by its path


def test_json(run: Path, tmp_path: Path) -> None:
    said = json.loads(watch(tmp_path, "demo", "--json").stdout)
    assert (said["name"], said["attempt"], said["step"]) == ("demo", 2, 160)
    assert said["latest"]["router/max_vio_micro"] == pytest.approx(0.19, abs=0.005)
    assert [layer["name"] for layer in said["layers"]] == ["layer_0", "layer_1", "layer_2", "layer_3"]
    assert len(said["curves"]["lm loss"]) == 160
    assert (said["alerts"], said["active"]) == ([], [])


def test_plot(run: Path, tmp_path: Path) -> None:
    done = watch(tmp_path, "demo", "--plot", "x.svg")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "x.svg\n")
    texts = xml.dom.minidom.parse(str(tmp_path / "x.svg")).getElementsByTagName("text")
    assert "MaxVio, mean of the layers" in [node.firstChild.data for node in texts]
    both = watch(tmp_path, "demo", "--plot", "y.svg", "--json")
    assert json.loads(both.stdout)["name"] == "demo"
    assert (tmp_path / "y.svg").read_text() == (tmp_path / "x.svg").read_text()
    refused = watch(tmp_path, "demo", "--plot", "none/x.svg")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: cannot write `none/x.svg`: no such file or directory\n")
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_a_run_that_has_ended_is_one_line_in_a_pipe(run: Path, tmp_path: Path) -> None:
    done = watch(tmp_path, "demo")
    assert done.returncode == 0
    state, line = done.stdout.splitlines()
    assert state == "demo: killed"
    assert line.startswith("step 160/160  attempt 2  lm loss ")


def test_no_metrics_yet(tmp_path: Path) -> None:
    run = tmp_path / "moekit-local" / "runs" / "new"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("base: quickstart\n")
    assert watch(tmp_path, "new").stdout == "new: written\n"
    assert watch(tmp_path, "new", "--once").stdout == "  new  written\n  no metrics yet\n"
    assert json.loads(watch(tmp_path, "new", "--json").stdout)["step"] == 0
    plot = watch(tmp_path, "new", "--plot", "x.svg")
    assert (plot.returncode, plot.stderr) == (
        1,
        "error: run `new` has no metrics yet, so there is nothing to plot\n",
    )


def test_a_run_that_is_not_there(run: Path, tmp_path: Path) -> None:
    done = watch(tmp_path, "demoo")
    assert done.returncode == 1
    assert "there is no run `demoo`" in done.stderr
    assert "did you mean `demo`?" in done.stderr


def test_a_control_that_is_none_is_said(run: Path, tmp_path: Path) -> None:
    assert "The control `absent` is no run in" in watch(tmp_path, "demo", "--once", "--control", "absent").stdout
    assert "`demo` is no control: its routing" in watch(tmp_path, "demo", "--once", "--control", "demo").stdout


def test_lines_come_while_it_trains_and_end_with_it(run: Path, tmp_path: Path) -> None:
    words = [*MOEKIT, "watch", "demo", "--interval-s", "0.1"]
    with training(run):
        watching = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        assert watching.stdout.readline() == "demo: running\n"
        assert watching.stdout.readline().startswith("step 160/160")
        log(run, 2, range(161, 181), 9.0)
        begun = watching.stdout.readline()
        assert "warn step 16" in begun
        assert "lm loss is" in begun
        assert watching.stdout.readline().startswith("step 180/160")
    out, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert out.count("\n") <= 2


def test_in_a_terminal(run: Path, tmp_path: Path) -> None:
    """The picture is drawn over and over on a screen of its own, and left behind at the end."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    words = [*MOEKIT, "watch", "demo", "--interval-s", "0.2"]
    with training(run):
        watching = subprocess.Popen(
            words, cwd=tmp_path, stdin=inside, stdout=inside, env={**environ, "TERM": "xterm-256color"}
        )
        seen = read_until(terminal, b"no alerts")
        assert b"\x1b[?1049h" in seen  # the other screen
        log(run, 2, range(161, 181), 9.0)
        read_until(terminal, b"above its best")
    seen = read_until(terminal, b"\x1b[?1049l")
    assert watching.wait(60) == 0
    os.close(inside)
    assert b"above its best" in seen + read_all(terminal)


def read_until(terminal: int, words: bytes, seconds: float = 60) -> bytes:
    seen, end = b"", time.monotonic() + seconds
    while words not in seen:
        assert time.monotonic() < end, seen[-2000:]
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536)
    return seen


def read_all(terminal: int) -> bytes:
    seen = b""
    try:
        while select.select([terminal], [], [], 0.5)[0] and (more := os.read(terminal, 65536)):
            seen += more
    except OSError:  # the other end is closed
        pass
    return seen


def test_ctrl_c_ends_the_watching(run: Path, tmp_path: Path) -> None:
    with training(run):
        watching = subprocess.Popen([*MOEKIT, "watch", "demo"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        watching.stdout.readline()
        watching.stdout.readline()
        watching.send_signal(2)
        out, _ = watching.communicate(timeout=60)
    assert (watching.returncode, out) == (130, "")


_MEASURE = """
import sys
from pathlib import Path
from moekit.watch.watching import Watching
watching = Watching(Path(sys.argv[1]))
while watching.poll(5000) is not None:
    pass
assert watching.picture().step == int(sys.argv[2])
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])  # getrusage has its parent's
"""


def measured_mib(folder: Path, steps: int) -> float:
    """The peak memory of a process that watches a stream of so many steps, whose router is counted at each."""
    attempt = folder / str(steps) / "attempts" / "1"
    counts = folder / str(steps) / "checkpoints" / "tokens_per_expert"
    attempt.mkdir(parents=True)
    counts.mkdir(parents=True)
    config = {"world_size": 2, "num_experts": 8, "expert_model_parallel_size": 2, "moe_aux_loss_coeff": 0.01}
    config["moe_router_load_balancing_type"] = "aux_loss"
    with (attempt / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"event": "config", "config": config, "time": 1.0}) + "\n")
        for step in range(1, steps + 1):
            metrics = f'{{"lm loss": {2 + 1 / step}, "z_loss": 4.0, "load_balancing_loss": 1.01, "throughput": 140.5}}'
            file.write(f'{{"step": {step}, "time": {1.8e9 + step}, "metrics": {metrics}}}\n')
    for rank in range(2):
        with (counts / f"rank{rank}.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                file.write(f'{{"iter": {step}, "block": "decoder", "layer": 0, "tpe": [[5, 6, 7, {step % 9}]]}}\n')
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder / str(steps)), str(steps)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1024


def test_memory_does_not_grow_with_the_stream(tmp_path: Path) -> None:
    small, large = measured_mib(tmp_path, 20_000), measured_mib(tmp_path, 80_000)  # files are read a mebibyte at a time
    assert large < small + 6
