"""Columns of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(rows: Sequence[tuple[str, ...]], left: int) -> Iterator[str]:
    """Columns under each other; the first `left` of them flush left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()
