"""The line that opens the dashboard, typed into a real shell in front of the real Trackio."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from moekit.track.dashboard import dashboard_command, dashboard_lines, trackio_dir, tunnel_command

SSH = {"SSH_CONNECTION": "10.0.0.7 50022 192.0.2.10 22"}


def test_metrics_of_all_runs_lie_side_by_side(tmp_path: Path) -> None:
    assert trackio_dir(tmp_path / "runs" / "one") == tmp_path / "trackio"


def test_only_a_session_of_ssh_needs_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moekit.track.dashboard.getuser", lambda: "ada")
    assert tunnel_command({}) is None
    assert tunnel_command(SSH) == "ssh -N -L 7860:127.0.0.1:7860 ada@192.0.2.10"
    assert tunnel_command({"SSH_CONNECTION": "::1 50022 ::1 2222"}) == "ssh -N -L 7860:127.0.0.1:7860 -p 2222 ada@::1"


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    assert tunnel_command(SSH) == "ssh -N -L 7860:127.0.0.1:7860 987654@192.0.2.10"


def test_behind_a_tunnel_the_port_is_fixed() -> None:
    assert len(dashboard_lines(Path("/d"), "p", {})) == 1
    tunnel, dashboard = dashboard_lines(Path("/d"), "p", SSH)
    assert tunnel.startswith("ssh -N -L 7860:")
    assert dashboard.startswith("TRACKIO_DIR=/d GRADIO_SERVER_PORT=7860 GRADIO_NUM_PORTS=1 ")


def test_the_command_opens_the_dashboard(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run = tmp_path / "a b" / "runs" / "demo"
    (run / "attempts" / "1").mkdir(parents=True)
    line = {"step": 1, "time": 1.8e9, "metrics": {"lm loss": 8.3}}
    (run / "attempts" / "1" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    follower = [sys.executable, "-m", "moekit.track.follower", str(run), "--project", "it's mine"]
    subprocess.run(follower, stdin=subprocess.DEVNULL, check=True, timeout=60)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shown = dashboard_command(trackio_dir(run), "it's mine", port)
    assert shlex.split(shown)[0] == f"TRACKIO_DIR={tmp_path}/a b/trackio"
    server = subprocess.Popen(
        ["/bin/sh", "-c", f"exec env {shown}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"BROWSER": "true", "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert server.stdout is not None
        output = next(line for line in server.stdout if "127.0.0.1" in line)
        page = wait_for(f"http://127.0.0.1:{port}/")
        assert "<html" in page
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/api/get_runs_for_project",
            data=json.dumps({"project": "it's mine"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert "demo" in answer.read().decode()
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=30)
    assert f"127.0.0.1:{port}" in output


def wait_for(address: str) -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
