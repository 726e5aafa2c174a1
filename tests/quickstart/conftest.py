"""Starts launches of the real command, and trains the quickstart once a session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import SHORT, Launch, Launched

from moekit.launch.rundir import RunDir


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all launches of this session are made: they share the prepared data."""
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="session")
def launch(root: Path) -> Iterator[Launch]:
    """Start `moekit launch` of a recipe's text."""
    started: list[Launched] = []

    def start(name: str, recipe: str = SHORT, **environment: str) -> Launched:
        file = root / f"{name}.yaml"
        file.write_text(recipe)
        mark, output = uuid.uuid4().hex, root / f"{name}.{len(started)}.out"
        with output.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "moekit", "launch", file.name, "--name", name],
                cwd=root,
                env={**os.environ, **environment, "MARK": mark, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        launched = Launched(process, RunDir(root / "moekit-local" / "runs" / name), output, mark)
        started.append(launched)
        return launched

    yield start
    for launched in started:
        for pid in launched.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launched.process.wait()


@pytest.fixture(scope="session")
def trained(launch: Launch) -> Launched:
    """The quickstart, shortened, trained to its end in one go."""
    launched = launch("trained")
    assert launched.wait() == 0, launched.text
    return launched
