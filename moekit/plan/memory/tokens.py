"""How many tokens, rows and bytes of them one GPU works on in one micro batch. `# (candidate,)` all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.run import Facts
from moekit.plan.shape import Shape

_FP4 = 0.5 + 1 / 16
"""Bytes of an element in NVFP4, with the scale of each 16."""
_STASHED = 1.1
"""Pages of `--moe-paged-stash` over the rows that are there (core/transformer/transformer_config.py:1274)."""
_PADDED_TO = 16
"""Rows of each local expert with quantized matrices (core/transformer/moe/moe_utils.py, the alignment of FP8)."""


@dataclass(frozen=True)
class Tokens:
    """Sizes of one micro batch on one GPU."""

    sequences: Floats
    length: Floats
    """Of a sequence, on one context-parallel rank."""
    whole: Floats
    """Tokens within a tensor-parallel region."""
    part: Floats
    """Tokens outside of it: a share of them with sequence parallelism."""
    rows: Floats
    """Rows that the busiest rank's experts compute."""
    kept_rows: Floats
    """Rows of which the experts' activations are kept."""
    sent: Floats
    """Copies of tokens that a rank sends to experts."""
    element: int
    """Bytes of an activation's element."""
    linear: float
    """Bytes of an element that a linear layer keeps of its input."""


def tokens_of(shape: Shape, facts: Facts, c: Candidates, busiest: float | Floats) -> Tokens:
    """Sizes of all layouts; `busiest`: rows of the busiest expert-parallel rank over the mean."""
    sequences = c.micro_batch.astype(float)
    length = facts.seq_length / c.context
    whole = sequences * length
    part = np.where(c.sequence_parallel, whole / c.tensor, whole)
    sent = part * (shape.experts.topk if shape.experts else 0)
    rows = _rows(shape, facts, c, sent * c.expert_tensor, np.asarray(busiest, dtype=float))
    return Tokens(
        sequences=sequences,
        length=length,
        whole=whole,
        part=part,
        rows=rows,
        kept_rows=np.minimum(rows, _STASHED * sent * c.expert_tensor * busiest) if facts.paged_stash else rows,
        sent=sent,
        element=facts.weight_bytes,
        linear=_FP4 if facts.fp4 else 1 if facts.fp8 else facts.weight_bytes,
    )


def _rows(shape: Shape, facts: Facts, c: Candidates, mean: Floats, busiest: Floats) -> Floats:
    """With a capacity no rank gets more, and padded to it none gets less; a capacity of a rank reserves it all."""
    if shape.experts is None:
        return np.zeros(c.number)
    load = np.broadcast_to(busiest, c.tensor.shape).astype(float)
    load = np.where(c.expert > 1, load, 1.0)
    if facts.capacity is not None and facts.capacity > 0:
        load = np.full_like(load, facts.capacity) if facts.pad_to_capacity else np.minimum(load, facts.capacity)
    if facts.rank_capacity:
        load = np.full_like(load, facts.rank_capacity)
    padding = shape.experts.number / c.expert * _PADDED_TO if facts.quantization_padding or facts.fp8 else 0.0
    rows: Floats = mean * load + padding
    return rows
