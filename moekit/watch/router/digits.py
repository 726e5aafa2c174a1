"""Rows of whole numbers from JSON text, by numpy: every digit of a block at once, no loop over numbers.

The text of `top_indices` is `[[1, 5], [0, 7], ...]` as `json.dumps` writes it. `parse_rows` proves that while it reads:
what it has found must account for every byte. A text that is anything else gives None, and is for `json` to read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Experts = np.ndarray[Any, np.dtype[np.uint16]]
"""`# (token, top-k)`"""

_BLOCK_BYTES = 1 << 18
"""A block and what is made of it stay in a core's cache."""


def parse_rows(line: bytes, start: int, end: int, shape: tuple[int, int]) -> Experts | None:
    """The numbers `# shape` of the rows in `line[start:end]`, from the first `[` to the last `]` of theirs.

    None where it is not what `json.dumps` writes of rows of this shape with numbers of four digits at most.
    """
    found = np.empty(shape[0] * shape[1], np.uint16)
    filled = 0
    while start < end:
        cut = line.find(b"], [", start + _BLOCK_BYTES, end)
        stop = end if cut < 0 else cut + 1
        block = np.frombuffer(line, np.uint8, stop - start, start)
        numbers = _numbers(block, shape[1])
        if numbers is None or filled + len(numbers) > len(found):
            return None
        found[filled : filled + len(numbers)] = numbers
        filled += len(numbers)
        start = stop + 2
    return found.reshape(shape) if filled == len(found) else None


def _numbers(text: np.ndarray[Any, np.dtype[np.uint8]], topk: int) -> np.ndarray[Any, Any] | None:
    """The numbers of a block `[a, b], ..., [c, d]` of rows of `topk`; None if it is anything else.

    The proof is one of accounting. The first and the last bracket, `], [` behind each row, `, ` once less than there
    are numbers, and the digits that these numbers are written with are together as long as the text. Between two
    numbers there is at least one `, ` then, as brackets have one between them, and so exactly one.
    """
    figure = text - np.uint8(48)  # wraps: everything that is no digit is 10 or more
    is_digit = figure < 10
    figure *= is_digit.view(np.uint8)
    last = np.flatnonzero(is_digit[:-1] > is_digit[1:])  # of each number: where its last digit is
    rows = len(last) // topk
    if not rows or len(last) != rows * topk or text[0] != 91 or text[-1] != 93:
        return None
    row_ends = last[topk - 1 : -1 : topk]  # but the last
    if (
        np.count_nonzero((text[:-1] == 44) & (text[1:] == 32)) != len(last) - 1
        or last[-1] != len(text) - 2
        or (len(row_ends) and row_ends[-1] + 4 >= len(text))
        or (text.take(row_ends + 1) != 93).any()
        or (text.take(row_ends + 2) != 44).any()
        or (text.take(row_ends + 4) != 91).any()
    ):
        return None
    figure[1:] += (figure * np.uint8(10))[:-1]  # at a digit: it and the one ahead of it, as a number
    value: np.ndarray[Any, Any] = figure.take(last)
    written = len(text) - 2 * (len(last) - 1) - 2 * rows - len(last)  # digits beyond the first of each number
    width = int(np.count_nonzero(value >= 10))
    if width != written:  # some have more than two digits, or begin with a 0
        ahead = (is_digit[:-2] & is_digit[1:-1]).view(np.uint8)
        ahead *= figure[:-2]  # two behind: the two digits before the last two, if the number goes on there
        hundreds = ahead.take(last - 2, mode="clip")  # a number begins at 1 at the earliest, and 0 is a bracket's
        width = sum(map(np.count_nonzero, ((value >= 10) | (hundreds > 0), hundreds, hundreds >= 10)))
        value = value + hundreds * np.uint16(100)
    return value if width == written else None
