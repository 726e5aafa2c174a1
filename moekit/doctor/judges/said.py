"""What the judges share: what a judgement is, and the numbers that several of them use. Pure."""

from __future__ import annotations

Said = tuple[str, str] | None
"""A sentence with its numbers, and how sure it is: `sure`, `likely` or `possible`; nothing where nothing shows it."""
WINDOW = 20
"""Logged steps of a median."""
UNEVEN = 1.0
"""MaxVio from which the busiest expert has twice its share, as in `Thresholds.max_vio`."""
EVEN = 0.3
"""MaxVio that a balancer comes to in all of the handbook's runs that it calls even."""


def names(ranks: set[int]) -> str:
    """The first of them, and how many more."""
    first = ", ".join(map(str, sorted(ranks)[:8]))
    return f"{first} and {len(ranks) - 8} more" if len(ranks) > 8 else first
