"""The last steps of one rank's file, read from its end backwards; whatever is no record is counted by reason."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moekit.watch.counts import LayerKey
from moekit.watch.rankfile import parse as parse_line
from moekit.watch.router import trace
from moekit.watch.router.loads import Counts

NOT_COUNTS = "not a record of counts"
_STEP = re.compile(rb'\{"step": (\d{1,15}),')
_BLOCK_BYTES = 1 << 16
_MOST_TOKENS = 1 << 40
"""More than this in one count is no count."""


def newest_counts(path: Path, last: int, since: int, rejected: Counter[str]) -> Iterator[tuple[int, LayerKey, Counts]]:
    """(step, layer, `# (micro batch, own expert)`) of the last steps of one file."""
    for record in _newest(path, "iter", last, rejected):
        key, counts = _count_record(record)
        if key is None or counts is None:
            rejected[NOT_COUNTS] += 1
        elif record["iter"] >= since:
            yield record["iter"], key, counts


def _count_record(record: dict[str, Any]) -> tuple[LayerKey | None, Counts | None]:
    """(layer, `# (micro batch, own expert)`) of a line of counts; None for what is none."""
    block, depth, layer = record.get("block"), record.get("mtp_idx"), record.get("layer")
    natural = type(layer) is int and layer >= 0 and (depth is None or (type(depth) is int and depth >= 0))
    if block not in ("decoder", "mtp") or not natural:
        return None, None
    try:
        counts = np.array(record.get("tpe"))
    except (ValueError, OverflowError):  # ragged, or larger than any integer
        return None, None
    if counts.ndim != 2 or counts.dtype.kind != "i" or not counts.size:
        return None, None
    if counts.view(np.uint64).max() >= _MOST_TOKENS:  # one below 0 is a very large one here
        return None, None
    return LayerKey(str(block), depth, int(record["layer"])), counts.astype(np.int64, copy=False)


def _newest(path: Path, index: str, last: int, rejected: Counter[str]) -> list[dict[str, Any]]:
    """The records of the last `last` indices of one rank's file, in the file's order.

    What a restart wrote again holds, and what the attempt before it had written from there on is no part of the run.
    """
    records: list[dict[str, Any]] = []
    lowest, indices = None, 0
    for line in _backwards(path, rejected):
        try:
            record = parse_line(line, index)
        except RecursionError:
            record = None
        if record is None or record[index] < 0:
            rejected[trace.NOT_JSON] += 1
            continue
        if lowest is not None and record[index] > lowest:
            continue
        if record[index] != lowest:
            lowest, indices = record[index], indices + 1
            if indices > last:
                break
        records.append(record)
    return records[::-1]


def newest_calls(
    path: Path, num_experts: int, last: int, end: float, rejected: Counter[str]
) -> Iterator[tuple[int, LayerKey, Counts]]:
    """(step, layer, `# (token, choice)`) of the last `last` steps before `end` of a trace, the last call first."""
    steps: set[int] = set()
    for line in _backwards(path, rejected):
        line = line[max(line.rfind(b'{"step"'), 0) :]  # behind what a killed writer left half written
        call: trace.Call | str = trace.parse(line, num_experts)
        chosen = call.experts.astype(np.int64) if isinstance(call, trace.Call) else None
        if isinstance(call, str) and call == trace.RANGE and b"-1" in line:
            call, chosen = _masked_call(line, num_experts)
        if isinstance(call, str) or chosen is None:
            rejected[str(call)] += 1
            continue
        if call.step + 1 >= end:
            continue
        if call.step not in steps and len(steps) == last:
            break
        steps.add(call.step)
        yield call.step + 1, call.layer, chosen


def traced_steps(path: Path) -> set[int]:
    """The steps of which a trace has any line, counted from 1."""
    found = (_STEP.match(line) for line in _backwards(path, Counter()))
    return {int(step[1]) + 1 for step in found if step}


def _masked_call(line: bytes, num_experts: int) -> tuple[trace.Call | str, Counts | None]:
    """A call some of whose rows are -1 throughout, which marks what is no token (as DeepEP's indices do)."""
    record = json.loads(line)
    chosen = np.array(record["top_indices"])
    masked = (chosen == -1).all(axis=-1)
    if chosen.dtype.kind != "i" or ((chosen < 0).any(axis=-1) != masked).any():
        return trace.RANGE, None
    record["top_indices"] = np.where(masked[:, None], 0, chosen).tolist()
    call = trace.parse(json.dumps(record).encode() + b"\n", num_experts)
    return call, chosen.astype(np.int64)


def _backwards(path: Path, rejected: Counter[str]) -> Iterator[bytes]:
    """A file's lines with their ends, the last one first; what is behind the last line end is still being written."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        place = file.seek(0, 2)
        rest, written = b"", False
        while place:
            size = min(max(_BLOCK_BYTES, len(rest)), place)
            place = file.seek(place - size)
            first, *lines = (file.read(size) + rest).split(b"\n")
            for line in reversed(lines):
                if written and line.strip():
                    yield line + b"\n"
                written = True
            rest = first
            if len(rest) > trace.LONGEST_LINE_BYTES:
                rejected[trace.TOO_LONG] += 1
                return
        if written and rest.strip():
            yield rest + b"\n"
