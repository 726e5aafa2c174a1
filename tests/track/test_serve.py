"""`moekit dashboard`, as typed: looked at by a real browser, ended by Ctrl-C, and what it refuses."""

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_dashboard import SSH, wait_for
from test_follower import config, count, log, step
from test_many import clean, ctrl_c_is_heard, make, moekit, steps_of

pytest.importorskip("trackio")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def dashboard(folder: Path, *words: str, **extra: str) -> Iterator[list[str]]:
    """What it says until it serves; Ctrl-C ends it, and nothing of it is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moekit", "dashboard", *words],
        cwd=folder,
        env=clean() | extra,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ctrl_c_is_heard,
        start_new_session=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line.rstrip("\n"))
            if line == "Ctrl-C ends it\n":
                break
        yield said
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    left = subprocess.run(["ps", "-o", "pid=", "-s", str(process.pid)], capture_output=True, text=True).stdout
    assert not left.strip(), left


def moe(folder: Path, name: str) -> Path:
    run = make(folder, name, steps=0)
    log(run, 1, config(), *(step(i, **{"lm loss": 8 / i, "load_balancing_loss": 1.0}) for i in range(1, 51)))
    count(run, range(10, 51, 10))
    return run


@pytest.mark.browser
def test_a_browser_shows_two_runs_and_their_routers(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    for name in ("first_moe", "second_moe"):
        moe(tmp_path, name)
    assert moekit(tmp_path, "track", "first_moe").returncode == 0
    port = free_port()
    with dashboard(tmp_path, "second_moe", "--port", str(port)) as said:
        address = f"http://127.0.0.1:{port}/?project=moekit"
        assert said[0] == f"dashboard   {address}"
        headless = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser"]
        waits = ["--virtual-time-budget=15000", "--window-size=1600,1200"]
        looked = subprocess.run(
            [*headless, *waits, f"--screenshot={tmp_path}/dashboard.png", "--dump-dom", address],
            capture_output=True,
            text=True,
            timeout=180,
        )
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", looked.stdout))
    assert "first_moe" in page, looked.stderr
    assert "second_moe" in page
    assert "lm loss" in looked.stdout
    assert re.search(r"\brouter \(\d+\)", page), "no section of the router"
    assert "router/max_vio_layer_1" in looked.stdout
    assert "router/dead_experts" in looked.stdout


def test_on_network_file_systems_the_inbox_is_taken_in_and_later_attempts_win(tmp_path: Path) -> None:
    run, network = make(tmp_path, "one"), {"TRACKIO_STORAGE_MODE": "jsonl"}
    assert moekit(tmp_path, "track", "one", **network).returncode == 0
    log(run, 2, config(num_experts=None), *(step(i, **{"lm loss": 100.0}) for i in range(6, 13)))
    assert moekit(tmp_path, "track", "one", **network).returncode == 0
    assert not (tmp_path / "moekit-local" / "trackio" / "moekit.db").exists()
    port = free_port()
    with dashboard(tmp_path, "--port", str(port), **network):
        assert "<html" in wait_for(f"http://127.0.0.1:{port}/")
        assert steps_of(tmp_path, "one") == list(range(1, 13))
    assert not list((tmp_path / "moekit-local" / "trackio").glob("inbox/*/*"))


def test_behind_ssh_the_tunnel_is_named(tmp_path: Path) -> None:
    make(tmp_path, "one")
    port = str(free_port())
    with dashboard(tmp_path, "one", "--port", port, **SSH) as said:
        assert re.fullmatch(rf"tunnel      ssh -N -L {port}:127\.0\.0\.1:{port} \S+@192\.0\.2\.10", said[2])
    printed = moekit(tmp_path, "dashboard", "--print", "--port", port, **SSH).stdout.splitlines()
    assert printed[0].startswith(f"ssh -N -L {port}:")
    assert f"GRADIO_SERVER_PORT={port} " in printed[1]


def test_what_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path, "one", steps=0)
    nothing = moekit(tmp_path, "dashboard")
    assert nothing.returncode == 1
    assert nothing.stderr.startswith("error: there are no metrics of project `moekit` in ")
    log(run, 1, step(1))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = moekit(tmp_path, "dashboard", "one", "--port", str(port))
    assert refused.stderr == f"error: port {port} is taken, or not yours\n    hint: give another with `--port`\n"
    make(tmp_path, "two", steps=0)
    early = moekit(tmp_path, "dashboard", "two")
    assert early.stderr.startswith("error: run `two` has no metrics yet\n")
    without = "import sys; sys.modules['trackio'] = None; sys.argv = ['moekit', 'dashboard', 'one']; "
    missing = subprocess.run(
        [sys.executable, "-c", without + "from moekit.cli import main; main()"],
        cwd=tmp_path,
        env=clean(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert missing.stderr == "error: the dashboard needs trackio\n    hint: run `pip install 'moekit[track]'`\n"
