"""How uneven experts' ranks are taken to be: even, as told, as a run counted, or between two bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.memory.imbalance import busiest_of_counts, busiest_of_violation, read_counts
from moekit.plan.shape import Shape
from moekit.problems import error


@dataclass(frozen=True)
class Load:
    """Rows of the busiest expert-parallel rank over the mean, of any layout."""

    text: str
    """Where it is from; empty where experts are taken to be even."""
    most: Callable[[Candidates], Floats]
    """What memory and time are worked out for. `# (candidate,)`"""
    least: Callable[[Candidates], Floats]
    """The same with the best placement of experts that is possible; `most` where nothing is left open."""


def load_of(
    shape: Shape, rank_imbalance: float | None, counts: Path | None, maxvio: float | None, expert_tensor: int = 1
) -> Load:
    """The load that a user tells in one of three ways, or even experts.

    Raises:
        MoekitError: two of them are told, there are no experts, or the counts are of another model.
    """
    told = {"--rank-imbalance": rank_imbalance, "--counts": counts, "--maxvio": maxvio}
    named = [name for name, value in told.items() if value is not None]
    if len(named) > 1:
        raise error(f"`{named[0]}` and `{named[1]}` both say how uneven experts are", "keep one of them")
    if named and shape.experts is None:
        raise error(f"`{named[0]}` is about experts, and the model has none")
    if shape.experts is not None and counts is not None:
        return _counted(read_counts(counts, shape.experts.number, expert_tensor), counts)
    if shape.experts is not None and maxvio is not None:
        return _violated(maxvio, shape.experts.number)
    busiest = 1.0 if rank_imbalance is None else rank_imbalance

    def told_busiest(rows: Candidates) -> Floats:
        return np.where(rows.expert > 1, busiest, 1.0)

    return Load("" if rank_imbalance is None else "as told", told_busiest, told_busiest)


def _counted(counts: Floats, path: Path) -> Load:
    def counted(rows: Candidates) -> Floats:
        return busiest_of_counts(counts, rows.expert)

    return Load(f"by the counts of {path}", counted, counted)


def _violated(maxvio: float, experts: int) -> Load:
    def least(rows: Candidates) -> Floats:
        return busiest_of_violation(maxvio, experts, rows.expert)[0]

    def most(rows: Candidates) -> Floats:
        return busiest_of_violation(maxvio, experts, rows.expert)[1]

    return Load(f"at the worst placement of experts for MaxVio {maxvio:g}", most, least)
