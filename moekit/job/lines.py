"""Lines appended to a file by a thread of its own: no disk can hold up whoever has something to say.

A shared file system may hang for minutes, and then goes on. Meanwhile lines wait in memory, `MOST_WAITING` of them;
more are dropped. What a disk refuses is lost, and the next line begins on a line of its own.
"""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Any, Callable

MOST_WAITING = 10_000  # some 50 MB of steps with a hundred metrics
IDLE_SECONDS = 1.0


class Lines:
    """The end of `path`; the file and its folder are made by the thread.

    `idle`: called by the thread whenever nothing came for `IDLE_SECONDS`.
    `failed`: called with what went wrong, as a text, as often as it does; by the thread, or where lines are dropped.
    """

    def __init__(self, path: Path, idle: Callable[[], object], failed: Callable[[str], object]) -> None:
        self._path, self._idle, self._failed = path, idle, failed
        # Its `put` may come inside another one (a signal handler, a destructor), unlike that of a `Queue`.
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._descriptor: int | None = None
        self._torn = False
        threading.Thread(target=self._work, name="moekit-metrics", daemon=True).start()

    def add(self, line: str) -> None:
        """Have `line` written; returns at once."""
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(line)
        else:
            self._failed(f"`{self._path}` takes nothing any more, {MOST_WAITING} lines wait for it")

    def wait(self, seconds: float) -> bool:
        """Wait until all lines so far are in the file (or lost), for `seconds` at the most; whether they are."""
        reached = threading.Event()
        self._waiting.put(reached)
        return reached.wait(seconds)

    def _work(self) -> None:
        while True:
            try:
                self._take(self._waiting.get(timeout=IDLE_SECONDS))
            except queue.Empty:
                self._idle()
            except Exception as failure:  # a thread that ended would write nothing more
                self._failed(f"`{self._path}`: {type(failure).__name__}: {failure}")

    def _take(self, item: str | threading.Event) -> None:
        if isinstance(item, threading.Event):
            item.set()
            return
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        rest = b"\n" * self._torn + item.encode() + b"\n"
        self._torn = True
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._torn = False
