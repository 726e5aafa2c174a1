"""Trackio's data on disk, written so that a row counts once however often it is sent.

Trackio's `init` and `log` are not used: they give rows random ids and the time of sending, drop what fails with a
warning, and ask the Hugging Face hub who the user is, without a time limit. Used instead are the two functions by which
Trackio keeps its own fragments (0.43, trackio/fragments.py: `import_records`, `FragmentWriter.write_local`). A fragment
names its row's id, and Trackio's table takes an id once (trackio/sqlite_storage.py:2122, `INSERT OR IGNORE`).
"""

from __future__ import annotations

import importlib.util
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moekit.problems import error

Row = dict[str, Any]
"""One of Trackio's fragments: a metric row or an alert."""


class Storage:
    """The data of one project. On network file systems, where SQLite is not safe, rows wait in Trackio's inbox.

    Trackio reads its directory when it is imported, so a process serves one. Raises `MoekitError` where Trackio is not
    installed or refuses the project's name.
    """

    def __init__(self, trackio_dir: Path, project: str) -> None:
        need_trackio()
        trackio_dir.mkdir(parents=True, exist_ok=True)
        os.environ["TRACKIO_DIR"] = str(trackio_dir)
        from trackio import fragments, utils
        from trackio.sqlite_storage import SQLiteStorage

        if trackio_dir != utils.TRACKIO_DIR:
            raise RuntimeError(f"trackio was imported for {utils.TRACKIO_DIR} in this process, not for {trackio_dir}")
        try:
            SQLiteStorage.validate_project_name(project)
        except ValueError as refused:
            raise error(f"Trackio has no project `{project}`: {str(refused).rstrip('.')}") from None
        self._places: tuple[Path, ...] = (SQLiteStorage.get_project_db_path(project), fragments.local_inbox_dir())
        in_sqlite = utils.get_storage_mode() == "sqlite"
        self.send = fragments.import_records if in_sqlite else fragments.FragmentWriter().write_local
        """Takes a list of rows; raises where they could not be kept."""

    def has_data(self) -> bool:
        """Whether anything is there."""
        return any(place.exists() for place in self._places)


def need_trackio() -> None:
    """Raise `MoekitError` where Trackio is not installed."""
    if importlib.util.find_spec("trackio") is None:
        raise error("the dashboard needs trackio", "run `pip install 'moekit[track]'`")


def time_stamp(at: float) -> str:
    """Seconds since the epoch as Trackio writes them."""
    return datetime.fromtimestamp(at, UTC).isoformat()
