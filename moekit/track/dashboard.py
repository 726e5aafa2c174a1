"""The line that opens Trackio's dashboard on a run's metrics, and the tunnel to it from another machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from getpass import getuser
from pathlib import Path

from moekit.share import program

PORT = 7860
"""Trackio's first choice (trackio/launch.py, `INITIAL_PORT_VALUE`)."""


def trackio_dir(run_dir: Path) -> Path:
    """Where the metrics of `<shared_root>/runs/<name>` go: `<shared_root>/trackio`, one for all runs of that root."""
    return run_dir.resolve().parents[1] / "trackio"


def dashboard_command(trackio_dir: Path, project: str, port: int | None = None) -> str:
    """The shell command that serves the dashboard of `project` on 127.0.0.1 until Ctrl-C, and prints its address.

    With `port` it serves on that one or not at all, else on the first free one from 7860 on. The command names the
    Trackio beside this Python where none is on PATH.
    """
    settings = [f"TRACKIO_DIR={shlex.quote(str(trackio_dir))}"]
    if port is not None:
        settings += [f"GRADIO_SERVER_PORT={port}", "GRADIO_NUM_PORTS=1"]
    return " ".join([*settings, shlex.quote(program("trackio")), "show", "--project", shlex.quote(project)])


def tunnel_command(environ: Mapping[str, str], port: int = PORT) -> str | None:
    """The `ssh -L` line to type on the machine one sits at, or None unless this is a session of ssh.

    `SSH_CONNECTION` holds client address, client port, server address, server port (man ssh): the server address is the
    one by which this machine has just been reached.
    """
    words = environ.get("SSH_CONNECTION", "").split()
    if len(words) != 4:
        return None
    _, _, host, ssh_port = words
    other_port = [] if ssh_port == "22" else ["-p", ssh_port]
    try:
        user = getuser()
    except (KeyError, OSError):  # a container's uid has no name; OSError from Python 3.13 on
        user = str(os.getuid())
    return shlex.join(["ssh", "-N", "-L", f"{port}:127.0.0.1:{port}", *other_port, f"{user}@{host}"])


def dashboard_lines(trackio_dir: Path, project: str, environ: Mapping[str, str], port: int | None = None) -> list[str]:
    """The commands to show: the dashboard's, and before it the one for the other machine where ssh is between."""
    tunnel = tunnel_command(environ, port or PORT)
    if tunnel is None:
        return [dashboard_command(trackio_dir, project, port)]
    return [tunnel, dashboard_command(trackio_dir, project, port or PORT)]
