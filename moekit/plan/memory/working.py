"""What a part of a layer needs for a moment beyond what it keeps: in its backward pass, where most is alive at once."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.memory.tokens import Tokens
from moekit.plan.run import Facts
from moekit.plan.shape import Dense, Experts, Grouped, Shape

_SCORES = 3
"""Of attention that is not fused: the scores' gradient before and after softmax, and its input's buffer."""


def working(shape: Shape, facts: Facts, c: Candidates, t: Tokens, letter: str) -> Floats:
    """Bytes. `# (candidate,)`"""
    residual = 2 * t.part * shape.hidden * t.element
    match letter:
        case "*" | "+":
            return residual + _attention(shape, facts, c, t)
        case "-":
            assert shape.dense
            return residual + _dense(shape.hidden, shape.dense, facts, c, t)
        case "E":
            assert shape.experts
            return residual + _experts(shape.hidden, shape.experts, facts, c, t)
        case "G":
            assert shape.delta
            width = (
                2 * shape.delta.key_heads * shape.delta.key_width + shape.delta.value_heads * shape.delta.value_width
            )
            return residual + 2 * t.whole * width / c.tensor * t.element
        case _:
            assert shape.mamba
            return residual + 4 * t.whole * shape.mamba.heads * shape.mamba.width / c.tensor * t.element


def _attention(shape: Shape, facts: Facts, c: Candidates, t: Tokens) -> Floats:
    """Gradients of queries, keys and values and of the projection's output, before and after they are joined."""
    of = shape.attention
    if isinstance(of, Grouped):
        inner, values = of.heads * of.width + 2 * of.groups * of.width, of.heads * of.width
    else:
        inner = of.heads * (2 * (of.width + of.position_width) + of.value_width)
        values = of.heads * of.value_width
    size: Floats = t.whole * ((values + 2 * inner) / c.tensor + shape.hidden) * t.element
    if not facts.fused_attention:
        scores = t.sequences * of.heads / c.tensor * t.length * t.length * c.context
        size = size + _SCORES * scores * t.element
    return size


def _dense(hidden: int, of: Dense, facts: Facts, c: Candidates, t: Tokens) -> Floats:
    """The inputs that are gathered again, and the gradient of one side of a matrix beside that of the other."""
    width, wide = of.width / c.tensor, (of.matrices - 1) * of.width / c.tensor
    size = t.whole * (hidden + wide + np.maximum(width, hidden)) * t.element
    own = 0 if facts.grad_fusion else wide * hidden * t.element
    return np.asarray(size + own, dtype=float)


def _experts(hidden: int, of: Experts, facts: Facts, c: Candidates, t: Tokens) -> Floats:
    """The rows' gradients on their way back, sorted, and through both matrices."""
    outer, width = of.latent or hidden, of.width / c.expert_tensor
    wide = (of.matrices - 1) * width
    exchanged = (t.sent + t.rows) * outer
    sorted_rows = 2 * t.rows * outer
    through = t.rows * (np.maximum(outer, wide) + np.maximum(width, outer))
    size = np.maximum(np.maximum(exchanged, sorted_rows), through) * t.element
    everyone = t.part * c.tensor * c.expert * hidden * t.element * (c.dispatcher == "allgather")
    own = np.zeros(c.number) if facts.grad_fusion else of.number / c.expert * wide * outer * t.element
    return np.asarray(size + everyone + own, dtype=float)
