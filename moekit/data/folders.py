"""Folders that are whole if they are there, however many processes make them and however those end."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` work in a temporary folder beside `folder`, then rename it. Only one process may do so at a time."""
    temporary = folder.with_name(f".tmp-{folder.name}")
    if temporary.exists():  # a killed run's
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        fill(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def locked(path: Path, waiting: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the file `path` against other processes and remove it afterwards. A killed process lets go of it.

    `progress` is told `waiting` where another process holds it.
    """
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(waiting)
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(path, file):
                continue  # its last holder has removed it while this process waited
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
