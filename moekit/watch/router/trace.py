"""A fast reader of `router_trace_rankR.jsonl`: gigabytes in constant memory, every line either read or accounted for.

Megatron writes a line a call of a router (megatron/core/transformer/moe/router_trace.py:430, `_flush_records_to_disk`);
nearly all of it is `top_indices`, the last key. Here the few fields ahead of it go through `json`; the digits are taken
by numpy, all of a block at once (`digits.py`), which also proves that the text is what `json.dumps` writes. Whatever is
spelled otherwise goes through `json` as a whole, so that the result is always what `json` would have read. Large files
are cut at line ends and read by several processes (`over`).
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from moekit.watch.counts import LayerKey
from moekit.watch.router.digits import Experts, parse_rows
from moekit.watch.router.sidecar import Part

LONGEST_LINE_BYTES = 1 << 25
"""About 8 million choices; a longer line is passed over without being held."""
_LONGEST_ODD_BYTES = 1 << 22
"""Of a line that `json` has to read as a whole: its objects take up to thirty times as much."""
_MARK = b', "top_indices": [['
_HEAD_BYTES = 4096
_PIECE_BYTES = 1 << 24
_BUFFER_BYTES = 1 << 20
_BATCH_BYTES = 1 << 17
_WAITING = 16

NOT_JSON = "not JSON"
HALF = "half-written"
TOO_LONG = "too long"
FOREIGN = "not a routing record"
ROWS = "rows are not `num_tokens` x `topk`"
RANGE = "expert out of range"


class Call(NamedTuple):
    """One call of one router on one rank."""

    step: int
    """Counted from 0; Megatron's log says one more."""
    layer: LayerKey
    rank: int
    experts: Experts
    """`# (token, top-k)`, in the order of the expert ids and not of the weights (handbook A.1)."""
    logits: Part | None = None
    hidden: Part | None = None


@dataclass(frozen=True)
class Piece:
    """The lines that begin in `[start, end)` of a file."""

    path: Path
    start: int
    end: int


def calls(piece: Piece, skipped: Counter[str], num_experts: int | None = None) -> Iterator[Call]:
    """The calls of a piece, in the order of the file; of what is passed over, `skipped` counts the lines by reason.

    An expert is out of range from `num_experts` on, or below 0. Raises `OSError` where the file cannot be read.
    """
    for lines in _batches(_lines(piece, skipped)):
        for found in _parse_together(lines, num_experts) or [parse(line, num_experts) for line in lines]:
            if isinstance(found, str):
                skipped[found] += 1
            else:
                yield found


def _batches(lines: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Short lines that follow each other together, long ones alone."""
    batch: list[bytes] = []
    size = 0
    for line in lines:
        if batch and size + len(line) > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    if batch:
        yield batch


def _lines(piece: Piece, skipped: Counter[str]) -> Iterator[bytes]:
    with piece.path.open("rb", buffering=_BUFFER_BYTES) as file:
        if piece.start:  # the line that reaches into this piece is that of the one before
            file.seek(piece.start - 1)
            _pass_over(file)
        while file.tell() < piece.end and (line := file.readline(LONGEST_LINE_BYTES + 1)):
            if len(line) > LONGEST_LINE_BYTES:
                skipped[TOO_LONG] += 1
                if not line.endswith(b"\n"):
                    _pass_over(file)
            elif not line.endswith(b"\n"):
                skipped[HALF] += 1
            elif not line.isspace():
                yield line


def _pass_over(file: Any) -> None:
    """Go behind the next line end."""
    while (rest := file.readline(_BUFFER_BYTES)) and not rest.endswith(b"\n"):
        pass


def parse(line: bytes, num_experts: int | None = None) -> Call | str:
    """A whole line's call, or why it is none."""
    if (head := _head(line)) is not None:
        fields, shape, start = head
        # a number takes two bytes at least, so what a hostile shape makes us allocate is no more than the line
        if 0 < 2 * shape[0] * shape[1] <= len(line):
            experts = parse_rows(line, start, len(line) - 3, shape)
            if experts is not None:
                return _call(fields, experts, num_experts)
    return _parse_odd(line, num_experts)


def _head(line: bytes) -> tuple[dict[str, Any], tuple[int, int], int] | None:
    """(fields ahead of the rows, (tokens, top-k), where the rows begin) of a line as Megatron spells it."""
    mark = line.find(_MARK, 0, _HEAD_BYTES)
    if mark < 0 or not line.endswith(b"]]}\n"):
        return None
    try:
        fields = json.loads(line[:mark] + b"}")
    except (ValueError, RecursionError):
        return None
    shape = _shape(fields)
    return None if shape is None else (fields, shape, mark + len(_MARK) - 1)


def _parse_together(lines: list[bytes], num_experts: int | None) -> list[Call | str] | None:
    """As `parse` of each of several lines; None where one of them needs to be looked at by itself.

    Their rows are put one behind the other as those of one line. A `[` in what is proven to be rows begins one, so
    that there are as many in a line as it says shows that no row is another line's.
    """
    heads = [head for line in lines if (head := _head(line)) is not None]
    topk = heads[0][1][1] if heads else 0
    if len(lines) < 2 or len(heads) < len(lines) or any(shape[1] != topk for _, shape, _ in heads):
        return None
    rows = [line[start:-3] for line, (_, _, start) in zip(lines, heads, strict=True)]
    if any(_brackets(text) != shape[0] for text, (_, shape, _) in zip(rows, heads, strict=True)):
        return None
    text, tokens = b", ".join(rows), sum(shape[0] for _, shape, _ in heads)
    experts = parse_rows(text, 0, len(text), (tokens, topk)) if 2 * tokens * topk <= len(text) else None
    if experts is None:
        return None
    if num_experts is not None and int(experts.max()) < num_experts:
        num_experts = None  # none of them has to be looked at again
    ends = accumulate(shape[0] for _, shape, _ in heads)
    return [
        _call(fields, experts[end - shape[0] : end], num_experts)
        for (fields, shape, _), end in zip(heads, ends, strict=True)
    ]


def _brackets(text: bytes) -> int:
    """`text.count(b"[")`, faster where there are many."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == 91))


def _parse_odd(line: bytes, num_experts: int | None) -> Call | str:
    """As `parse`, for a line that is not spelled as Megatron spells it, through `json` alone."""
    if len(line) > _LONGEST_ODD_BYTES:
        return TOO_LONG
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return NOT_JSON
    rows = fields.get("top_indices") if isinstance(fields, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return FOREIGN
    shape = _shape(fields)
    if shape is None or len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
        return FOREIGN if shape is None else ROWS
    if not all(type(number) is int for row in rows for number in row):
        return FOREIGN
    if any(not 0 <= number < 1 << 16 for row in rows for number in row):
        return RANGE
    return _call(fields, np.array(rows, np.uint16).reshape(shape), num_experts)


def _natural(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


def _shape(fields: object) -> tuple[int, int] | None:
    """(tokens, top-k) of what may be a record, None of what is none."""
    if not isinstance(fields, dict) or not all(_natural(fields.get(name)) for name in ("step", "layer", "rank")):
        return None
    depth, tokens, topk = fields.get("mtp_idx"), fields.get("num_tokens"), fields.get("topk")
    if fields.get("block") not in ("decoder", "mtp") or not (depth is None or _natural(depth)):
        return None
    return (tokens, topk) if _natural(tokens) and _natural(topk) and topk > 0 else None


def _call(fields: dict[str, Any], experts: Experts, num_experts: int | None) -> Call | str:
    if num_experts is not None and experts.size and int(experts.max()) >= num_experts:
        return RANGE
    layer = LayerKey(fields["block"], fields.get("mtp_idx"), fields["layer"])
    tokens = len(experts)
    return Call(
        fields["step"], layer, fields["rank"], experts, _part(fields, "logit", tokens), _part(fields, "hs", tokens)
    )


def _part(fields: dict[str, Any], name: str, tokens: int) -> Part | None:
    """A place in a sidecar file, None where none is named or where its numbers contradict each other."""
    offset, size, shape = (fields.get(f"{name}_{what}") for what in ("offset", "bytes", "shape"))
    if not _natural(offset) or not isinstance(shape, list) or len(shape) != 2 or not all(map(_natural, shape)):
        return None
    part = Part(offset, shape[0], shape[1])
    return part if part.size == size and part.rows == tokens else None


def pieces(paths: Sequence[Path], size: int = _PIECE_BYTES) -> list[Piece]:
    """The files cut into pieces of about `size` bytes, in order."""
    return [
        Piece(path, start, min(start + size, whole))
        for path in paths
        if (whole := path.stat().st_size)
        for start in range(0, whole, size)
    ]


def _one[T](work: Callable[[Iterator[Call]], T], num_experts: int | None, piece: Piece) -> tuple[T, Counter[str]]:
    skipped: Counter[str] = Counter()
    return work(calls(piece, skipped, num_experts)), skipped


def over[T](
    paths: Sequence[Path],
    work: Callable[[Iterator[Call]], T],
    skipped: Counter[str],
    *,
    num_experts: int | None = None,
    workers: int | None = None,
) -> Iterator[T]:
    """What `work` makes of the calls of each piece of the files, in order; `skipped` is added to.

    With `workers` > 1 (None: one a CPU, where there is enough to read) pieces are read in that many processes, so
    `work` and its result have to be picklable; keep the result small, it is what memory and pipes hold.
    """
    import os

    parts = pieces(paths)
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, len(parts) // 2)
    one = partial(_one, work, num_experts)
    for result, passed in map(one, parts) if workers < 2 else _in_processes(one, parts, workers):
        skipped.update(passed)
        yield result


def _in_processes[R](one: Callable[[Piece], R], parts: list[Piece], workers: int) -> Iterator[R]:
    """`map` over processes, this one among them, in order; so many results wait at most."""
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(workers - 1, get_context("spawn")) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for part in parts:
                if sum(not future.done() for future in waiting) < 2 * (workers - 1):
                    waiting.append(pool.submit(one, part))
                else:  # they have enough to do
                    waiting.append(Future())
                    waiting[-1].set_result(one(part))
                while waiting and (waiting[0].done() or len(waiting) >= _WAITING * workers):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
