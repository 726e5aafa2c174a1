"""Bars of parts as an SVG picture; no program is needed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from moekit.problems import CONTROL, shortened
from moekit.profile.families import FAMILIES, IDLE

_COLOURS = ("#0072b2", "#009e73", "#56b4e9", "#e69f00", "#999999", "#d55e00", "#cc79a7", "#eeeeee")
"""Okabe and Ito's, for the families in their order."""


def bars_svg(title: str, bars: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A bar for each name, of parts beside each other, the longest across the whole width; with a legend."""
    kinds = list(dict.fromkeys(kind for parts in bars.values() for kind in parts))
    colours = dict(zip((*FAMILIES, IDLE), _COLOURS, strict=True))
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
