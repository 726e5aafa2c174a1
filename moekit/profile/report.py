"""Shares of a step for people, as a picture and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from moekit.problems import CONTROL, shortened
from moekit.profile.families import FAMILIES, IDLE
from moekit.profile.levers import levers, remark
from moekit.profile.shares import Shares, Waiting, part
from moekit.profile.traces import Profiled

_ALL = (*FAMILIES, IDLE)
_COLOURS = ("#0072b2", "#009e73", "#56b4e9", "#e69f00", "#999999", "#d55e00", "#cc79a7", "#eeeeee")
"""Okabe and Ito's, for the families in their order."""
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
        *_waiting(against),
        *_advice(profiled, against),
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


def _waiting(against: Waiting | None) -> Iterator[str]:
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


def bars_svg(title: str, bars: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A bar for each name, of parts beside each other, the longest across the whole width; with a legend."""
    kinds = list(dict.fromkeys(kind for parts in bars.values() for kind in parts))
    colours = dict(zip(_ALL, _COLOURS, strict=True))
    shade = {kind: colours.get(kind, _COLOURS[number % len(_COLOURS)]) for number, kind in enumerate(kinds)}
    longest = max((sum(parts.values()) for parts in bars.values()), default=0) or 1.0
    top = 40 + 18 * ((len(kinds) + 3) // 4)
    height = top + 24 * len(bars) + 12
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" font-family="sans-serif"'
        ' font-size="11">',
        f'<rect width="760" height="{height}" fill="white"/>',
        f'<text x="12" y="20" font-size="14" font-weight="bold">{_text(title)}</text>',
    ]
    for number, kind in enumerate(kinds):
        x, y = 12.0 + 185 * (number % 4), 32 + 18 * (number // 4)
        rows.append(f'<rect x="{x:g}" y="{y}" width="11" height="11" fill="{shade[kind]}" stroke="#888"/>')
        rows.append(f'<text x="{x + 16:g}" y="{y + 10}">{_text(kind)}</text>')
    for number, (name, parts) in enumerate(bars.items()):
        across_to, y = 140.0, top + 24 * number
        rows.append(f'<text x="132" y="{y + 13}" text-anchor="end">{_text(shortened(name)[:22])}</text>')
        for kind, value in parts.items():
            x, across = across_to, 600 * max(0.0, value) / longest
            said = f"{value:.1%}" if not unit else f"{value:.1f} {unit}"
            rows.append(
                f'<rect x="{x:.1f}" y="{y}" width="{across:.1f}" height="18" fill="{shade[kind]}">'
                f"<title>{_text(f'{name}, {kind}: {said}')}</title></rect>"
            )
            if across > 44:
                rows.append(f'<text x="{x + across / 2:.1f}" y="{y + 13}" text-anchor="middle">{said}</text>')
            across_to += across
    return "\n".join([*rows, "</svg>"]) + "\n"


def _text(text: str) -> str:
    return escape(CONTROL.sub("?", text))
