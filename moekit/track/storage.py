"""Trackio's data on disk, written so that a row counts once however often it is sent.

Trackio's `init` and `log` are not used: they give rows random ids and the time of sending, drop what fails with a
warning, and ask the Hugging Face hub who the user is, without a time limit. Used instead are the two functions by which
Trackio keeps its own fragments (0.43, trackio/fragments.py: `import_records`, `FragmentWriter.write_local`). A fragment
names its row's id, and Trackio's table takes an id once (trackio/sqlite_storage.py:2122, `INSERT OR IGNORE`).

Trackio itself never takes a row back. What a later attempt trains again is therefore deleted here, under Trackio's own
lock and in one transaction, by whoever may write the database: the follower, or on network file systems the dashboard.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moekit.problems import error

Row = dict[str, Any]
"""One of Trackio's fragments: a metric row or an alert."""

_OURS = f"{'[0-9a-f]' * 32}.{'[0-9]' * 6}.*"
"""The ids of our rows, as SQLite's GLOB has it."""


def row_id(run_id: str, attempt: int, rest: str = "") -> str:
    """The id of a row; those of a run are in the order of its attempts, those of an attempt in the order of `rest`.

    `run_id` is 32 hexadecimal digits. Without `rest` it is below every id of the attempt, and above those before.
    """
    return f"{run_id}.{attempt:06}.{rest}"


class Storage:
    """The data of one project. On network file systems, where SQLite is not safe, rows wait in Trackio's inbox.

    Trackio reads its directory when it is imported, so a process serves one. Raises `MoekitError` where Trackio is not
    installed or refuses the project's name, OSError where its directory cannot be made.
    """

    def __init__(self, trackio_dir: Path, project: str, online: bool = False) -> None:
        need_trackio()
        trackio_dir.mkdir(parents=True, exist_ok=True)
        os.environ["TRACKIO_DIR"] = str(trackio_dir)
        if not online:
            os.environ["HF_HUB_OFFLINE"] = "1"  # the hub may hang, and nothing here needs it
        from trackio import fragments, utils
        from trackio.sqlite_storage import SQLiteStorage

        if trackio_dir != utils.TRACKIO_DIR:
            raise RuntimeError(f"trackio was imported for {utils.TRACKIO_DIR} in this process, not for {trackio_dir}")
        try:
            SQLiteStorage.validate_project_name(project)
        except ValueError as refused:
            raise error(f"Trackio has no project `{project}`: {str(refused).rstrip('.')}") from None
        self.project = project
        self.trackio_dir = trackio_dir
        self.in_sqlite = utils.get_storage_mode() == "sqlite"
        self._sqlite, self._fragments = SQLiteStorage, fragments
        self._database: Path = SQLiteStorage.get_project_db_path(project)
        self.send = fragments.import_records if self.in_sqlite else fragments.FragmentWriter().write_local
        """Takes a list of rows; raises where they could not be kept."""

    def has(self, row: str) -> bool:
        """Whether a row that was sent is still there. Of an inbox: whether there is anything, as it is emptied."""
        if not self.in_sqlite:
            return self._database.exists() or bool(self._fragments.local_inbox_dir().exists())
        return self.count(row) > 0

    def runs(self) -> list[str]:
        """The names of the runs that the database has."""
        return list(self._sqlite.get_runs(self.project))

    def count(self, row: str = "*") -> int:
        """The number of metric rows whose id matches a pattern of SQLite's GLOB."""
        if not self._database.exists():
            return 0
        with contextlib.suppress(sqlite3.OperationalError), self._connection() as connection:  # no tables yet
            return int(connection.execute("SELECT count(*) FROM metrics WHERE log_id GLOB ?", (row,)).fetchone()[0])
        return 0

    def forget(self, run_id: str, attempt: int, from_step: int) -> None:
        """Delete what earlier attempts logged from a step on: this one trains it again. Nothing, where rows wait."""
        if self.in_sqlite and self._database.exists():
            self._sqlite.init_db(self.project)  # a process killed while it made the database leaves one without tables
            self._forget([(run_id, from_step, row_id(run_id, 0), row_id(run_id, attempt))])

    def settle(self) -> None:
        """Take in the rows that wait, and delete of each run what its later attempts trained again.

        For the one process that may write the database where it lies on a network file system: the dashboard's.
        """
        self._fragments.import_inbox_dir()
        if self._database.exists():
            self._sqlite.init_db(self.project)
            with self._connection() as connection:
                begun = list(_attempts(connection))
            self._forget([(run, step, row_id(run, 0), row_id(run, attempt)) for run, attempt, step in begun])

    def _forget(self, what: list[tuple[str, int, str, str]]) -> None:
        with self._sqlite._get_process_lock(self.project), self._connection() as connection:
            connection.executemany(
                "DELETE FROM metrics WHERE run_id = ? AND step >= ? AND log_id >= ? AND log_id < ?", what
            )

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Trackio's own, which ends in a commit."""
        with self._sqlite._get_connection(self._database, row_factory=None) as connection:
            yield connection


def _attempts(connection: sqlite3.Connection) -> Iterator[tuple[str, int, int]]:
    """(run's id, attempt, its first step) of all attempts in a database, by jumps along the index of ids."""
    query = "SELECT log_id, step FROM metrics WHERE log_id > ? AND log_id GLOB ? ORDER BY log_id LIMIT 1"
    after = ""
    while found := connection.execute(query, (after, _OURS)).fetchone():
        run, attempt, _ = found[0].split(".", 2)
        yield run, int(attempt), found[1]
        after = row_id(run, int(attempt), "~")  # above all that `rest` may be


def need_trackio() -> None:
    """Raise `MoekitError` where Trackio is not installed."""
    if importlib.util.find_spec("trackio") is None:
        raise error("the dashboard needs trackio", "run `pip install 'moekit[track]'`")


def time_stamp(at: float) -> str:
    """Seconds since the epoch as Trackio writes them."""
    return datetime.fromtimestamp(at, UTC).isoformat()
