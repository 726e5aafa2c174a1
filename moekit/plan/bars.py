"""Stacked bars, one a pipeline stage: in a terminal by shades, in a file as an SVG or HTML picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from moekit.problems import CONTROL

SHADES = "█▓▒░╬≡+·"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
"""Okabe and Ito's, told apart by everybody."""
_LEFT, _RIGHT, _BAR, _STEP = 90, 70, 18, 26


@dataclass(frozen=True)
class Chart:
    """Bars of the same terms; at most as many terms as there are shades."""

    title: str
    unit: str
    terms: Sequence[str]
    bars: Mapping[str, Sequence[float]]
    """By name, one number a term."""
    limit: float | None = None
    """Where a line is drawn, such as a GPU's memory."""
    limit_name: str = ""

    @property
    def most(self) -> float:
        """The length that the whole width stands for."""
        return max((*(sum(bar) for bar in self.bars.values()), self.limit or 0.0, 1e-9))


def lines(chart: Chart, width: int) -> list[str]:
    """The chart in `width` columns: a legend, a bar a line with its sum, and a last line where the limit is."""
    name = max(map(len, chart.bars), default=0)
    room = max(20, width - name - 14)
    legend = "  ".join(f"{shade} {term}" for shade, term in zip(SHADES, chart.terms, strict=False))
    text = [f"{chart.title}, {chart.unit}", f"  {legend}"]
    at = None if chart.limit is None else round(chart.limit / chart.most * room)
    for stage, bar in chart.bars.items():
        drawn = "".join(shade * count for shade, count in zip(SHADES, _columns(bar, chart.most, room), strict=False))
        drawn = drawn.ljust(room + 1)
        if at is not None:
            drawn = f"{drawn[:at]}│{drawn[at + 1 :]}" if drawn[at] == " " else drawn
        text.append(f"  {stage:>{name}} {drawn.rstrip():{room + 1}} {sum(bar):8,.1f}")
    if at is not None:
        text.append(f"  {'':{name}} {'':{at}}└ {chart.limit:,.1f} {chart.limit_name}")
    return text


def _columns(bar: Sequence[float], most: float, room: int) -> list[int]:
    """Columns of each part, whose sums are where the parts end."""
    ends = [round(sum(bar[: place + 1]) / most * room) for place in range(len(bar))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


_WIDTH = 720


def svg(*charts: Chart) -> str:
    """Charts below each other, as one SVG picture."""
    parts, height = [], 0
    for chart in charts:
        drawn, high = _drawn(chart)
        parts += [f'<g transform="translate(0,{height})">', *drawn, "</g>"]
        height += high
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="11">'
    )
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


def _drawn(chart: Chart) -> tuple[list[str], int]:
    """A chart's elements, and how high they are."""
    room, rows = _WIDTH - _LEFT - _RIGHT, len(chart.bars)
    top = 30 + 18 * -(-len(chart.terms) // 4)
    title = _text(f"{chart.title}, {chart.unit}")
    parts = [f'<text x="{_LEFT}" y="18" font-size="14" font-weight="bold">{title}</text>']
    for number, term in enumerate(chart.terms):
        x, y = _LEFT + number % 4 * room // 4, 38 + 18 * (number // 4)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 14}" y="{y}">{_text(term)}</text>')
    for row, (stage, bar) in enumerate(chart.bars.items()):
        parts += _svg_bar(chart, stage, bar, top + row * _STEP, room)
    if chart.limit is not None:
        at, bottom = _LEFT + chart.limit / chart.most * room, top + rows * _STEP
        parts.append(f'<path d="M{at:.1f},{top - 4} V{bottom}" stroke="black" stroke-dasharray="3,3"/>')
        said = _text(f"{chart.limit:,.1f} {chart.limit_name}")
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14}" text-anchor="middle">{said}</text>')
    return parts, top + rows * _STEP + 24


def _svg_bar(chart: Chart, stage: str, bar: Sequence[float], y: int, room: int) -> Iterable[str]:
    yield f'<text x="{_LEFT - 6}" y="{y + 13}" text-anchor="end">{_text(stage)}</text>'
    begin = 0.0
    for number, (term, value) in enumerate(zip(chart.terms, bar, strict=True)):
        x, wide = _LEFT + begin / chart.most * room, value / chart.most * room
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}" fill="{COLOURS[number]}">'
            f"<title>{_text(f'{term}: {value:,.2f} {chart.unit}')}</title></rect>"
        )
        begin += value
    yield f'<text x="{_LEFT + begin / chart.most * room + 4:.1f}" y="{y + 13}">{sum(bar):,.1f}</text>'


def html(title: str, charts: Sequence[Chart], text: Iterable[str]) -> str:
    """A page that needs nothing else: the pictures, then the text as it is printed."""
    pictures = svg(*charts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{_text(title)}</title></head>\n<body>\n'
        f"{pictures}<pre>\n{_text_lines(text)}\n</pre>\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return escape(CONTROL.sub("?", text))


def _text_lines(text: Iterable[str]) -> str:
    return "\n".join(_text(line) for line in text)
