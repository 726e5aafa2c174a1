"""A child process that does not outlive its parent."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; a fork does not inherit it


def die_with_parent() -> None:
    """From here on, be killed when the process that started this one ends, however it does (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
