"""`moekit dashboard`: Trackio's dashboard on a project's metrics, in this process until Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from moekit.problems import Problem, error, print_problems
from moekit.track.feed import Feed
from moekit.track.lock import RunLock
from moekit.track.storage import Storage

_SETTLE_EVERY_S = 15.0
"""As often Trackio takes in what waits, while it serves (trackio/utils.py, `get_inbox_poll_interval`)."""


@dataclass(frozen=True)
class Served:
    """A dashboard that is being served by a thread of this process, on 127.0.0.1."""

    url: str
    write_url: str
    """The same, with the right to rename and delete runs."""
    port: int
    close: Callable[[], None]


def bring(run_dir: Path, storage: Storage) -> None:
    """Send what Trackio lacks of a run; nothing where somebody follows it. What hinders that is said."""
    lock = RunLock(run_dir)
    try:
        if not lock.take():
            Feed(run_dir, storage).send_all()
    except (OSError, sqlite3.Error) as failure:
        what = f"what is new of `{run_dir.name}` is not shown: {str(failure).lower()}"
        print_problems([Problem("", what, "who launched a run tracks it", "warning")])
    finally:
        lock.release()


def serve(storage: Storage, run: str | None, port: int | None) -> Served:
    """Serve the dashboard; rows that wait are taken in first.

    Args:
        storage: the project's.
        run: one that must be there.
        port: that one or none; None is the first free one from 7860 on.

    Raises:
        MoekitError: there are no metrics, or the port is taken.
    """
    storage.settle()
    _need_metrics(storage, run)
    import trackio

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            app, url, _, write_url = trackio.show(
                project=storage.project,
                open_browser=False,
                block_thread=False,
                host="127.0.0.1",
                share=False,
                server_port=port,
            )
    except OSError:
        taken = f"port {port} is taken, or not yours" if port else "no port from 7860 on is free"
        raise error(taken, "give another with `--port`") from None
    shown = f"{url.rstrip('/')}/?project={quote(storage.project)}"
    return Served(shown, write_url, urlsplit(url).port or 0, lambda: app.close(verbose=False))


def keep(storage: Storage, say: Callable[[str], None]) -> None:
    """Wait for Ctrl-C, which raises KeyboardInterrupt; of runs whose rows wait, later attempts win all the while."""
    said = ""
    while True:
        time.sleep(_SETTLE_EVERY_S)
        if storage.in_sqlite:
            continue  # their followers see to it
        try:
            storage.settle()
        except Exception as failure:  # a full disk, a locked database: the dashboard shows what it has
            words = f"{type(failure).__name__}: {failure}; trying again"
            if words != said:
                say(words)
            said = words


def _need_metrics(storage: Storage, run: str | None) -> None:
    runs = storage.runs()
    track = "`moekit track RUN` brings the metrics of a run of Slurm"
    if not runs:
        raise error(f"there are no metrics of project `{storage.project}` in {storage.trackio_dir} yet", track)
    if run is not None and run not in runs:
        raise error(f"run `{run}` has no metrics yet", "`moekit status` says how far it is")
