"""Numbers as characters: a curve of braille dots, and a strip of blocks for the load of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of a braille cell's dot by column and row."""
_BLOCKS = "·▁▂▃▄▅▆▇█"

Points = Sequence[tuple[float, float]]


def curve(
    line: Points,
    marks: Points,
    width: int,
    height: int,
    label: Callable[[float], str] = "{:.2f}".format,
    x_range: tuple[float, float] | None = None,
) -> list[str]:
    """`line` as a curve and `marks` as diamonds over it, with axes: `height` rows, then two of the x axis.

    The y axis is labelled with the largest, the middle and the smallest value; a dot column shows its points' mean.
    `x_range` is where the x axis goes to, the points' own range where None.
    """
    points = [*line, *marks]
    x_low, x_high = x_range or (min(x for x, _ in points), max(x for x, _ in points))
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    labels = {0: label(y_high), height // 2: label((y_high + y_low) / 2), height - 1: label(y_low)}
    margin = max(len(label) for label in labels.values())
    columns = width - margin - 2

    def dot(x: float, y: float) -> tuple[int, int]:
        across = (x - x_low) / ((x_high - x_low) or 1.0)
        down = (y_high - y) / ((y_high - y_low) or 1.0)
        return round(across * (2 * columns - 1)), round(down * (4 * height - 1))

    cells = [["\u2800"] * columns for _ in range(height)]
    for column, row in _connected([dot(x, y) for x, y in line]):
        cell = cells[row // 4][column // 2]
        cells[row // 4][column // 2] = chr(ord(cell) | _DOTS[column % 2][row % 4])
    for x, y in marks:
        column, row = dot(x, y)
        cells[row // 4][column // 2] = "◆"
    rows = [
        f"{labels.get(i, ''):>{margin}} {'┤' if i in labels else '│'}{''.join(row)}".replace("\u2800", " ").rstrip()
        for i, row in enumerate(cells)
    ]
    first, last = f"{x_low:g}", f"{x_high:g}"
    ends = " " * (margin + 2) + first + last.rjust(columns - len(first))
    return [*rows, " " * (margin + 1) + "└" + "─" * columns, ends]


def _connected(dots: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """One dot a column, the mean of those in it, and between neighbours the dots that make it a line."""
    by_column: dict[int, list[int]] = {}
    for column, row in dots:
        by_column.setdefault(column, []).append(row)
    means = [(column, round(sum(rows) / len(rows))) for column, rows in sorted(by_column.items())]
    path = list(means)
    for (left, from_row), (right, to_row) in pairwise(means):
        steps = max(right - left, abs(to_row - from_row))
        path += [
            (round(left + (right - left) * i / steps), round(from_row + (to_row - from_row) * i / steps))
            for i in range(1, steps)
        ]
    return path


def shares(load: Sequence[int], width: int) -> list[tuple[str, float]]:
    """Blocks for the load of each expert, with its ratio to the mean: `▄` the mean, `█` twice it or more, `·` nothing.

    As wide as `width` allows, at most three columns an expert, the third a gap; where there are more experts than
    columns, each block is the busiest of some neighbours.
    """
    mean = sum(load) / len(load) or 1.0
    together = -(-len(load) // width)
    busiest = [max(load[i : i + together]) / mean for i in range(0, len(load), together)]
    columns = max(1, min(3, width // len(busiest)))
    blocks = [_BLOCKS[min(8, max(1, round(4 * ratio))) if ratio else 0] for ratio in busiest]
    return [(f"{block * 2} " if columns == 3 else block * columns, r) for block, r in zip(blocks, busiest, strict=True)]


def levels(values: Sequence[float], width: int, highest: float) -> list[tuple[str, float]]:
    """A block for each value from 0 to `highest`, with the value: `▁` the least, `█` the highest or more.

    Where there are more values than columns, each block is the highest of some neighbours, as `neighbours` says.
    """
    together = neighbours(len(values), width)
    most = [max(values[i : i + together]) for i in range(0, len(values), together)]
    return [(_BLOCKS[min(8, max(1, 1 + int(8 * value / highest)))], value) for value in most]


def neighbours(experts: int, width: int) -> int:
    """How many experts share one block of `shares`, or values one of `levels`."""
    return -(-experts // width)
