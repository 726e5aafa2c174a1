"""Mean output norms of experts and what they say of a layer, from sums that can be merged (handbook A.1); pure.

A norm is the L2 norm of one token's output vector. Sums and rows are added over micro batches, replicas and expert
parallel shards, and only then divided: means of means, or medians of one rank's experts, are no layer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moekit.problems import error


@dataclass(frozen=True)
class LayerNorms:
    """One layer's experts, or those of a part of it; experts that are not in the part have no rows."""

    rows: NDArray[np.int64]
    """Output vectors `# (expert,)`."""
    sum_l2: NDArray[np.float64]
    """Sum of their L2 norms `# (expert,)`."""
    width: int
    """Elements of a vector: a norm over its root is the vector's RMS, which compares across widths."""

    @property
    def mean(self) -> NDArray[np.float64]:
        """The mean norm `# (expert,)`; NaN where an expert received nothing."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.rows > 0, self.sum_l2 / self.rows, np.nan)

    @property
    def empty(self) -> list[int]:
        """The experts that received nothing: they have no mean, and no part in the median."""
        return [int(expert) for expert in np.flatnonzero(self.rows == 0)]

    @property
    def not_finite(self) -> list[int]:
        """The experts that received tokens and have a NaN or an infinity among their outputs."""
        return [int(expert) for expert in np.flatnonzero((self.rows > 0) & ~np.isfinite(self.sum_l2))]

    @property
    def median(self) -> float | None:
        """Over the experts that received something; None where there is none, or one is not finite."""
        means = self.mean[self.rows > 0]
        return float(np.median(means)) if len(means) and np.isfinite(means).all() else None

    @property
    def over_median(self) -> NDArray[np.float64] | None:
        """Each expert's mean norm over the median `# (expert,)`; None where that is zero or not defined."""
        return self.mean / self.median if self.median else None

    @property
    def extremes(self) -> tuple[float, float] | None:
        """The largest and the smallest of `over_median`: an expert running wild, and one that dies (handbook 3.6)."""
        ratios = self.over_median
        return None if ratios is None else (float(np.nanmax(ratios)), float(np.nanmin(ratios)))


def part(experts: Sequence[int], rows: Sequence[int], sum_l2: Sequence[float], width: int, total: int) -> LayerNorms:
    """The norms of some of `total` experts, by their global numbers.

    Raises:
        MoekitError: the three do not fit together.
    """
    numbers_fit = len(experts) == len(rows) == len(sum_l2) and len(set(experts)) == len(experts)
    if not numbers_fit or any(not 0 <= expert < total for expert in experts) or any(row < 0 for row in rows):
        raise error(f"{len(rows)} counts and {len(sum_l2)} sums do not fit experts {list(experts)[:8]} of {total}")
    all_rows, sums = np.zeros(total, np.int64), np.zeros(total, np.float64)
    all_rows[list(experts)], sums[list(experts)] = rows, sum_l2
    return LayerNorms(all_rows, sums, width)


def merge(parts: Iterable[LayerNorms]) -> LayerNorms:
    """All parts of one layer together.

    Raises:
        MoekitError: they are not of one layer, as their widths or numbers of experts show.
    """
    parts = list(parts)
    if len({(len(one.rows), one.width) for one in parts}) != 1:
        shapes = ", ".join(sorted({f"{len(one.rows)} x {one.width}" for one in parts})) or "none"
        raise error(f"expert norms of different shapes cannot be merged: {shapes}")
    rows = np.sum([one.rows for one in parts], axis=0)
    return LayerNorms(rows, np.sum([one.sum_l2 for one in parts], axis=0), parts[0].width)


@dataclass(frozen=True)
class Rms:
    """Root mean square of a tensor, as what can be merged."""

    sum_of_squares: float
    elements: int

    @property
    def value(self) -> float | None:
        """None where there are no elements."""
        return float(np.sqrt(self.sum_of_squares / self.elements)) if self.elements else None

    def __add__(self, other: Rms) -> Rms:
        return Rms(self.sum_of_squares + other.sum_of_squares, self.elements + other.elements)
