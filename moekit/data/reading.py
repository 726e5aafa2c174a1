"""How far a long reading of files has come: a bar on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moekit.data.checking.pair import Progress

LINE_EVERY_S = 30.0


@contextmanager
def reading(what: str, total_bytes: int) -> Iterator[Progress]:
    """Show on standard error how many of the bytes were read; several threads may tell of theirs."""
    if sys.stderr.isatty():
        with _bar(what, total_bytes) as progress:
            yield progress
        return
    lock, began = threading.Lock(), time.monotonic()
    read, told = 0, began

    def progress_line(size_bytes: int) -> None:
        nonlocal read, told
        with lock:
            read += size_bytes
            if (now := time.monotonic()) - told < LINE_EVERY_S:
                return
            told = now
            gib, of_gib = read / 2**30, total_bytes / 2**30
            print(f"{what}: {gib:.1f} of {of_gib:.1f} GiB, {gib / (now - began):.2f} GiB/s", file=sys.stderr)

    yield progress_line


@contextmanager
def _bar(what: str, total_bytes: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)
