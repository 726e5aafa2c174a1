"""What `moekit router` says of a run: by source and layer, MaxVio in each scope, the ranks' load, dead experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError, error
from moekit.watch.facts import facts_of
from moekit.watch.metrics import attempts
from moekit.watch.rankfile import Tail, parse
from moekit.watch.router import loads
from moekit.watch.router.agree import Disagreement
from moekit.watch.router.grid import Grid, Layer, attempt_args
from moekit.watch.router.loads import Counts, Values
from moekit.watch.router.read import Load, Reading, read_apart, read_counts, read_trace


@dataclass(frozen=True)
class Spread:
    """One statistic over all observations of one scope; they are all of the same kind."""

    mean: float
    worst: float
    observations: int
    undefined: int = 0
    """Observations in which nothing was counted; they are in neither of the two."""

    @classmethod
    def of(cls, values: Sequence[Values]) -> Spread | None:
        """None where no observation is defined."""
        every = np.concatenate([part.ravel() for part in values]) if values else np.empty(0)
        known = every[~np.isnan(every)]
        if not len(known):
            return None
        return cls(float(known.mean()), float(known.max()), len(known), len(every) - len(known))


@dataclass(frozen=True)
class LayerRow:
    """One layer over the steps that were read. What is None is not known, or undefined."""

    name: str
    hashed: bool
    """Whether its choices are read from a table and not learnt."""
    max_vio_micro: Spread | None
    """Of micro batches of each expert parallel group."""
    max_vio_global: Spread | None
    """Of global batches, one a step."""
    max_vio_sequence: Spread | None
    """Of sequences; of traces alone."""
    rank_imbalance: Spread | None
    """Busiest expert parallel rank over the mean one, of global batches."""
    rank_imbalance_micro: Spread | None
    """The same of micro batches of each expert parallel group, which is what a GPU waits for."""
    busiest_rank: int | None
    """The expert parallel rank, from 0, that received most over all steps."""
    dead_experts: list[int]
    """Without a token in all steps."""
    load: list[int]
    """Tokens `# (expert,)` over all steps that are there with all ranks."""
    moe_lb: Spread | None = None
    """`rank_imbalance` where a serving engine's ranks hold the experts, in a row and once each (handbook 4)."""

    @property
    def tokens(self) -> int:
        """Assignments of tokens to experts."""
        return sum(self.load)


@dataclass(frozen=True)
class Section:
    """What one source says."""

    source: str
    """`counts` (behind the dispatch), `trace` (ahead of it), or `rank R`: counts of one rank's own experts."""
    steps: list[int]
    layers: list[LayerRow]
    found: int
    expected: int
    """Records: of a rank and layer, in a trace also of a micro batch."""
    missing_ranks: list[int]
    notes: list[str]


@dataclass(frozen=True)
class Report:
    """All of a run."""

    name: str
    experts: int | None
    expert_parallel: int | None
    """None where no recipe says it."""
    balancing: str
    sections: list[Section]
    serving_ep: int | None = None
    """The ranks of `moe_lb`."""
    disagreement: Disagreement | None = None
    """With another run's choices, where one is asked for."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def report(run: RunDir, last: int = 1, only: str | None = None, serving_ep: int | None = None) -> Report:
    """What the last `last` counted and the last `last` traced steps say; `only` names one layer.

    `serving_ep`: over so many ranks a serving engine would lay the experts.

    Raises:
        MoekitError: the run is dense, or there is nothing to read; or no layer is called so; or ranks do not fit.
    """
    args = attempt_args(run)
    newest = max(args)
    grid, firsts = Grid.from_args(args[newest]), _first_steps(run)
    if serving_ep is not None and grid.experts.num_experts % serving_ep:
        raise error(f"{grid.experts.num_experts} experts cannot be split over {serving_ep} serving ranks")
    others = [number for number in args if not _same(args[number], grid)]
    since = firsts.get(min(number for number in args if number > max(others, default=-1)), 0) if others else 0
    readings = [read_counts(run.tokens_per_expert, grid, last, since), _traces(run, grid, last, since, firsts)]
    there = [reading for reading in readings if reading.steps or reading.empty_files]
    sections = [_section(reading, grid, only, others, serving_ep) for reading in there]
    if not any(section.steps for section in sections):
        empty = any(reading.empty_files for reading in readings)
        why = "its files are empty: Megatron writes nothing for calls that drop tokens, nor under CUDA graphs"
        raise error(
            f"run `{run.path.name}` has no counts and no routing trace" + (f"; {why}" if empty else ""),
            "`monitor.tokens_per_expert_interval` and `monitor.routing_trace` write them",
        )
    return _checked(
        Report(
            run.path.name,
            grid.experts.num_experts,
            grid.experts.expert_model_parallel,
            facts_of(args[newest]).balancing,
            sections,
            serving_ep,
        ),
        only,
    )


def report_apart(folder: Path, last: int = 1, only: str | None = None) -> Report:
    """Counts in a folder that no recipe explains: each file on its own.

    Raises:
        MoekitError: there are none; or no layer is called so.
    """
    found = [*folder.glob("rank*.jsonl"), *folder.glob("tokens_per_expert/rank*.jsonl")]
    files = sorted((path for path in found if path.stem[4:].isdecimal()), key=lambda path: int(path.stem[4:]))
    sections = []
    for path in files:
        if read := read_apart(path, last):
            reading, grid = read
            section = _section(reading, grid, only, [])
            sections.append(Section(f"rank {path.stem[4:]}", *(getattr(section, n) for n in _REST)))
    if not sections:
        traced = any(folder.glob("router_trace_rank*.jsonl"))
        why = ", and a trace alone does not say how many experts there are" if traced else ""
        raise error(
            f"`{folder}` has no `recipe.yaml`{why or ' and no `rank*.jsonl` with counts'}",
            "give the run's directory, or a folder of tokens-per-expert files",
        )
    return _checked(Report(folder.name, None, None, "", sections), only)


_REST = ("steps", "layers", "found", "expected", "missing_ranks", "notes")


def _checked(report: Report, only: str | None) -> Report:
    if only is not None and not any(section.layers for section in report.sections):
        raise error(f"there is no layer `{only}` in what was read", "layers are called as `moekit router` shows them")
    return report


def _same(args: dict[str, Any], grid: Grid) -> bool:
    """Whether an attempt lies on its ranks as `grid` does."""
    try:
        other = Grid.from_args(args)
    except MoekitError:
        return False
    return (other.experts, other.pipeline, other.stage_layers) == (grid.experts, grid.pipeline, grid.stage_layers)


def _first_steps(run: RunDir) -> dict[int, int]:
    """The first step that each attempt logged."""
    found = {}
    for number in attempts(run.path):
        lines = Tail(run.attempt(number).metrics).lines()
        first = next((record["step"] for line in lines if (record := parse(line, "step"))), None)
        if first is not None:
            found[number] = int(first)
    return found


def _traces(run: RunDir, grid: Grid, last: int, since: int, firsts: dict[int, int]) -> Reading:
    """The last traced steps over all attempts; what a later attempt trained again counts as its own."""
    reading, end = Reading("trace"), math.inf
    for number in reversed(attempts(run.path)):
        if len(reading.steps) < last:
            one = read_trace(run.attempt(number).routing, grid, last - len(reading.steps), since, end)
            reading.steps = one.steps | reading.steps
            reading.coverage.add(one.coverage)
            reading.recomputed |= one.recomputed
            reading.absent |= one.absent
            reading.masked += one.masked
            reading.empty_files += one.empty_files
        end = min(end, firsts.get(number, end), *one.steps)
    return reading


def _section(
    reading: Reading, grid: Grid, only: str | None, others: list[int], serving_ep: int | None = None
) -> Section:
    layers = sorted({layer for step in reading.steps.values() for layer in step})
    hashed = set((grid.moe_layers or [one for one in layers if one.key.mtp_idx is None])[: grid.hash_layers])
    rows = [
        _row(
            layer, [step[layer] for step in reading.steps.values() if layer in step], grid, layer in hashed, serving_ep
        )
        for layer in layers
        if only is None or layer.name == only
    ]
    return Section(
        reading.source,
        list(reading.steps),
        rows,
        reading.coverage.found,
        reading.coverage.expected,
        sorted(reading.coverage.missing_ranks),
        list(_notes(reading, grid, rows, others)),
    )


def _row(layer: Layer, found: list[Load], grid: Grid, hashed: bool, serving_ep: int | None) -> LayerRow:
    ranks = grid.experts.expert_model_parallel
    batches: list[Counts] = [load.counts.sum(axis=(0, 1)) for load in found if load.whole]  # each (expert,)
    total = sum(batches[1:], start=batches[0]) if batches else np.zeros(grid.experts.num_experts, np.int64)
    per_rank = loads.rank_loads(total, ranks)
    micro = [load.counts for load in found]

    def imbalance(of: list[Counts], over: int) -> Spread | None:
        return Spread.of([loads.busiest_over_mean(loads.rank_loads(counts, over)) for counts in of])

    return LayerRow(
        layer.name,
        hashed,
        Spread.of([loads.max_vio(counts) for counts in micro]),
        Spread.of([loads.max_vio(counts) for counts in batches]),
        Spread.of([loads.max_vio(load.sequences) for load in found if load.sequences is not None]),
        imbalance(batches, ranks),
        imbalance(micro, ranks),
        int(per_rank.argmax()) if per_rank.any() else None,
        loads.dead_experts(total),
        total.tolist(),
        imbalance(batches, serving_ep) if serving_ep else None,
    )


def _notes(reading: Reading, grid: Grid, rows: list[LayerRow], others: list[int]) -> Iterator[str]:
    """What has to be known to read the numbers right."""
    traced = reading.source == "trace"
    if grid.processed and not traced:
        yield f"counts are {', '.join(grid.processed)}: the experts' work, and not what the router asked for"
    if traced and grid.padded_choices:
        yield f"choices are {', '.join(grid.processed)}: not what the router asked for"
    elif traced and grid.args.get("moe_expert_capacity_factor") is not None:
        yield "a call in which tokens were dropped is not in a trace, so what is here is of calls without drops"
    if traced and reading.empty_files:
        yield f"{reading.empty_files} trace files are empty, as where tokens are dropped or under CUDA graphs"
    if traced and grid.no_sequences:
        yield f"no MaxVio per sequence: {grid.no_sequences}"
    if reading.recomputed:
        yield "recomputed forwards were counted too, and are left out"
    if reading.masked:
        yield f"{reading.masked} rows are marked as no tokens, and are left out"
    if reading.coverage.missing_ranks:
        yield f"ranks without records: {_some(sorted(reading.coverage.missing_ranks))}"
    if reading.absent:
        yield f"layers that some step says nothing of: {_some([layer.name for layer in sorted(reading.absent)])}"
    for reason, times in reading.coverage.rejected.items():
        yield f"{times} records were passed over: {reason}"
    if zero := sum(row.max_vio_micro.undefined for row in rows if row.max_vio_micro):
        yield f"{zero} micro batches without any token have no MaxVio"
    if any(row.name.startswith("stage_") for row in rows):
        yield "where each pipeline stage begins is not known, so layers are numbered within their stage"
    if facts_of(grid.args).forced:
        yield "routing is forced and not learnt: a control"
    if others:
        yield f"attempts on other ranks are left out: {_some(others)}"


def _some(names: Sequence[object]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(str, names[:8])) + more
