"""The router's report as text, 80 columns wide and up, and as a picture of the experts' loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from moekit.problems import CONTROL
from moekit.watch.chart import neighbours, shares
from moekit.watch.router.agree import Disagreement
from moekit.watch.router.report import LayerRow, Report, Section, Spread

_FILES = 8
"""Without a recipe, so many ranks' files are shown."""
_TITLES = {"counts": "counts, behind the dispatch", "trace": "routing trace, ahead of the dispatch"}


def lines(report: Report, width: int) -> Iterator[str]:
    """The report, a line at a time."""
    name = CONTROL.sub("?", report.name)
    if report.experts is None:
        yield f"{name}: no recipe says which experts and layers these are, so each rank's file stays apart;"
        yield "experts are numbered within their rank, layers within their pipeline stage, and no load is a global one"
    else:
        over = f" over {report.expert_parallel} expert parallel ranks" if report.expert_parallel != 1 else ""
        yield f"{name}: {report.experts} experts{over}, balanced by {report.balancing}"
    if report.serving_ep:
        over = f"{report.serving_ep} serving ranks"
        yield f"moe_lb: the busiest over the mean of {over}, experts in a row and once each"
    for section in report.sections[: _FILES if report.experts is None else None]:
        yield ""
        yield from _section(section, width)
    if report.disagreement:
        yield ""
        yield from _disagreement(report.disagreement)
    if report.experts is None and len(report.sections) > _FILES:
        yield f"\nand the files of {len(report.sections) - _FILES} more ranks, all in --json"


def _section(section: Section, width: int) -> Iterator[str]:
    local = section.source not in _TITLES
    title = _TITLES.get(section.source, f"counts of {section.source}'s own experts")
    share = "" if section.found == section.expected else f" ({section.found / max(section.expected, 1):.1%})"
    yield f"{title}, {_steps(section.steps)}: {section.found:,} of {section.expected:,} records{share}"
    yield from _table(section, local)
    yield from (f"  {note}" for note in section.notes)
    shown = [row for row in section.layers if any(row.load)]
    if not shown:
        return
    margin = max(len(row.name) for row in shown) + 4
    experts = len(shown[0].load)
    together = neighbours(experts, width - margin)
    each = f", each block the busiest of {together}" if together > 1 else ""
    yield f"  load of experts 0 to {experts - 1}: · nothing, ▄ the mean, █ twice it or more{each}"
    for row in shown:
        blocks = "".join(block for block, _ in shares(row.load, width - margin))
        yield f"  {row.name:<{margin - 3}} {blocks}".rstrip()


def _disagreement(found: Disagreement) -> Iterator[str]:
    """The two numbers, and the first of them by layer."""
    yield f"against {found.other}, step {found.step:,}, {found.compared:,} tokens in {len(found.layers)} layers:"
    yield f"  {found.choices:.1%} of choices, one a token and layer, are of other experts"
    yield f"  {found.tokens:.1%} of tokens have other experts in at least one layer"
    for name, share in found.layers.items():
        yield f"  {name}  {share:.1%}"
    if found.left_out:
        yield f"  the tokens of {found.left_out} ranks are left out: records are missing on a side"
    yield "  rows are taken for the same tokens, as where both runs read the same data in the same order"


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "no step"
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    return f"{len(steps)} steps from {steps[0]:,} to {steps[-1]:,}"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mean(spread: Spread | None) -> str:
    return _value(spread.mean if spread else None)


def _worst(spread: Spread | None) -> str:
    return _value(spread.worst if spread else None)


def _table(section: Section, local: bool) -> Iterator[str]:
    """Columns under their headings; what a source cannot have is left out."""
    columns: list[tuple[str, Callable[[LayerRow], str]]] = [
        ("micro", lambda row: _mean(row.max_vio_micro)),
        ("worst", lambda row: _worst(row.max_vio_micro)),
        ("global" if not local else "all", lambda row: _mean(row.max_vio_global)),
    ]
    if any(row.max_vio_sequence for row in section.layers):
        columns += [
            ("sequence", lambda row: _mean(row.max_vio_sequence)),
            ("worst", lambda row: _worst(row.max_vio_sequence)),
        ]
    max_vio = sum(len(title) + 2 for title, _ in columns)
    if not local:
        columns += [
            ("global", lambda row: _mean(row.rank_imbalance)),
            ("micro", lambda row: _mean(row.rank_imbalance_micro)),
            ("busiest", lambda row: "-" if row.busiest_rank is None else str(row.busiest_rank)),
        ]
    if any(row.moe_lb for row in section.layers):
        columns.append(("moe_lb", lambda row: _mean(row.moe_lb)))
    columns.append(("dead", lambda row: str(len(row.dead_experts))))
    names = [f"{row.name} #" if row.hashed else row.name for row in section.layers]
    margin = max(map(len, [*names, "layer"]))
    yield f"  {'':<{margin}}  {'MaxVio':<{max_vio}}{'' if local else 'ranks, of their mean'}".rstrip()
    yield f"  {'layer':<{margin}}  " + "  ".join(title for title, _ in columns)
    for name, row in zip(names, section.layers, strict=True):
        cells = (f"{of(row):>{len(title)}}" for title, of in columns)
        yield f"  {name:<{margin}}  " + "  ".join(cells)
    yield from _below(section.layers)


def _below(rows: Sequence[LayerRow]) -> Iterator[str]:
    """Hash layers beside the others, and the dead by name."""
    kinds = [[row for row in rows if row.hashed is hashed and row.max_vio_global] for hashed in (True, False)]
    if kinds[0]:
        yield "  # a hash layer: nothing evens out its table while it trains (3.2)"
    if all(kinds):
        of = [sum(row.max_vio_global.mean for row in kind if row.max_vio_global) / len(kind) for kind in kinds]
        yield f"  MaxVio, global, mean of the layers: {of[0]:.2f} of hash layers, {of[1]:.2f} of learned ones"
    for row in rows:
        if row.dead_experts:
            more = ", ..." if len(row.dead_experts) > 12 else ""
            yield f"  no token in {row.name}: expert {', '.join(map(str, row.dead_experts[:12]))}{more}"


def picture(report: Report) -> str:
    """Heat maps as SVG: a row a layer, a column an expert, white without a token, dark from twice the mean on."""
    parts, top, right = [], 40, 300
    for section in report.sections:
        shown = [row for row in section.layers if any(row.load)]
        if not shown:
            continue
        size = max(2, min(16, 900 // len(shown[0].load)))
        title = _TITLES.get(section.source, section.source)
        parts.append(f'<text x="10" y="{top}">{escape(title)}, {_steps(section.steps)}</text>')
        for number, row in enumerate(shown):
            y = top + 8 + 16 * number
            parts.append(f'<text x="{160}" y="{y + 12}" text-anchor="end">{escape(row.name)}</text>')
            mean = row.tokens / len(row.load)
            for expert, count in enumerate(row.load):
                place = f'x="{170 + expert * size}" y="{y}" width="{size}" height="15"'
                said = f"{row.name}, expert {expert}: {count:,} tokens, {count / mean:.2f} of the mean"
                parts.append(f'<rect {place} fill="{_colour(count / mean)}"><title>{escape(said)}</title></rect>')
        top += 40 + 16 * len(shown)
        right = max(right, 190 + size * len(shown[0].load))
    name = escape(CONTROL.sub("?", report.name))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{top}" font-family="sans-serif"'
    return "\n".join(
        [
            f'{head} font-size="11">',
            f'<rect width="{right}" height="{top}" fill="#eee"/>',
            f'<text x="10" y="20" font-size="14" font-weight="bold">{name}: load of experts, of their mean</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _colour(ratio: float) -> str:
    """White at 0 over orange at the mean to dark red at twice it: ever darker, so also told apart in grey."""
    low, middle, high = (255, 255, 255), (253, 174, 97), (128, 0, 38)
    first, second, part = (low, middle, ratio) if ratio < 1 else (middle, high, min(ratio, 2) - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(first, second, strict=True))
