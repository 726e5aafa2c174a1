"""How this rank ended: `attempts/N/exit/rankR.json`, since torchrun reports every failure as exit code 1.

A rank that leaves no record was killed (SIGKILL, out of memory, a lost node). One that has recorded its end does not
take the interpreter apart: see `leave_when_all_is_done`.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, Iterator


@contextmanager
def no_failure_of_training(path: Path) -> Iterator[None]:
    """Say that our own file `path` could not be written or removed, instead of raising."""
    try:
        yield
    except OSError as failure:
        text = f"{type(failure).__name__}: {failure}"
        print(f"moekit: `{path}` is missing or of an earlier start: {text}", file=sys.stderr, flush=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as a whole or not at all; folders are made. A disk's failure is said, not raised."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with no_failure_of_training(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value) + "\n")
        temporary.replace(path)


def record(path: Path, code: int, reason: str) -> None:
    """Say that this rank ends with exit code `code` (128 + n for signal n), and why."""
    write_json(path, {"code": code, "reason": reason, "time": time.time()})


def run_recorded(program: Callable[[], object], path: Path) -> None:
    """Run `program`, record its ending in `path`, and end as it did: nothing of the process comes after this call."""
    with no_failure_of_training(path):
        path.unlink(missing_ok=True)
    codes: list[int] = []
    leave_when_all_is_done(codes)
    try:
        program()
    except SystemExit as stop:
        # What `sys.exit` was given: nothing, a code, or a text that the interpreter prints, ending with 1.
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        record(path, code, f"SystemExit: {stop.code}")
        codes.append(code)
        raise
    except KeyboardInterrupt:
        record(path, 128 + signal.SIGINT, "SIGINT")
        raise
    except BaseException as failure:
        record(path, 1, f"{type(failure).__name__}: {failure}"[:2000])
        codes.append(1)
        raise
    record(path, 0, "ok")
    codes.append(0)


def leave_when_all_is_done(codes: list[int]) -> None:
    """End this process with the code in `codes`, if one is there by then, as the last of its exit handlers.

    Megatron ends with its process groups in place: a worker thread of Gloo may still be dropping the tensors of the
    last collective. A thread that asks for Python's lock when the interpreter is being taken apart is ended inside C++
    that cannot be left that way: `terminate called without an active exception`, SIGABRT, and a finished run counts as
    failed (pytorch/pytorch#190489; #38228 for any operation of PyTorch in a daemon thread). `destroy_process_group`
    would not cover those, and may wait for a rank that is gone.

    What an end is for has happened by then: the interpreter has printed the traceback, joined the threads that are no
    daemons, and called the handlers registered after this call (the metrics', Megatron's, multiprocessing's).
    """

    def leave() -> None:
        if not codes:
            return
        for flush in (sys.stdout.flush, sys.stderr.flush, lambda: ctypes.CDLL(None).fflush(None)):
            with suppress(Exception):
                flush()
        os._exit(codes[0])

    atexit.register(leave)


def record_sigterm(path: Path, after: Callable[[], object]) -> None:
    """On SIGTERM (torchrun stopping the ranks, Slurm preempting the job) record, call `after`, and end at once.

    A thread does it, woken by the signal's wakeup descriptor: the main thread may be waiting in a collective for a rank
    that is gone, and would not reach a Python handler before torchrun's SIGKILL. Where Megatron installs a handler of
    its own (`--exit-signal-handler`), that one decides.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def ours(signum: int, frame: object) -> None:
        """Wake the thread, in case another descriptor (asyncio's) has taken the place of ours, which does it sooner."""
        os.write(write_end, bytes([signum]))

    def wait() -> None:
        while True:
            if signal.SIGTERM in os.read(read_end, 64) and signal.getsignal(signal.SIGTERM) is ours:
                try:
                    if not path.exists():  # else it had ended by itself and was on its way out
                        record(path, 128 + signal.SIGTERM, "SIGTERM")
                    after()
                finally:
                    os._exit(128 + signal.SIGTERM)

    def hold() -> None:
        """Before a fork: the child's SIGTERM waits until `forget`; till then its descriptor is this rank's."""
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def forget() -> None:
        """In a forked child (a data loader's worker): its SIGTERM is its own, or that of Megatron's handler."""
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()

    masks: list[set[int]] = []
    signal.signal(signal.SIGTERM, ours)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=forget)
    threading.Thread(target=wait, name="moekit-sigterm", daemon=True).start()
