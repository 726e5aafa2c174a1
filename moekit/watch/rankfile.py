"""Lines of JSON that another process appends, read by position: half lines wait, restarts are recognised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INDEX = re.compile(rb'\{"(?:iter|step)": (\d+)[,}]')


def parse(line: bytes, field: str) -> dict[str, Any] | None:
    """The record of a line that starts with `field`, or None if it cannot be read.

    A process that was killed leaves half a line, and the next one appends its first record right behind it: where a
    line holds several starts, the last one is the record.
    """
    try:
        record = json.loads(line[max(line.rfind(b'{"%b"' % field.encode()), 0) :])
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get(field), int) else None


class Tail:
    """The lines of a file that grows; `offset` is behind the last whole line taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def grown(self) -> bool:
        """Whether there is more of it than was taken, be it half a line."""
        try:
            return self.path.stat().st_size > self.offset
        except OSError:
            return False

    def lines(self, limit_bytes: int | None = None) -> Iterator[bytes]:
        """The whole lines not yet taken, none while the file is not there; stops after about `limit_bytes`."""
        end = None if limit_bytes is None else self.offset + limit_bytes
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n") or (end is not None and self.offset >= end):
                    return
                self.offset += len(line)
                yield line


def _index(line: bytes, field: str) -> int | None:
    """The value of `field`, without reading the rest of a long line where Megatron's own spelling allows it."""
    start = max(line.rfind(b'{"%b"' % field.encode()), 0)
    if match := _INDEX.match(line, start, start + 40):
        return int(match[1])
    record = parse(line, field)
    return None if record is None else int(record[field])


@dataclass
class _Stretch:
    """A part of a file through which the index never falls; `index` is what is found at `offset`, None at the end."""

    offset: int
    end: int
    index: int | None


class RankFile:
    """One rank's records by index (`iter` or `step`), each index taken once, in rising order over all restarts.

    Between two calls only positions are kept: neither lines nor an open file, so thousands of these may live at once.
    """

    def __init__(self, path: Path, field: str) -> None:
        self.path = path
        self._field = field
        self._stretches = list(self._scan())

    def _scan(self) -> Iterator[_Stretch]:
        """Find where the index falls back, which is where a restart begins to write again."""
        if not self.path.exists():
            return
        stretch, last, offset = None, 0, 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                index = _index(line, self._field)
                if index is not None and (stretch is None or index < last):
                    if stretch is not None:
                        yield stretch
                    stretch = _Stretch(offset, offset, index)
                offset += len(line)
                if stretch is not None:
                    stretch.end = offset
                    last = last if index is None else index
        if stretch is not None:
            yield stretch

    @property
    def next_index(self) -> int | None:
        """The smallest index not yet taken."""
        return min((s.index for s in self._stretches if s.index is not None), default=None)

    def take(self, index: int) -> Iterator[dict[str, Any]]:
        """The records at `index`, those of later restarts last; to be used up before anything else is asked."""
        for stretch in self._stretches:
            if stretch.index == index:
                yield from self._read(stretch, index)

    def skip(self, index: int) -> None:
        """Pass over what is left at `index`."""
        for _ in self.take(index):
            pass

    def _read(self, stretch: _Stretch, index: int) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") as file:
            file.seek(stretch.offset)
            while stretch.offset < stretch.end:
                line = file.readline()
                here = _index(line, self._field)
                if here is not None and here != index:
                    stretch.index = here
                    return
                stretch.offset += len(line)
                if here is not None and (record := parse(line, self._field)) is not None:
                    yield record
        stretch.index = None
