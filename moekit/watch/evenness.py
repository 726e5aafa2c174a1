"""How even a load is: MaxVio in its two scopes, the ranks' loads, experts that received nothing (handbook A.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moekit.watch.layout import RankLayout


class Peak(NamedTuple):
    """One layer's micro batch of one expert parallel group: what its busiest expert and all its experts received."""

    busiest: int
    tokens: int


def max_vio(counts: Sequence[int]) -> float | None:
    """How far the busiest expert exceeds the mean load: max / mean - 1. 0 is even, the ceiling is E / k - 1.

    None where no expert received anything: it is undefined there (handbook A.1). Experts at zero belong to the mean.
    """
    total = sum(counts)
    return max(counts) * len(counts) / total - 1 if total else None


def max_vio_micro(microbatches: Sequence[Peak], num_experts: int) -> float | None:
    """MaxVio of single micro batches, as the mean over all that received anything; None where none did.

    Not the global batch's: experts may be uneven in every micro batch and even over all (handbook A.1).
    """
    values = [peak.busiest * num_experts / peak.tokens - 1 for peak in microbatches if peak.tokens]
    return sum(values) / len(values) if values else None


def rank_loads(counts: Sequence[int], layout: RankLayout) -> list[int]:
    """Tokens `# (expert parallel rank,)` of one layer, over all replicas."""
    size = layout.experts_per_rank
    return [sum(counts[first : first + size]) for first in range(0, layout.num_experts, size)]


def rank_imbalance(counts: Sequence[int], layout: RankLayout) -> float | None:
    """Load of the busiest expert parallel rank over the mean rank's (1 is even), or None without any tokens."""
    ranks = rank_loads(counts, layout)
    total = sum(ranks)
    return max(ranks) * len(ranks) / total if total else None


def dead_experts(counts: Sequence[int]) -> list[int]:
    """The experts that received nothing."""
    return [expert for expert, count in enumerate(counts) if not count]
