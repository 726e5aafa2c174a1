"""The rows of a shard's source, counted where that is cheap: a parquet file says how many it has."""

from __future__ import annotations

import importlib
from pathlib import Path

from moekit.data.plan import InputFile, Plan, ShardRecord


def compare_rows(plan: Plan, task: int, record: ShardRecord) -> tuple[str | None, str | None]:
    """What is wrong with a shard's rows, a clause that follows its name; and a note where the source was not read."""
    listed = record.documents + record.empty + record.not_kept
    if listed != record.rows:
        said = f"{record.documents:,} documents, {record.empty:,} empty and {record.not_kept:,} left out"
        return f"was made of {record.rows:,} rows, and {said} are {listed:,}", None
    if plan.format != "parquet" or plan.is_sample:
        return None, "rows were compared with the records only: counting those of this source means reading it"
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        return None, "rows were compared with the records only: `pip install 'moekit[data]'` reads the source's"
    rows = 0
    for file in plan.files_of(task):
        if not _is_unchanged(file):
            return None, f"rows were not compared with the source, which is not here as it was read: {file.path}"
        try:
            rows += parquet.read_metadata(file.path).num_rows
        except Exception as problem:  # pyarrow's own kinds: a file that is no parquet any more
            return None, f"rows were not compared with the source, which cannot be read: {file.path}: {problem}"
    if rows != record.rows:
        return f"was made of {record.rows:,} rows, and its source has {rows:,}", None
    return None, None


def _is_unchanged(file: InputFile) -> bool:
    try:
        stat = Path(file.path).stat()
    except OSError:
        return False
    return stat.st_size == file.size_bytes and file.version in (None, str(stat.st_mtime_ns))
