"""One follower a run: who holds its lock, wherever that process is."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

LOCK = "track.lock"
"""In the run directory: locked, not merely there, while somebody follows the run."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


class RunLock:
    """Held from `take` until `release`, or the process's end, however that comes.

    Where a file system has no locks nobody is kept out. Two followers send the same rows then, of which one counts.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._file: IO[str] | None = None

    def take(self) -> str:
        """Take the lock; who else holds it, empty if it is ours. Raises OSError where the directory is not writable."""
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as reason:
            if reason.errno not in _NO_LOCKS:
                file.seek(0)
                holder = file.read().strip()
                file.close()
                if isinstance(reason, BlockingIOError):
                    return holder or "another process"
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file
        return ""

    def release(self) -> None:
        """Let others follow the run."""
        if self._file is not None:
            self._file.close()
            self._file = None
