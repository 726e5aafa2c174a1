"""From a run's files to counts by layer, expert parallel group, micro batch and global expert: the last steps of a run.

Two sources. Tokens per expert, `checkpoints/tokens_per_expert/rankR.jsonl`, are what the experts received behind the
dispatch; routing traces, `attempts/N/routing/router_trace_rankR.jsonl`, what tokens chose ahead of it, and so also
sequences. Files are read from their ends backwards: only the last steps are, however long a run was. Steps are counted
from 1 as Megatron logs them; a trace's own step is one less (megatron/training/training.py:3111, :3120).

What is not there, or cannot be used, is missing and counted as such, never zero.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from moekit.problems import error
from moekit.watch.counts import LayerKey
from moekit.watch.layout import RankLayout
from moekit.watch.router.grid import Grid, Layer
from moekit.watch.router.loads import Counts, chosen_counts, once, sequence_counts
from moekit.watch.router.newest import NOT_COUNTS, newest_calls, newest_counts

Source = Literal["counts", "trace"]
OTHER_BATCHES = "another number of micro batches"
NO_SEQUENCES = "rows are not `train.micro_batch_size` sequences"


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
        for step, key, counts in newest_counts(path, last, since, reading.coverage.rejected):
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
    for step, key, counts in newest_counts(path, last, 0, reading.coverage.rejected):
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
        reading.empty_files += path.is_file() and path.stat().st_size == 0
        for step, key, chosen in newest_calls(path, grid.experts.num_experts, last, end, reading.coverage.rejected):
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
