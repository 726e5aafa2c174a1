"""Keeps two processes from making the same shards, on this machine or on two that share the folder.

One file, `.lock`, has a byte for each shard. A process that makes a shard holds its byte, one that makes all holds them
all; the system lets go of them when it ends, however it does.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from moekit.data.plan import DataFolder
from moekit.data.planning import unwritable
from moekit.problems import error


@contextmanager
def locked(folder: DataFolder, first: int, tasks: int) -> Iterator[None]:
    """Hold the shards `first` to `first + tasks - 1`; makes the folder if it is not there.

    Raises:
        MoekitError: another process holds one of them, or the file system has no locks, or the folder takes no file.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        file = folder.lock.open("a")
    except OSError as reason:
        raise unwritable(folder.path, reason) from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, tasks, first)
        except OSError as reason:
            if reason.errno in (errno.EAGAIN, errno.EACCES):
                what = "another moekit is tokenizing here" if tasks != 1 else f"another moekit is making shard {first}"
                raise error(what, "wait for it, or stop it", str(folder.path)) from None
            hint = "keep the folder on one that has: NFS with its lock service, Lustre mounted with `flock`"
            raise error(
                f"this file system has no locks: {str(reason.strerror).lower()}", hint, str(folder.path)
            ) from None
        yield
