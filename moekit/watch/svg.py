"""Curves as an SVG picture: panels below each other, each with its axes and named lines; no program is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from moekit.problems import CONTROL

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, told apart by everybody."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 150, 70, 12, 26, 30


@dataclass(frozen=True)
class Panel:
    """One plot; lines are `(x, y)` points by name, which is shown."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def svg(title: str, panels: Sequence[Panel]) -> str:
    """The picture as text; panels without points are left out, and all have the same x axis."""
    panels = [panel for panel in panels if any(panel.lines.values())]
    every = [x for panel in panels for line in panel.lines.values() for x, _ in line] or [0.0]
    height = 30 + _HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
        ' font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">{_text(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += [
            f'<g transform="translate(0,{30 + number * _HEIGHT})">',
            *_panel(panel, min(every), max(every)),
            "</g>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, x_low: float, x_high: float) -> list[str]:
    values = [y for line in panel.lines.values() for _, y in line]
    low, high = min(values), max(values)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(x: float, y: float) -> str:
        across = _LEFT + (x - x_low) / ((x_high - x_low) or 1) * (right - _LEFT)
        return f"{across:.1f},{bottom - (y - low) / ((high - low) or 1) * (bottom - _TOP):.1f}"

    parts = [
        f'<text x="{_LEFT}" y="16" font-weight="bold">{_text(panel.title)}</text>',
        f'<path d="M{_LEFT},{_TOP} V{bottom} H{right}" fill="none" stroke="#888"/>',
        *(
            f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{value:.4g}</text>'
            for y, value in ((_TOP + 4, high), (bottom, low))
        ),
        f'<text x="{_LEFT}" y="{bottom + 14}">{x_low:g}</text>',
        f'<text x="{right}" y="{bottom + 14}" text-anchor="end">{x_high:g}</text>',
    ]
    named = 0
    for number, (name, line) in enumerate(panel.lines.items()):
        if line:
            colour, points = _COLOURS[number % len(_COLOURS)], " ".join(place(x, y) for x, y in line)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            at = right - 150 * named
            parts.append(f'<text x="{at}" y="16" text-anchor="end" fill="{colour}">{_text(name)}</text>')
            named += 1
    return parts


def _text(text: str) -> str:
    return escape(CONTROL.sub("?", text))
