"""The events of a Chrome trace, one batch after another: the file may be gigabytes, the memory stays that of a batch.

A batch is cut where an event ends and another begins, and such a place is known by trying: cut inside an event or
inside a text, what stands before it is no JSON. Where trying fails, the brackets are counted.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from moekit.problems import MoekitError, error

BATCH = 1 << 20
"""Bytes read at once."""
MOST = 1 << 26
"""Bytes that one event, or what stands before the events, may take."""
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}"]', re.DOTALL)
_TRIES = 4


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked where it is gzipped.

    Raises:
        MoekitError: it cannot be read, or what is packed in it is damaged.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            yield gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[misc]
    except EOFError:
        raise _torn(path) from None
    except (gzip.BadGzipFile, zlib.error):
        raise error(
            f"`{path}` is damaged: its gzip data cannot be unpacked", "copy it again, or record it again"
        ) from None
    except OSError as failure:
        raise error(f"cannot read `{path}`: {str(failure.strerror).lower()}") from None


def events(path: Path, head: dict[str, Any]) -> Iterator[list[Any]]:
    """Batches of the events; `head` is given what the file says before them.

    Raises:
        MoekitError: it is no trace, or ends in the middle.
    """
    with opened(path) as stream:
        buffer = _skip_head(stream, path, head)
        wanted = BATCH
        while True:
            data = stream.read(wanted)
            buffer += data
            parsed, buffer, ended = _take(buffer, path, last=not data)
            if parsed:
                yield parsed
            if ended:
                return
            if not data:
                raise _torn(path)
            if len(buffer) > MOST:
                raise error(f"`{path}` has an event of more than {MOST >> 20} MiB, so it is no profiler's trace")
            wanted = max(BATCH, len(buffer))


def _skip_head(stream: BinaryIO, path: Path, head: dict[str, Any]) -> bytes:
    """The bytes behind the bracket that opens the events."""
    buffer = b""
    while True:
        data = stream.read(BATCH)
        buffer += data
        start = buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
        if start[:1] == b"[":
            return start[1:]
        found = _BEGIN.search(buffer)
        if start[:1] == b"{" and found:
            try:
                said = json.loads(buffer[: found.end()] + b"]}")
            except (ValueError, RecursionError):
                said = {}
            head.update(said if isinstance(said, dict) else {})
            return buffer[found.end() :]
        if not data or len(buffer) > MOST or (start and start[:1] != b"{"):
            what = f"`{path}` is no trace: it has no list `traceEvents`"
            raise error(
                what, "a trace of PyTorch's profiler is `rank-R.json.gz`, an export of Nsight Systems `.sqlite`"
            )


def _take(buffer: bytes, path: Path, last: bool) -> tuple[list[Any], bytes, bool]:
    """The whole events at the front, the bytes behind them, and whether the list has ended."""
    if not last:
        cuts = [found.span() for found in _BETWEEN.finditer(buffer, max(0, len(buffer) - (1 << 16)))]
        for begin, end in reversed(cuts[-_TRIES:]):
            try:
                return _parse(buffer[: begin + 1]), buffer[end:], False
            except ValueError:
                continue
    whole, ended = _whole(buffer)
    text = buffer[:whole].strip(b" \t\r\n,")
    try:
        parsed = _parse(text) if text else []
    except ValueError:
        parsed = _leniently(text, path)
    return parsed, buffer[whole:].lstrip(b" \t\r\n,"), ended


def _whole(buffer: bytes) -> tuple[int, bool]:
    """Where the last whole event ends, and whether the bracket that closes the list follows."""
    depth, whole = 0, 0
    for found in _TOKEN.finditer(buffer):
        token = found.group()
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
            if depth < 0:
                return found.start(), True
            if depth == 0:
                whole = found.end()
        elif token == b'"':  # a text that goes on behind the buffer
            break
    return whole, False


def _parse(text: bytes) -> list[Any]:
    """Events with commas between them; `ValueError` where they are no JSON."""
    try:
        import orjson
    except ImportError:
        return list(json.loads(b"[" + text + b"]"))
    return list(orjson.loads(b"[" + text + b"]"))


def _leniently(text: bytes, path: Path) -> list[Any]:
    """The same of what profilers write against the rules: NaN, control characters, broken UTF-8."""
    try:
        return list(json.loads("[" + text.decode("utf-8", "replace") + "]", strict=False))
    except (ValueError, RecursionError):
        what = f"`{path}` is no trace: between its events stands what is no JSON"
        raise error(what, "record it again; a file that was edited or cut cannot be read") from None


def _torn(path: Path) -> MoekitError:
    return error(f"`{path}` ends in the middle", "the run ended while it was written; record it again")
