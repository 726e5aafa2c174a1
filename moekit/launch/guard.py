"""Runs a command so that nothing of it outlives the process that asked for it, however that one ends.

    python guard.py COMMAND ARGUMENT ...

Standard input is a pipe that the asking process holds open. When it closes, which SIGKILL of the holder does too, the
command gets SIGTERM and `GRACE_S` seconds; then everything it started, in whatever session, gets SIGKILL. (torchrun's
workers have sessions of their own, so a signal to a process group would miss them.) The exit code is the command's,
128 + n for signal n. Linux only; standard library only, since it starts anew with every launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 10.0
_POLL_S = 0.2
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(command: list[str]) -> int:
    """Run `command` to its end or to that of standard input; its exit code."""
    asked: list[int] = []
    for ending in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ending, lambda number, _: asked.append(number))
    # Orphans of the command become children of this process instead of init's, and so stay findable.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None and not asked and not _closed(sys.stdin.fileno()):
        pass
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    code = process.poll()
    kill_descendants()
    if code is None:
        code = process.wait()
    return 128 - code if code < 0 else code


def _closed(descriptor: int) -> bool:
    """Whether the other end of a pipe is gone; waits up to `_POLL_S` for that."""
    readable, _, _ = select.select([descriptor], [], [], _POLL_S)
    return bool(readable) and not os.read(descriptor, 1)


def kill_descendants(within_s: float = 5.0) -> None:
    """SIGKILL to everything that descends from this process, until nothing does."""
    deadline = time.monotonic() + within_s
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def descendants(root: int) -> set[int]:
    """The processes that descend from `root` and have not ended."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # pid (name) state ppid ...; a name may hold spaces and parentheses
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
        found.update(below)
        waiting += below
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
