"""The documents of one input file, one after the other: those with text that are kept, and how many are not.

moekit reads the files itself: datatrove's readers leave out a line that is no JSON, and what follows a byte that is no
UTF-8, with a warning alone (datatrove/pipeline/readers/jsonl.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from lzma import LZMAError
from typing import Any

from moekit.data.plan import InputFile, Plan
from moekit.data.sources import decompressed, opened
from moekit.problems import MoekitError, error, shortened

READ_BYTES = 16 * 2**20
"""Text that is read from a parquet file at a time, as far as its rows are of the same length."""
MOST_ROWS = 1024


@dataclass
class Tally:
    """How far the reading of a file has come."""

    rows: int = 0
    empty: int = 0
    not_kept: int = 0
    documents: int = 0
    share: float = 0.0
    """Of the file, from 0 to 1."""


def texts_of(file: InputFile, plan: Plan, tally: Tally) -> Iterator[str]:
    """The texts of a file that become documents, in order; `tally` counts along.

    A document is kept by its id (`is_kept`); a text that is null or has no letter is left out.

    Raises:
        MoekitError: the file cannot be read to its end, a row is not of its form, or it has no column of that name.
    """
    rows = _parquet_rows(file, plan, tally) if plan.format == "parquet" else _jsonl_rows(file, plan, tally)
    for text, identity in rows:
        tally.rows += 1
        if plan.keep_fraction is not None and not is_kept(identity, plan.keep_fraction):
            tally.not_kept += 1
        elif not text:
            tally.empty += 1
        else:
            tally.documents += 1
            yield text
            if tally.documents == plan.limit:
                return


def is_kept(identity: str, fraction: float) -> bool:
    """Whether a document is among the share that is kept: so says a hash of its id, whatever file it lies in."""
    number = int.from_bytes(blake2b(identity.encode(), digest_size=8).digest(), "big")
    return number < fraction * 2**64


def _parquet_rows(file: InputFile, plan: Plan, tally: Tally) -> Iterator[tuple[str | None, str]]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    columns = [plan.text_key] if plan.keep_fraction is None else [plan.text_key, plan.id_key]
    try:
        with opened(file.path) as stream, parquet.ParquetFile(stream) as table:
            _check_columns(table.schema_arrow, columns, file.path)
            facts = table.metadata
            row_bytes = sum(facts.row_group(at).total_byte_size for at in range(facts.num_row_groups)) // max(
                facts.num_rows, 1
            )
            at_once = min(max(READ_BYTES // max(row_bytes, 1), 1), MOST_ROWS)
            done = 0
            for batch in table.iter_batches(at_once, columns=columns, use_threads=False):
                texts = batch.column(plan.text_key).to_pylist()
                ids = [""] * len(texts) if len(columns) == 1 else batch.column(plan.id_key).to_pylist()
                for row, (text, identity) in enumerate(zip(texts, ids, strict=True), done):
                    tally.share = (row + 1) / facts.num_rows
                    yield text, _identity(identity, plan, f"{file.path}, row {row}")
                done += len(texts)
            if done != facts.num_rows:
                raise _unreadable(file.path, f"it ends after {done:,} of {facts.num_rows:,} rows")
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as reason:
        raise _unreadable(file.path, reason) from None


def _check_columns(schema: Any, columns: list[str], path: str) -> None:
    """Both columns must be there, and the first hold text."""
    from pyarrow import types

    for column, key in zip(columns, ("text_key", "id_key"), strict=False):
        if schema.names.count(column) != 1:
            has = ", ".join(f"`{name}`" for name in schema.names)
            what = f"the file has no column `{column}`, but {shortened(has) or 'none at all'}"
            raise error(what, f"say in the data set's `{key}` which it is", path)
    kind = schema.field(columns[0]).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    if not any(fits(value) for fits in is_text):
        what = f"the column `{columns[0]}` holds {kind} and no text"
        raise error(what, "say in the data set's `text_key` which column does", path)


def _jsonl_rows(file: InputFile, plan: Plan, tally: Tally) -> Iterator[tuple[str | None, str]]:
    import orjson

    with_text, keys = False, ""
    try:
        with opened(file.path) as packed:
            for number, line in enumerate(decompressed(file.path, packed), 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    continue
                where = f"{file.path}:{number}"
                row = _parsed(orjson.loads, line, where)
                text = row.get(plan.text_key)
                if text is not None and not isinstance(text, str):
                    raise error(f"`{plan.text_key}` is no text, but {type(text).__name__}", "correct the line", where)
                with_text = with_text or plan.text_key in row
                keys = keys or ", ".join(f"`{key}`" for key in row)
                tally.share = packed.tell() / max(file.size_bytes, 1)
                yield text, "" if plan.keep_fraction is None else _identity(row.get(plan.id_key), plan, where)
    except (OSError, EOFError, zlib.error, LZMAError, ValueError) as reason:
        raise _unreadable(file.path, reason) from None
    if tally.rows and not with_text:
        what = f"no line has the key `{plan.text_key}`; the first has {shortened(keys) or 'none at all'}"
        raise error(what, "say in the data set's `text_key` which it is", file.path)


def _parsed(loads: Any, line: bytes, where: str) -> dict[str, Any]:
    """One line's object; a half of a character, as `\\ud800`, is none, nor is what no UTF-8 spells."""
    try:
        row = loads(line)
    except ValueError as reason:
        raise error(f"the line is no JSON: {reason}", "correct the line, or take it out", where) from None
    if not isinstance(row, dict):
        raise error("the line is no JSON object", "is `format: jsonl` right?", where)
    return row


def _identity(identity: object, plan: Plan, where: str) -> str:
    """A document's id as it is hashed."""
    if isinstance(identity, str):
        return identity
    if isinstance(identity, int) and not isinstance(identity, bool):
        return str(identity)
    what = f"the document has no id in `{plan.id_key}`, and `keep_fraction` chooses by that"
    raise error(what, "name another `id_key`, or leave `keep_fraction` out", where)


def _unreadable(path: str, reason: object) -> MoekitError:
    told = str(reason).strip().partition("\n")[0] or type(reason).__name__
    return error(f"cannot be read to its end: {shortened(told)}", "fetch the file again, or take it out", path)
