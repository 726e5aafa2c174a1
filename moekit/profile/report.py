"""Shares of a step for people, for a picture, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from moekit.problems import shortened
from moekit.profile.families import ALL_TO_ALL, FAMILIES, IDLE
from moekit.profile.levers import levers, remark
from moekit.profile.shares import Shares, Waiting, last_to_arrive, part
from moekit.profile.traces import Profiled

_ALL = (*FAMILIES, IDLE)
_MOST_ROWS = 16


def lines(profiled: Profiled, against: Waiting | None, width: int) -> list[str]:
    """For the terminal."""
    ranks = profiled.ranks
    return [
        *_heading(profiled),
        "",
        *_families(ranks, width),
        "",
        *_ranks(ranks),
        *_streams(ranks),
        *_waiting(ranks, against),
        *(row for said in _advice(profiled, against) for row in _wrapped(said, width)),
    ]


def _heading(profiled: Profiled) -> Iterator[str]:
    ranks = profiled.ranks
    sources = " and ".join(dict.fromkeys(rank.source for rank in ranks))
    count = f"{len(ranks)} rank" + ("s" if len(ranks) > 1 else "")
    where = "CPU operators, no kernels" if any(rank.on_cpu for rank in ranks) else "GPU kernels"
    yield f"{shortened(profiled.name)}: {where} of {count}, by {sources}"
    if any(rank.on_cpu for rank in ranks):
        yield "  Of a CPU: what a GPU's step would be made of does not follow."
        yield "  Idle is Python between operators, or waiting for another stage."
    if any(rank.unnamed_sends for rank in ranks):
        yield "  NCCL's SendRecv kernels name no collective here; a pipeline's count as all-to-all too."
    if skipped := sum(rank.skipped for rank in ranks):
        yield f"  {skipped:,} events have no usable time and are left out."


def _families(ranks: Sequence[Shares], width: int) -> Iterator[str]:
    whole = sum(rank.whole_ns for rank in ranks) or 1
    room = max(10, width - 52)
    yield "  family               of the step    runs for"
    for family in _ALL:
        share = part(ranks, family)
        runs = "" if family == IDLE else f"{sum(rank.busy_ns[family] for rank in ranks) / whole:.1%}"
        yield f"  {family:<20} {share:>10.1%}  {runs:>10}  {'█' * round(room * share)}".rstrip()


def _ranks(ranks: Sequence[Shares]) -> Iterator[str]:
    yield "  by rank               steps  ms a step  a2a exposed  a2a hidden    idle"
    for rank in ranks[:_MOST_ROWS]:
        whole = rank.whole_ns or 1
        step = f"{rank.whole_ns / 1e6 / rank.steps:,.1f}" if rank.steps else "?"
        yield (
            f"  {shortened(rank.name):<20} {rank.steps or '?':>6}  {step:>9}  {rank.exposed_ns / whole:>11.1%}"
            f"  {rank.hidden_ns / whole:>10.1%}  {rank.share_ns[IDLE] / whole:>6.1%}"
        )
    if len(ranks) > _MOST_ROWS:
        yield f"  ... and {len(ranks) - _MOST_ROWS} more; --json has them all"
    yield ""


def _streams(ranks: Sequence[Shares]) -> Iterator[str]:
    rank = ranks[0]
    yield f"  by {'thread' if rank.on_cpu else 'stream'} of {shortened(rank.name)}"
    for stream in rank.streams[:6]:
        longest = sorted(stream.busy_ns.items(), key=lambda item: -item[1])[:3]
        made_of = ", ".join(f"{family} {ns / (rank.whole_ns or 1):.1%}" for family, ns in longest if ns)
        yield f"  {shortened(stream.name):<20} {made_of}"
    if len(rank.streams) > 6:
        yield f"  ... and {len(rank.streams) - 6} more; --json has them all"


def _waiting(ranks: Sequence[Shares], against: Waiting | None) -> Iterator[str]:
    if last := last_to_arrive(ranks):
        rank, usual_ns = last
        steps = rank.steps or 1
        yield ""
        yield (
            f"  {shortened(rank.name)} is least in all-to-all: {rank.busy_ns[ALL_TO_ALL] / steps / 1e6:,.2f} ms"
            f"{' a step' if rank.steps else ''}, half of the ranks {usual_ns / steps / 1e6:,.2f} or more;"
        )
        yield "  the others may be waiting for it"
    if against is not None:
        yield ""
        yield "  beside forced balance       this    balanced"
        yield f"  step, ms              {against.step_ms:>10,.1f}  {against.balanced_step_ms:>10,.1f}"
        yield f"  all-to-all, ms        {against.all_to_all_ms:>10,.1f}  {against.balanced_ms:>10,.1f}"
        yield f"  so waiting {against.waiting_ms:,.1f} ms a step, moving {against.moving_ms:,.1f} ms"


def _advice(profiled: Profiled, against: Waiting | None) -> Iterator[str]:
    found = levers(profiled.ranks, against, profiled.recipe)
    yield ""
    for number, lever in enumerate(found):
        yield f"  {'first' if not number else 'later, alone'}: {lever.name}, since {lever.why}"
        yield f"    {lever.change} (handbook 3.7, {lever.source})"
    if found:
        yield "  One at a time, each judged by the step's time: their gains do not add up (HB 2087)."
    elif any(rank.on_cpu for rank in profiled.ranks):
        yield "  No lever of handbook 3.7 is named from a CPU's trace."
    else:
        yield "  No lever of handbook 3.7 is called for: neither all-to-all nor permute and copy takes a tenth."
    if said := remark(profiled.ranks):
        yield f"  {said}"


def _wrapped(row: str, width: int) -> list[str]:
    """A row in as many as the terminal needs, each as far in as the first."""
    indent = row[: len(row) - len(row.lstrip())]
    rows = wrap(row, max(40, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return rows or [row]


def as_json(profiled: Profiled, against: Waiting | None) -> dict[str, Any]:
    """Every number, times in nanoseconds."""
    return {
        "name": profiled.name,
        "share": {family: part(profiled.ranks, family) for family in _ALL},
        "all_to_all": {
            "exposed_ns": sum(rank.exposed_ns for rank in profiled.ranks),
            "hidden_ns": sum(rank.hidden_ns for rank in profiled.ranks),
        },
        "ranks": [asdict(rank) for rank in profiled.ranks],
        "forced_balance": None
        if against is None
        else asdict(against) | {"waiting_ms": against.waiting_ms, "moving_ms": against.moving_ms},
        "levers": [asdict(lever) for lever in levers(profiled.ranks, against, profiled.recipe)],
    }


def bars_of(profiled: Profiled) -> dict[str, dict[str, float]]:
    """Shares by rank's name and family, for a picture."""
    return {
        rank.name: {family: rank.share_ns[family] / (rank.whole_ns or 1) for family in _ALL} for rank in profiled.ranks
    }
