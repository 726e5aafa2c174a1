"""Whether a layout fits a GPU: what torch can have of each kind, and how sure the answer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moekit.plan.candidates import Floats
from moekit.plan.memory.model import Memory

Fit = Literal["fits", "tight", "does not fit"]

GIB = 2.0**30
CAPACITY_GIB = {"a100": 79.3, "h100": 79.1, "h200": 139.8, "b200": 178.4, "gb200": 184.0, "b300": 267.0, "gb300": 277.0}
"""Memory of a GPU as torch tells its total, by the profile's name for it; the 80 GB kinds of a100 and h100, a100 and
h100 as runs print it, the others the maker's figure less what a driver takes (assumed)."""
TIGHT_SHARE = 0.92
"""Of the memory: above it an answer is no surer than the model, whose median error is some hundredths."""


@dataclass(frozen=True)
class Verdict:
    """Of one layout."""

    fit: Fit
    stage: int
    """The fullest pipeline stage."""
    needed_bytes: float
    capacity_bytes: float
    largest: tuple[tuple[str, float], ...]
    """The stage's terms in bytes, the largest first."""


def fit_of(needed_bytes: float, capacity_bytes: float) -> Fit:
    """The answer for one GPU."""
    if needed_bytes > capacity_bytes:
        return "does not fit"
    return "tight" if needed_bytes > TIGHT_SHARE * capacity_bytes else "fits"


def verdict(found: Memory, capacity_bytes: float, candidate: int = 0) -> Verdict:
    """Judge one layout by its fullest stage."""
    needed: Floats = found.needed[candidate]
    stage = int(np.argmax(needed))
    terms = {name: float(size[candidate, stage]) for name, size in found.terms.items()}
    largest = sorted(((name, size) for name, size in terms.items() if size > 0), key=lambda one: -one[1])
    return Verdict(
        fit_of(float(needed[stage]), capacity_bytes), stage, float(needed[stage]), capacity_bytes, tuple(largest)
    )
