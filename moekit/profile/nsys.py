"""Nsight Systems' SQLite exports to timelines, after the schema in its documentation ("SQLite Export Schema").

Tables and columns read: `CUPTI_ACTIVITY_KIND_KERNEL` (start, end in ns, deviceId, globalPid, streamId, demangledName,
shortName), `..._MEMCPY` and `..._MEMSET` (start, end, deviceId, globalPid, streamId), `StringIds` (id, value). Tables
are there only where something is in them. No export of a real run was at hand: tests build theirs from that schema.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from moekit.problems import error
from moekit.profile.families import OTHER, PERMUTE, is_unnamed_send, of_kernel
from moekit.profile.timeline import Recorder, Timeline

SOURCE = "Nsight Systems"
_KERNELS, _COPIES, _FILLS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))


def read(path: Path, steps: int | None) -> list[Timeline]:
    """A timeline for each device of an export; `steps` is how many were recorded, which it does not say itself.

    Raises:
        MoekitError: it is no such export, is damaged, or has no kernels.
    """
    devices: dict[_Place, Recorder] = {}
    skipped = 0
    try:
        address = path.absolute().as_uri() + "?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as database:
            _check(database, path)
            skipped += _kernels(database, devices)
            for table, family in ((_COPIES, PERMUTE), (_FILLS, OTHER)):
                skipped += _others(database, table, family, devices)
    except (sqlite3.Error, OverflowError, TypeError, ValueError) as failure:
        raise error(f"`{path}` cannot be read as an export of Nsight Systems: {failure}", _HINT) from None
    if not any(map(len, devices.values())):
        raise error(f"`{path}` has no kernels", "the profiled steps were not reached, or CUDA was not traced")
    shared = len({number for number, _ in devices}) < len(devices)
    return [
        Timeline(
            f"{path.stem} device {number}" + (f" process {process >> 24 & 0xFFFFFF}" if shared else ""),
            SOURCE,
            False,
            steps,
            device.parts(),
            device.window(),
            device.unnamed_sends,
            skipped,
        )
        for (number, process), device in sorted(devices.items())
    ]


_Place = tuple[int, int]
"""Device, and process as the export has it: where each sees one device alone, all of them are device 0."""
_HINT = "make it by `nsys export --type sqlite REPORT.nsys-rep`"


def _check(database: sqlite3.Connection, path: Path) -> None:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "StringIds" not in tables and not any(name.startswith("CUPTI_") for name in tables):
        raise error(f"`{path}` is an SQLite file, but no export of Nsight Systems", _HINT)
    if _KERNELS not in tables:
        raise error(f"`{path}` has no kernels", "the profiled steps were not reached, or CUDA was not traced")


def _kernels(database: sqlite3.Connection, devices: dict[_Place, Recorder]) -> int:
    """Record them; how many have no time, which CUPTI says by zeros."""
    skipped = 0
    names: dict[int, str] = dict(database.execute("SELECT id, value FROM StringIds"))
    columns = f'start, "end", deviceId, {_process(database, _KERNELS)}, streamId, demangledName, shortName'
    rows = database.execute(f"SELECT {columns} FROM {_KERNELS}")
    for begin, end, device, process, stream, long_name, short_name in rows:
        if not _is_time(begin, end):
            skipped += 1
            continue
        name = str(names.get(long_name) or names.get(short_name) or "")
        recorder = devices.setdefault((int(device), int(process)), Recorder())
        recorder.unnamed_sends += is_unnamed_send(name)
        recorder.add(f"stream {stream}", of_kernel(name), int(begin), int(end))
    return skipped


def _others(database: sqlite3.Connection, table: str, family: str, devices: dict[_Place, Recorder]) -> int:
    """The same of copies and fills."""
    skipped = 0
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
        return 0
    columns = f'start, "end", deviceId, {_process(database, table)}, streamId'
    for begin, end, device, process, stream in database.execute(f"SELECT {columns} FROM {table}"):
        if not _is_time(begin, end):
            skipped += 1
        elif (recorder := devices.get((int(device), int(process)))) is not None:
            recorder.add(f"stream {stream}", family, int(begin), int(end))
    return skipped


def _process(database: sqlite3.Connection, table: str) -> str:
    """The column with the process; some versions have none."""
    columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
    return "globalPid" if "globalPid" in columns else "0"


def _is_time(begin: object, end: object) -> bool:
    return isinstance(begin, int) and isinstance(end, int) and 0 < begin <= end
