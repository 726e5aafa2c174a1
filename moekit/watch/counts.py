"""Tokens per expert: from the files Megatron writes to counts by layer and global expert.

Two sources, one shape. `checkpoints/tokens_per_expert/rankR.jsonl` (megatron/training/activation_logging.py:211,
`save_tpe`) holds what each rank's own experts received; `router_trace_rankR.jsonl`
(megatron/core/transformer/moe/router_trace.py) holds which experts the tokens of each rank chose. Both become
`IntervalCounts`: counts `# (expert,)` for each layer, summed over micro batches and ranks, so that MaxVio is that of
the global batch (handbook A.1). Activation recomputation calls the hooks again and so counts tokens twice.

Files may have gigabytes and there may be thousands of them: each is read twice from start to end, one iteration at a
time, and only a place in it is kept. Ranks or layers that are missing are named in `coverage`, never averaged away.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from moekit.problems import error
from moekit.watch.evenness import Peak
from moekit.watch.layout import RankLayout as RankLayout
from moekit.watch.rankfile import RankFile, Tail, parse

_WAITING_LIMIT = 8
"""Iterations of which some rank's lines are still awaited before the oldest is given out as it is."""
_SLICE_BYTES = 1 << 20
"""How much of one rank's file is taken in at most before the next rank's turn."""
_SLICES_BYTES = 1 << 26
"""How much of all files together; a line is taken whole, however long."""


class LayerKey(NamedTuple):
    """Which router: `layer` counts from 0 in its block; `mtp_idx` is the prediction depth, None in the decoder."""

    block: str
    mtp_idx: int | None
    layer: int

    @property
    def name(self) -> str:
        """`layer_3`, or `mtp_0_layer_1`."""
        return f"layer_{self.layer}" if self.mtp_idx is None else f"mtp_{self.mtp_idx}_layer_{self.layer}"


@dataclass(frozen=True)
class Coverage:
    """What an iteration's counts were made from."""

    ranks_expected: int
    missing_ranks: tuple[int, ...] = ()
    """Ranks without a line for this iteration."""
    partial_layers: tuple[LayerKey, ...] = ()
    """Layers left out of the counts: some rank has no line for them, or another number of micro batches."""

    @property
    def complete(self) -> bool:
        """Every rank is there with every layer."""
        return not self.missing_ranks and not self.partial_layers


@dataclass(frozen=True)
class IntervalCounts:
    """Tokens per expert at one iteration (counted from 1, as Megatron logs it), over all ranks and micro batches."""

    iteration: int
    layers: dict[LayerKey, list[int]]
    """Counts `# (expert,)` by layer, in layer order; a layer that is not all there is left out, see `coverage`."""
    coverage: Coverage
    microbatches: dict[LayerKey, list[Peak]] = field(default_factory=dict)
    """`# (expert parallel group x micro batch,)` by layer; empty for traces. A micro batch here is what an expert
    parallel group works on at once: those of all its data parallel ranks (handbook A.1)."""
    restarts: int = field(default=0, compare=False)
    """How often its writers had gone back to an earlier iteration before they wrote this one."""


@dataclass
class _Sum:
    """Adds up ranks; a layer counts once every expected rank has brought it, all with as many micro batches."""

    layout: RankLayout
    expected: range
    ranks: set[int] = field(default_factory=set)
    totals: dict[LayerKey, list[int]] = field(default_factory=dict)
    brought: Counter[LayerKey] = field(default_factory=Counter)
    microbatches: dict[LayerKey, set[int]] = field(default_factory=dict)
    peaks: dict[LayerKey, dict[int, list[Peak]]] = field(default_factory=dict)
    """By layer and expert parallel group, `# (micro batch,)`."""

    def add(self, rank: int, layer: LayerKey, experts: range, counts: Sequence[int], microbatches: int) -> None:
        total = self.totals.setdefault(layer, [0] * self.layout.num_experts)
        for expert, count in zip(experts, counts, strict=True):
            total[expert] += count
        self.ranks.add(rank)
        self.brought[layer] += 1
        self.microbatches.setdefault(layer, set()).add(microbatches)

    def add_peaks(self, rank: int, layer: LayerKey, peaks: list[Peak]) -> None:
        """Put a rank's experts beside those of the ranks of its expert parallel group, micro batch by micro batch."""
        groups = self.peaks.setdefault(layer, {})
        group = self.layout.group(rank)
        beside = groups.get(group)
        groups[group] = (
            peaks
            if beside is None
            else [Peak(max(a.busiest, b.busiest), a.tokens + b.tokens) for a, b in zip(beside, peaks, strict=False)]
        )

    def result(self, iteration: int, restarts: int = 0) -> IntervalCounts:
        whole = {k for k in self.totals if self.brought[k] == len(self.expected) and len(self.microbatches[k]) == 1}
        missing = tuple(rank for rank in self.expected if rank not in self.ranks)
        partial = tuple(sorted(self.totals.keys() - whole))
        layers = {key: self.totals[key] for key in sorted(whole)}
        peaks = {key: list(chain.from_iterable(self.peaks[key].values())) for key in layers if key in self.peaks}
        return IntervalCounts(iteration, layers, Coverage(len(self.expected), missing, partial), peaks, restarts)


_Local = dict[LayerKey, tuple[list[int], list[Peak]]]
"""One rank at one iteration: (counts of its own experts, those of each micro batch in short) by layer."""


def _layer_key(record: Mapping[str, Any]) -> LayerKey:
    return LayerKey(str(record["block"]), record.get("mtp_idx"), int(record["layer"]))


def _local_counts(record: Mapping[str, Any], layout: RankLayout, path: Path) -> tuple[list[int], list[Peak]]:
    """One line's counts `# (local expert,)` over its micro batches, and the peak of each."""
    microbatches = record["tpe"]
    if any(len(counts) != layout.experts_per_rank for counts in microbatches):
        raise error(
            f"{len(microbatches[0])} experts a rank in these counts, not {layout.experts_per_rank}"
            f" ({layout.num_experts} experts over {layout.expert_model_parallel} expert parallel ranks)",
            "the counts are those of another run, or of another layout of this one",
            str(path),
        )
    peaks = [Peak(max(counts), sum(counts)) for counts in microbatches]
    return [sum(column) for column in zip(*microbatches, strict=True)], peaks


def _add_local(total: _Sum, rank: int, local: _Local) -> None:
    for layer, (counts, peaks) in local.items():
        if counts:
            total.add(rank, layer, total.layout.experts(rank), counts, len(peaks))
            total.add_peaks(rank, layer, peaks)


def _tpe_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def tokens_per_expert(folder: Path, layout: RankLayout) -> Iterator[IntervalCounts]:
    """The counts of every iteration in `folder` (`checkpoints/tokens_per_expert`), in iteration order.

    An iteration that a restart wrote again counts as last written; a half-written line is passed over.
    """
    files = {rank: RankFile(_tpe_path(folder, rank), "iter") for rank in layout.counting_ranks}
    for iteration in _each_index(files.values()):
        total = _Sum(layout, layout.counting_ranks)
        for rank, file in files.items():
            local: _Local = {_layer_key(r): _local_counts(r, layout, file.path) for r in file.take(iteration)}
            _add_local(total, rank, local)
        yield total.result(iteration)


def routing_trace(
    folder: Path, layout: RankLayout, *, microbatches: int | None = None, train_iters: int | None = None
) -> Iterator[IntervalCounts]:
    """The counts of every traced step in `folder`, in order; Megatron's step 0 is iteration 1 here.

    Evaluation is traced under the step that follows it, ahead of that step's own records: with `microbatches` (of one
    rank in one step) only the last that many of each layer count. An evaluation at the end of the run leaves a step
    that was never trained: with `train_iters`, steps from there on are left out. A record that Megatron skipped
    because tokens were dropped leaves its layer partial.
    """
    every_rank = range(layout.world_size)
    files = {rank: RankFile(folder / f"router_trace_rank{rank}.jsonl", "step") for rank in every_rank}
    for step in _each_index(files.values()):
        if train_iters is not None and step >= train_iters:
            return
        total = _Sum(layout, every_rank)
        for rank, file in files.items():
            recent: dict[LayerKey, deque[Counter[int]]] = {}
            for record in file.take(step):
                chosen = Counter(chain.from_iterable(record["top_indices"]))
                recent.setdefault(_layer_key(record), deque(maxlen=microbatches)).append(chosen)
            for layer, calls in recent.items():
                counts = [sum(call[expert] for call in calls) for expert in range(layout.num_experts)]
                total.add(rank, layer, range(layout.num_experts), counts, len(calls))
        yield total.result(step + 1)


def _each_index(files: Iterable[RankFile]) -> Iterator[int]:
    """The smallest index that any of the files comes to next, until none has more; the caller takes it from all."""
    files = list(files)
    while (index := min((i for f in files if (i := f.next_index) is not None), default=None)) is not None:
        yield index
        for file in files:
            file.skip(index)


class TokensPerExpertReader:
    """Follows the counts of a running job: each `poll` reads only what was appended since the last one."""

    def __init__(self, folder: Path, layout: RankLayout, since: int = 0) -> None:
        """`since`: iterations before it are passed over; they may be of another layout."""
        self._layout = layout
        self._since = since
        self._tails = {rank: Tail(_tpe_path(folder, rank)) for rank in layout.counting_ranks}
        self._at: dict[int, int] = {}
        self._waiting: dict[int, dict[int, _Local]] = {}
        self._layers: set[LayerKey] = set()
        self._newest: int | None = None
        self._slice_bytes = min(_SLICE_BYTES, max(1, _SLICES_BYTES // max(1, len(self._tails))))
        self._restarts: dict[int, int] = {}
        """Of each rank, how often it has gone back."""
        self._written_after: dict[int, int] = {}
        """Of each iteration that waits, how often its writers had gone back."""
        self._lead: Tail | None = None
        self._more = False

    @property
    def restarts(self) -> int:
        """How often the ranks have gone back to an earlier iteration so far."""
        return max(self._restarts.values(), default=0)

    def poll(self, limit: int | None = None) -> list[IntervalCounts]:
        """The iterations that have become whole, in order; one that comes again, after a restart, replaces the earlier.

        One that stays incomplete is given out, with its coverage, once a later one is whole or too many wait. With
        `limit`, reading stops once so many are there; the next call goes on. All files are looked at only when one of
        them, the first, has grown: they grow together, and there may be thousands.
        """
        given: list[IntervalCounts] = []
        if not self._grown():
            return given
        self._more = False
        while changed := {iteration for rank in self._tails for iteration in self._read(rank)}:
            given += self._settle(changed)
            self._more = True  # the others' last lines may be a moment behind
            if limit is not None and len(given) >= limit:
                break
        overdue = sorted(self._waiting.keys() - {self._newest})[:-_WAITING_LIMIT]
        given += [self._sum(iteration) for iteration in overdue]
        self._forget(overdue)
        return given

    def _grown(self) -> bool:
        """Whether there may be anything new."""
        return self._more or bool(self._waiting.keys() - {self._newest}) or self._lead is None or self._lead.grown()

    def _forget(self, iterations: Iterable[int]) -> None:
        for iteration in iterations:
            del self._waiting[iteration], self._written_after[iteration]

    def _read(self, rank: int) -> set[int]:
        """Take in a slice of what `rank` appended; the iterations that it changed."""
        tail, changed = self._tails[rank], set()
        for line in tail.lines(self._slice_bytes):
            self._lead = self._lead or tail
            if (record := parse(line, "iter")) is None or (iteration := int(record["iter"])) < self._since:
                continue
            if iteration < self._at.get(rank, 0):
                self._restarts[rank] = self._restarts.get(rank, 0) + 1
                self._take_back(rank, iteration)
            self._at[rank] = iteration
            local = self._waiting.setdefault(iteration, {}).setdefault(rank, {})
            local[_layer_key(record)] = _local_counts(record, self._layout, tail.path)
            self._written_after[iteration] = self._restarts.get(rank, 0)
            changed.add(iteration)
        return changed

    def _take_back(self, rank: int, iteration: int) -> None:
        """Forget what `rank` wrote from `iteration` on: it was restarted and writes it again."""
        for later in [i for i in self._waiting if i >= iteration]:
            self._waiting[later].pop(rank, None)
            if not self._waiting[later]:
                self._forget([later])

    def _settle(self, changed: set[int]) -> list[IntervalCounts]:
        """Give out what is whole, and what all ranks have left behind them."""
        sums = {iteration: self._sum(iteration) for iteration in sorted(self._waiting)}
        self._layers.update(*(interval.layers for interval in sums.values()))
        whole = [i for i in sums if i in changed and self._is_whole(sums[i])]
        if not whole:
            return []
        left = [i for i in sums if i <= whole[-1] and (i in whole or i != self._newest)]
        self._newest = whole[-1]
        self._forget([i for i in sums if i < whole[-1]])  # the newest stays: its writer may not be done with it
        return [sums[iteration] for iteration in left]

    def _is_whole(self, interval: IntervalCounts) -> bool:
        return interval.coverage.complete and self._layers <= interval.layers.keys()

    def _sum(self, iteration: int) -> IntervalCounts:
        total = _Sum(self._layout, self._layout.counting_ranks)
        for rank, local in self._waiting[iteration].items():
            _add_local(total, rank, local)
        return total.result(iteration, self._written_after[iteration])
