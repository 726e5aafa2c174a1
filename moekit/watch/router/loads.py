"""How even the load of experts is: pure functions on counts, whose last axis is the expert (handbook A.1).

Which axes were added up before says what a value is of: a micro batch of an expert parallel group, a global batch, a
sequence. The mean of one is never the other, so nothing here adds up or takes means. NaN stands for "undefined": where
nothing was counted there is no evenness.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Values = NDArray[np.float64]


def max_vio(counts: Counts) -> Values:
    """How far the busiest expert exceeds the mean load, max / mean - 1, of each vector. `# (..., expert) -> (...)`

    Experts at zero belong to the mean; an all-zero vector is undefined.
    """
    return busiest_over_mean(counts) - 1


def rank_loads(counts: Counts, expert_parallel: int) -> Counts:
    """Tokens of each expert parallel rank, which holds experts in a row. `# (..., expert) -> (..., rank)`"""
    return counts.reshape(*counts.shape[:-1], expert_parallel, counts.shape[-1] // expert_parallel).sum(axis=-1)


def busiest_over_mean(loads: Counts) -> Values:
    """The most over the mean: of ranks, the rank imbalance, 1 where even. `# (..., rank) -> (...)`

    Of the ranks of a serving engine this is what is reported as `moe_lb` (handbook 4).
    """
    total = loads.sum(axis=-1, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(total > 0, loads.max(axis=-1) * loads.shape[-1] / total, np.nan)


def dead_experts(counts: Counts) -> list[int]:
    """The experts of one vector that received nothing, none where nobody received anything. `# (expert,)`"""
    return np.flatnonzero(counts == 0).tolist() if counts.any() else []


def chosen_counts(chosen: Counts, num_experts: int) -> Counts:
    """How often each expert was chosen. `# (token, choice) -> (expert,)`; rows of -1 are masked and not counted."""
    return np.bincount(chosen[chosen >= 0], minlength=num_experts)


def sequence_counts(chosen: Counts, sequences: int, num_experts: int) -> Counts:
    """The same for each sequence: row s * B + b is of sequence b of B. `# (token, choice) -> (sequence, expert)`"""
    sequence = np.arange(len(chosen))[:, None] % sequences
    flat = np.where(chosen >= 0, sequence * num_experts + chosen, -1)
    return np.bincount(flat[flat >= 0], minlength=sequences * num_experts).reshape(sequences, num_experts)


def once(vectors: Counts, expected: int | None, evaluations: bool) -> tuple[list[int], bool]:
    """Which calls of one layer on one rank are its step's own micro batches, and whether others were the same anew.

    `# (call, expert)` in the order of the calls. Recomputed forwards come again, whatever lies in between; then each
    vector is there an even number of times. With `evaluations`, those are ahead of the step's own. Without a way to
    tell, all calls are given; they are then not `expected` ones.
    """
    calls = len(vectors)
    if expected is None or calls <= expected:
        return list(range(calls)), False
    if calls == 2 * expected or (evaluations and calls > 2 * expected):
        kept: list[int] = []
        waiting: dict[bytes, int] = {}
        for call in range(calls - 2 * expected, calls):
            vector = vectors[call].tobytes()
            if waiting.get(vector):
                waiting[vector] -= 1
            else:
                waiting[vector] = waiting.get(vector, 0) + 1
                kept.append(call)
        if len(kept) == expected and not any(waiting.values()):
            return kept, True
    return list(range(calls - expected if evaluations else 0, calls)), False


def differing(one: Counts, other: Counts) -> NDArray[np.bool_]:
    """Which choices are of another set of experts; their order is none. `# (token, layer, choice) -> (token, layer)`"""
    found: NDArray[np.bool_] = (np.sort(one, axis=-1) != np.sort(other, axis=-1)).any(axis=-1)
    return found


def disagreement(one: Counts, other: Counts) -> tuple[float, float]:
    """How far two routers disagree on the same tokens. `# (token, layer, choice)` twice

    The share of choices, one for each token and layer, whose set of experts differs, and the share of tokens of which
    any does. They are different numbers (handbook 4): 10 % of choices may touch 94 % of tokens. NaN without tokens.
    """
    if not one.size:
        return float("nan"), float("nan")
    differ = differing(one, other)
    return float(differ.mean()), float(differ.any(axis=-1).mean())
