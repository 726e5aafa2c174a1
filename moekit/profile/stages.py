"""Forward and backward times of each rank, as Megatron's timers print them, by pipeline stage.

`--timing-log-level 2 --timing-log-option all` prints `forward-compute` and `backward-compute` of every rank into
`train.log` (megatron/core/timers.py `_get_all_ranks_time_string`); in TensorBoard only the highest of all ranks lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError, error
from moekit.recipe.load import load
from moekit.recipe.schema import Recipe

FORWARD, BACKWARD = "forward-compute", "backward-compute"
_BLOCK = "times across ranks (ms):"
_TIMER = re.compile(r"^(?:\S*: ?)?\s+([a-z][\w-]*):\s*$")
_RANK = re.compile(r"^(?:\S*: ?)?\s+rank\s+(\d+): (\d+(?:\.\d+)?)\s*$")
_FIRST_BLOCKS = 2
"""The first step warms up, and the second block has both: Megatron does not reset its timers after the first step."""

Block = dict[str, dict[int, float]]
"""Of one report: milliseconds of a step by timer and rank."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage; times are milliseconds of a step, medians over steps and then ranks."""

    number: int
    ranks: tuple[int, ...]
    forward_ms: float
    backward_ms: float
    slowest_rank: int
    has_mtp: bool

    @property
    def both_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class Stages:
    """What the timers of one attempt say."""

    name: str
    attempt: int
    steps: int
    stages: tuple[Stage, ...]
    has_mtp: bool
    interleaved: bool
    """A rank holds several parts of the model, so a stage here is a rank's place in the pipeline."""

    @property
    def slowest(self) -> Stage:
        """The stage that the others wait for."""
        return max(self.stages, key=lambda stage: stage.both_ms)

    def as_json(self) -> dict[str, Any]:
        """Every number."""
        return {
            "run": self.name,
            "attempt": self.attempt,
            "reports": self.steps,
            "slowest_stage": self.slowest.number,
            "slowest_holds_mtp": self.slowest.has_mtp,
            "stages": [
                {
                    "stage": stage.number,
                    "ranks": list(stage.ranks),
                    "forward_ms": stage.forward_ms,
                    "backward_ms": stage.backward_ms,
                    "slowest_rank": stage.slowest_rank,
                    "holds_mtp": stage.has_mtp,
                }
                for stage in self.stages
            ],
        }


def blocks(lines: Iterable[str]) -> Iterable[Block]:
    """The reports in a log that have forward or backward times."""
    block: Block = {}
    timer: str | None = None
    for line in lines:
        if line.rstrip().endswith(_BLOCK):
            if block:
                yield block
            block, timer = {}, ""
        elif timer is not None and (rank := _RANK.match(line)):
            if timer in (FORWARD, BACKWARD):
                block.setdefault(timer, {})[int(rank[1])] = float(rank[2])
        elif timer is not None:
            named = _TIMER.match(line)
            timer = named[1] if named else None
    if block:
        yield block


def stage_of(rank: int, recipe: Recipe) -> int:
    """The pipeline stage of a rank (megatron/core/parallel_state.py: order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp)."""
    parallel = recipe.parallel
    count, world = parallel.pipeline_model or 1, parallel.gpus or 1
    if parallel.use_tp_pp_dp_mapping:
        return rank // ((parallel.tensor_model or 1) * (parallel.context or 1)) % count
    return rank // max(1, world // count)


def mtp_stage(recipe: Recipe) -> int | None:
    """The stage with the MTP layers: the layout's, else the last (handbook 3.6, HB 1873); None where there are none."""
    if not recipe.model.mtp_num_layers:
        return None
    count, layout = recipe.parallel.pipeline_model or 1, recipe.parallel.pipeline_model_layout
    virtual = next((i for i, held in enumerate(layout.stages) if "m" in held), None) if layout else None
    return count - 1 if virtual is None else virtual % count


def group(name: str, attempt: int, found: Sequence[Block], recipe: Recipe) -> Stages:
    """Blocks to stages, without the blocks of the first steps where there are others."""
    used = found[_FIRST_BLOCKS:] or found[:1]
    times = {timer: _medians(used, timer) for timer in (FORWARD, BACKWARD)}
    mtp = mtp_stage(recipe)
    ranks: dict[int, list[int]] = {}
    for rank in sorted({rank for timer in times.values() for rank in timer}):
        ranks.setdefault(stage_of(rank, recipe), []).append(rank)

    def both(rank: int) -> float:
        return sum(timer.get(rank, 0.0) for timer in times.values())

    stages = tuple(
        Stage(
            number,
            tuple(those),
            median(times[FORWARD].get(rank, 0.0) for rank in those),
            median(times[BACKWARD].get(rank, 0.0) for rank in those),
            max(those, key=both),
            number == mtp,
        )
        for number, those in sorted(ranks.items())
    )
    layout = recipe.parallel.pipeline_model_layout
    several = bool(layout and len(layout.stages) > (recipe.parallel.pipeline_model or 1))
    return Stages(name, attempt, len(used), stages, mtp is not None, several)


def _medians(found: Sequence[Block], timer: str) -> dict[int, float]:
    by_rank: dict[int, list[float]] = {}
    for block in found:
        for rank, ms in block.get(timer, {}).items():
            by_rank.setdefault(rank, []).append(ms)
    return {rank: median(values) for rank, values in by_rank.items()}


def read(run: RunDir) -> Stages:
    """The stages of the newest attempt that timed its ranks.

    Raises:
        MoekitError: none did.
    """
    recipe = load(str(run.recipe)).recipe
    for number in sorted(run.numbers(), reverse=True):
        try:
            with run.attempt(number).train_log.open(encoding="utf-8", errors="replace") as log:
                found = list(blocks(log))
        except OSError:
            continue
        if found:
            return group(run.path.name, number, found, recipe)
    raise _untimed(run.path.name, recipe)


def _untimed(name: str, recipe: Recipe) -> MoekitError:
    if recipe.log.timing_level == 2 and recipe.log.timing_option == "all":
        return error(f"no log of run `{name}` has the ranks' times yet", "they come with the first step that is logged")
    return error(
        f"run `{name}` did not time its ranks", "set `log: {timing_level: 2, timing_option: all}` in its recipe"
    )


def lines(found: Stages, width: int) -> list[str]:
    """For the terminal: a bar for each stage, and what follows."""
    longest = found.slowest.both_ms or 1.0
    room = max(10, width - 62)
    count = f"{found.steps} report" + ("s" if found.steps != 1 else "")
    rows = [
        f"{found.name}, attempt {found.attempt}: forward and backward of a step, medians of {count}",
        "",
        "  stage  ranks        forward ms  backward ms   sum ms",
    ]
    for stage in found.stages:
        ahead = round(room * stage.forward_ms / longest)
        bar = "█" * ahead + "▒" * round(room * stage.backward_ms / longest)
        ranks = _ranks(stage.ranks)
        mark = "  MTP" if stage.has_mtp else ""
        rows.append(
            f"  {stage.number:>5}  {ranks:<11}  {stage.forward_ms:>10.1f}  {stage.backward_ms:>11.1f}"
            f"  {stage.both_ms:>7.1f}  {bar}{mark}"
        )
    return [*rows, "", *_verdict(found)]


def _ranks(ranks: Sequence[int]) -> str:
    step = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return (f"{ranks[0]}-{ranks[-1]}" if step and len(ranks) > 1 else ",".join(map(str, ranks)))[:11]


def _verdict(found: Stages) -> list[str]:
    slowest, others = found.slowest, [stage.both_ms for stage in found.stages if stage is not found.slowest]
    if not others:
        return ["  There is one stage, so none waits for another."]
    more = slowest.both_ms / (median(others) or 1.0) - 1
    how = f"{more:.0%} over the median of the others, rank {slowest.slowest_rank} most"
    rows = [f"  Slowest is stage {slowest.number}: {how}."]
    if slowest.has_mtp:
        rows.append(
            "  It holds the MTP layer: divide the layers around it by `parallel.pipeline_model_layout` (HB 1894)."
        )
    elif found.has_mtp:
        rows.append("  It does not hold the MTP layer.")
    else:
        rows.append("  The run has no MTP layer.")
    if found.interleaved:
        rows.append("  Ranks hold several parts of the model each; a stage is a rank's place in the pipeline.")
    return rows


def by_timer(found: Stages) -> Mapping[str, Mapping[str, float]]:
    """Milliseconds by stage's name and timer, for a picture."""
    return {
        f"stage {stage.number}" + (" (MTP)" if stage.has_mtp else ""): {
            "forward": stage.forward_ms,
            "backward": stage.backward_ms,
        }
        for stage in found.stages
    }
