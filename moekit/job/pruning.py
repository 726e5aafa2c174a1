"""Old checkpoints deleted while a run trains, by rank 0.

A thread watches Megatron's file that names the last checkpoint, which changes once that one is whole, however it was
saved; no part of Megatron is changed for it. Where deleting fails, that is said, and training goes on.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator

POLL_S = 2.0


@contextmanager
def pruned(folder: Path, keep_last: int, keep_every: int | None) -> Iterator[None]:
    """Prune a run's `checkpoints/` while the block runs, and once more at its end if that is no failure."""
    import checkpoints  # type: ignore[import-not-found]

    over, lock = threading.Event(), threading.Lock()

    def prune() -> None:
        with lock:
            try:
                if gone := checkpoints.prune(folder, keep_last, keep_every):
                    print(f"moekit: deleted the checkpoints of iterations {', '.join(map(str, gone))}", flush=True)
            except Exception as failure:
                text = f"{type(failure).__name__}: {failure}"
                print(f"moekit: an old checkpoint could not be deleted: {text}", file=sys.stderr, flush=True)

    def watch() -> None:
        seen = None
        while not over.wait(POLL_S):
            with suppress(OSError):
                if (now := checkpoints.tracked(folder)) != seen:
                    seen = now
                    prune()

    threading.Thread(target=watch, name="moekit-pruning", daemon=True).start()
    try:
        yield
    except SystemExit as stop:
        over.set()
        if not stop.code:
            prune()
        raise
    finally:
        over.set()
    prune()
