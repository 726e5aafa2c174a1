"""From a run's files to counts by layer, expert parallel group, micro batch and global expert: the last steps of a run.

Two sources. Tokens per expert, `checkpoints/tokens_per_expert/rankR.jsonl`, are what the experts received behind the
dispatch; routing traces, `attempts/N/routing/router_trace_rankR.jsonl`, what tokens chose ahead of it, and so also
sequences. Files are read from their ends backwards: only the last steps are, however long a run was. Steps are counted
from 1 as Megatron logs them; a trace's own step is one less (megatron/training/training.py:3111, :3120).

What is not there, or cannot be used, is missing and counted as such, never zero.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moekit.problems import error
from moekit.watch.counts import LayerKey
from moekit.watch.layout import RankLayout
from moekit.watch.rankfile import parse as parse_line
from moekit.watch.router import trace
from moekit.watch.router.grid import Grid, Layer
from moekit.watch.router.loads import Counts, chosen_counts, once, sequence_counts

Source = Literal["counts", "trace"]
OTHER_BATCHES = "another number of micro batches"
NOT_COUNTS = "not a record of counts"
NO_SEQUENCES = "rows are not `train.micro_batch_size` sequences"
_BLOCK_BYTES = 1 << 16
_MOST_TOKENS = 1 << 40
"""More than this in one count is no count."""


@dataclass
class Load:
    """One layer at one step."""

    counts: Counts
    """`# (expert parallel group, micro batch, expert)`; groups of which a rank is missing are left out."""
    groups: int
    """How many there are in the run."""
    sequences: Counts | None = None
    """`# (sequence, expert)`, of traces alone."""

    @property
    def whole(self) -> bool:
        """Whether every group is there, and so the global batch."""
        return len(self.counts) == self.groups


@dataclass
class Coverage:
    """How much of what there should be was read: records of one rank and layer, and of one micro batch in a trace."""

    found: int = 0
    expected: int = 0
    missing_ranks: set[int] = field(default_factory=set)
    """Ranks without any usable record of some step."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Lines or records that could not be used, by reason."""

    def add(self, other: Coverage) -> None:
        """Take in those of other steps."""
        self.found += other.found
        self.expected += other.expected
        self.missing_ranks |= other.missing_ranks
        self.rejected += other.rejected

    @property
    def share(self) -> float:
        """1 where everything is there; NaN where nothing was expected."""
        return self.found / self.expected if self.expected else float("nan")


@dataclass
class Reading:
    """The last steps of one source, in order."""

    source: Source
    steps: dict[int, dict[Layer, Load]] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)
    recomputed: bool = False
    """Whether recomputed forwards were in the files; they are left out."""
    masked: int = 0
    """Rows that were marked as no tokens and left out."""
    empty_files: int = 0
    absent: set[Layer] = field(default_factory=set)
    """Layers that the run has and some step says nothing of."""


@dataclass
class _Rank:
    """What one rank says of one layer at one step."""

    vectors: Counts
    """`# (call, expert)`: its own experts in counts, all of them in a trace."""
    sequences: list[Counts] = field(default_factory=list)
    """Of each call, `# (sequence, expert)`."""


_Found = dict[int, dict[tuple[int, LayerKey], dict[int, _Rank]]]
"""By step, then by (stage, the layer's own key), then by rank in the stage."""


def read_counts(folder: Path, grid: Grid, last: int, since: int = 0) -> Reading:
    """Tokens per expert of the last `last` counted steps from step `since` on.

    Raises:
        MoekitError: the counts are those of another layout.
    """
    reading, found = Reading("counts"), _Found()
    ranks = list(grid.counting_ranks())
    for stage, rank in ranks:
        path = folder / f"rank{stage * grid.stage_ranks + rank}.jsonl"
        for step, key, counts in _file_counts(path, last, since, reading):
            if counts.shape[1] != grid.experts.experts_per_rank:
                raise error(
                    f"{counts.shape[1]} experts a rank in these counts, not {grid.experts.experts_per_rank}",
                    "the counts are those of another run, or of another layout of this one",
                    str(path),
                )
            found.setdefault(step, {}).setdefault((stage, key), {})[rank] = _Rank(counts)
    for step in sorted(found)[-last:]:
        reading.steps[step] = _step(found[step], grid, ranks, reading)
    return reading


def read_apart(path: Path, last: int) -> tuple[Reading, Grid] | None:
    """Counts of one file on its own, of a rank whose place is not known, with a grid of this rank alone.

    Its experts are its own and numbered from 0, its layers those of its pipeline stage. None without any record.
    """
    reading, found, experts = Reading("counts"), _Found(), 0
    for step, key, counts in _file_counts(path, last, 0, reading):
        experts = experts or counts.shape[1]
        if counts.shape[1] != experts:
            reading.coverage.rejected[NOT_COUNTS] += 1
            continue
        found.setdefault(step, {}).setdefault((0, key), {})[0] = _Rank(counts)
    if not found:
        return None
    grid = Grid(RankLayout(1, 1, 1, experts), {})
    reading.steps = {step: _step(found[step], grid, [(0, 0)], reading) for step in sorted(found)}
    return reading, grid


def read_trace(folder: Path, grid: Grid, last: int, since: int = 0, end: float = math.inf) -> Reading:
    """Choices of the last `last` traced steps in `[since, end)`, of one attempt."""
    reading, found = Reading("trace"), _Found()
    sequences = 0 if grid.no_sequences else grid.sequences
    calls: dict[tuple[int, int, LayerKey, int], list[tuple[Counts, Counts | None]]] = {}
    ranks = list(grid.tracing_ranks())
    for stage, rank in ranks:
        path = folder / f"router_trace_rank{stage * grid.stage_ranks + rank}.jsonl"
        for step, key, chosen in _newest_calls(path, grid.experts.num_experts, last, end, reading):
            if step < since:
                break
            own = None
            if sequences and len(chosen) == sequences * int(grid.args["seq_length"]):
                own = sequence_counts(chosen, sequences, grid.experts.num_experts)
            elif sequences:
                reading.coverage.rejected[NO_SEQUENCES] += 1
            reading.masked += int((chosen < 0).all(axis=-1).sum())
            call = (chosen_counts(chosen, grid.experts.num_experts), own)
            calls.setdefault((step, stage, key, rank), []).append(call)
    for (step, stage, key, rank), vectors in calls.items():
        own_sequences = [own for _, own in reversed(vectors) if own is not None]
        one = _Rank(np.stack([counts for counts, _ in reversed(vectors)]), own_sequences)
        found.setdefault(step, {}).setdefault((stage, key), {})[rank] = one
    for step in sorted(found)[-last:]:
        reading.steps[step] = _step(found[step], grid, ranks, reading)
    return reading


def _step(
    found: dict[tuple[int, LayerKey], dict[int, _Rank]], grid: Grid, ranks: list[tuple[int, int]], reading: Reading
) -> dict[Layer, Load]:
    """Put the ranks of each layer together."""
    loads: dict[Layer, Load] = {}
    seen = {(stage, rank) for (stage, _), by_rank in found.items() for rank in by_rank}
    stages = {stage for stage, _ in seen}  # one of dense layers alone has nothing to say
    missing = {s * grid.stage_ranks + r for s, r in ranks if s in stages and (s, r) not in seen}
    reading.coverage.missing_ranks |= missing
    for (stage, key), by_rank in found.items():
        wanted = [rank for of, rank in ranks if of == stage]
        loads[grid.layer(key, stage)] = _layer(by_rank, wanted, grid, reading)
    absent = [layer for layer in grid.moe_layers if layer not in loads]
    calls = (grid.microbatches or 1) if reading.source == "trace" else 1
    reading.coverage.expected += len(absent) * (len(ranks) // grid.pipeline) * calls
    reading.absent |= set(absent)
    return dict(sorted(loads.items()))


def _layer(by_rank: dict[int, _Rank], wanted: list[int], grid: Grid, reading: Reading) -> Load:
    traced = reading.source == "trace"
    most = grid.microbatches or Counter(len(one.vectors) for one in by_rank.values()).most_common(1)[0][0]
    reading.coverage.expected += len(wanted) * (most if traced else 1)
    groups: dict[int, list[Counts]] = {}
    sequences = []
    for rank in wanted:
        own = groups.setdefault(grid.experts.group(rank), [])
        if (one := by_rank.get(rank)) is None:
            continue
        calls, recomputed = once(one.vectors, grid.microbatches, traced)
        reading.recomputed |= recomputed
        reading.coverage.found += min(len(calls), most) if traced else len(calls) == most
        if len(one.sequences) == len(one.vectors):
            sequences += [one.sequences[call] for call in calls]
        if len(calls) == most:
            own.append(one.vectors[calls])
        else:
            reading.coverage.rejected[OTHER_BATCHES] += 1
    ranks = len(wanted) // len(groups)
    whole = [parts for parts in groups.values() if len(parts) == ranks]
    put = [sum(parts[1:], start=parts[0]) if traced else np.concatenate(parts, axis=1) for parts in whole]
    shape = (0, most, grid.experts.num_experts)
    counts = np.stack(put) if put else np.zeros(shape, np.int64)
    return Load(counts, len(groups), np.concatenate(sequences) if sequences else None)


def _file_counts(path: Path, last: int, since: int, reading: Reading) -> Iterator[tuple[int, LayerKey, Counts]]:
    """(step, layer, `# (micro batch, own expert)`) of the last steps of one file."""
    for record in _newest(path, "iter", last, reading):
        key, counts = _count_record(record)
        if key is None or counts is None:
            reading.coverage.rejected[NOT_COUNTS] += 1
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
    if counts.min() < 0 or counts.max() >= _MOST_TOKENS:
        return None, None
    return LayerKey(str(block), depth, int(record["layer"])), counts.astype(np.int64, copy=False)


def _newest(path: Path, index: str, last: int, reading: Reading) -> list[dict[str, Any]]:
    """The records of the last `last` indices of one rank's file, in the file's order.

    What a restart wrote again holds, and what the attempt before it had written from there on is no part of the run.
    """
    records: list[dict[str, Any]] = []
    lowest, indices = None, 0
    for line in _backwards(path, reading):
        try:
            record = parse_line(line, index)
        except RecursionError:
            record = None
        if record is None or record[index] < 0:
            reading.coverage.rejected[trace.NOT_JSON] += 1
            continue
        if lowest is not None and record[index] > lowest:
            continue
        if record[index] != lowest:
            lowest, indices = record[index], indices + 1
            if indices > last:
                break
        records.append(record)
    return records[::-1]


def _newest_calls(
    path: Path, num_experts: int, last: int, end: float, reading: Reading
) -> Iterator[tuple[int, LayerKey, Counts]]:
    """(step, layer, `# (token, choice)`) of the last `last` steps before `end` of a trace, the last call first."""
    steps: set[int] = set()
    for line in _backwards(path, reading):
        line = line[max(line.rfind(b'{"step"'), 0) :]  # behind what a killed writer left half written
        call: trace.Call | str = trace.parse(line, num_experts)
        chosen = call.experts.astype(np.int64) if isinstance(call, trace.Call) else None
        if isinstance(call, str) and call == trace.RANGE and b"-1" in line:
            call, chosen = _masked_call(line, num_experts)
        if isinstance(call, str) or chosen is None:
            reading.coverage.rejected[str(call)] += 1
            continue
        if call.step + 1 >= end:
            continue
        if call.step not in steps and len(steps) == last:
            break
        steps.add(call.step)
        yield call.step + 1, call.layer, chosen


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


def _backwards(path: Path, reading: Reading) -> Iterator[bytes]:
    """A file's lines with their ends, the last one first; what is behind the last line end is still being written."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        place = file.seek(0, 2)
        reading.empty_files += place == 0
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
                reading.coverage.rejected[trace.TOO_LONG] += 1
                return
        if written and rest.strip():
            yield rest + b"\n"
