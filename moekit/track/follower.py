"""Feeds Trackio from a local run's files, as a process of its own: no training depends on Trackio's health.

    python -m moekit.track.follower RUN_DIR --project P [--name NAME] [--trackio-dir DIR] [--interval-s 10]

It follows until its standard input closes, which a dead parent's does too, makes a last pass and ends. While somebody
else follows the run, it waits. `moekit track` (`many.py`) is for runs of Slurm.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from moekit.problems import MoekitError, print_problems
from moekit.track.dashboard import trackio_dir as default_trackio_dir
from moekit.track.feed import Feed
from moekit.track.lock import RunLock
from moekit.track.storage import Storage, need_trackio


def follow(
    run_dir: Path,
    project: str,
    name: str | None = None,
    trackio_dir: Path | None = None,
    *,
    stop: threading.Event,
    interval_s: float = 10.0,
) -> None:
    """Send what is new every `interval_s` seconds until `stop`, then a last time.

    A pass that fails (a full disk, a locked database) is made again, from the last one that did not; the last raises.

    Args:
        run_dir: `<shared_root>/runs/<name>`.
        project: Trackio's project.
        name: the run's name in Trackio, unique in the project; the run directory's where None.
        trackio_dir: where Trackio keeps its data; `<shared_root>/trackio` where None. A process serves one.

    Raises:
        MoekitError: Trackio is not installed or refuses the project's name.
    """
    to = (trackio_dir or default_trackio_dir(run_dir)).resolve()
    lock, feed, said = RunLock(run_dir), None, ""
    held = False
    while True:
        stopping = stop.is_set()
        try:
            if not held:
                other = lock.take()
                held = not other
                if other and other != said:
                    print(f"the run is followed already, by {other}", file=sys.stderr, flush=True)
                    said = other
            if held:
                feed = feed or Feed(run_dir, Storage(to, project), name)
                feed.send_all()
        except MoekitError:
            raise
        except Exception as failure:
            if stopping:
                raise
            print(f"{type(failure).__name__}: {failure}; trying again", file=sys.stderr, flush=True)
            feed = None
        if stopping:
            return
        stop.wait(interval_s)


def start(run_dir: Path, project: str, name: str | None = None) -> subprocess.Popen[bytes]:
    """Start a follower's process, its messages in `<run>/track.log`; `stop` ends it, and so does the caller's own end.

    Raises:
        MoekitError: Trackio is not installed.
    """
    need_trackio()
    command = [sys.executable, "-m", "moekit.track.follower", str(run_dir), "--project", project]
    with (run_dir / "track.log").open("ab") as log:
        return subprocess.Popen(
            command if name is None else [*command, "--name", name],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is the caller's: the follower's last pass comes after it
        )


def stop(process: subprocess.Popen[bytes], timeout_s: float = 30.0) -> bool:
    """Let a started follower make its last pass; False if it failed or took longer and was killed.

    It is gone then, whatever the user types: Ctrl-C makes nothing faster here.
    """
    assert process.stdin is not None
    deadline = time.monotonic() + timeout_s
    while process.returncode is None:
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            process.stdin.close()
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return process.returncode == 0


def main() -> int:
    """Follow until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m moekit.track.follower")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--project", required=True)
    parser.add_argument("--name")
    parser.add_argument("--trackio-dir", type=Path)
    parser.add_argument("--interval-s", type=float, default=10.0)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent; its last metrics still come
    closed = threading.Event()

    def wait_for_parent() -> None:
        while sys.stdin.buffer.read(1024):
            pass
        closed.set()

    threading.Thread(target=wait_for_parent, daemon=True).start()
    try:
        follow(
            options.run_dir,
            options.project,
            options.name,
            options.trackio_dir,
            stop=closed,
            interval_s=options.interval_s,
        )
    except MoekitError as refused:
        print_problems(refused.problems)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
