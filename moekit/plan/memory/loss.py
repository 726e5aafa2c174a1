"""Logits and the loss over them, on the stage that has the output layer. Line numbers are megatron-core 0.19.2's."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.memory.tokens import Tokens
from moekit.plan.run import Facts
from moekit.plan.shape import Shape

_SOFTMAX = 4
"""Bytes of an element of the softmax that is kept for the backward pass."""


def _beside(fusion: str, element: int) -> int:
    """Bytes of an element beside what is kept."""
    if fusion == "te":
        return 0
    if fusion == "native":
        return 4 + element
    return element if element < 4 else 0  # fp32 logits are no copy


def logits_bytes(shape: Shape, facts: Facts, c: Candidates, t: Tokens) -> Floats:
    """What logits need at their worst, at the end of a forward pass. `# (candidate, stage)`

    Megatron's own cross-entropy keeps softmax in fp32, made in place of a copy of the logits
    (core/tensor_parallel/cross_entropy.py:20), while the logits themselves are still there; in the backward pass it
    turns into their gradient, of which a copy in the weights' format is taken. Fused (`native`), the compiled backward
    pass makes the gradient in fp32 beside softmax, and the copy. Transformer Engine's writes the gradient over the
    logits. Each prediction depth has logits of its own before the model's, and keeps their softmax until its backward
    pass.
    """
    elements = t.whole * shape.rows / c.tensor
    kept = elements * (t.element if facts.cross_entropy == "te" else _SOFTMAX)
    moment = kept + elements * _beside(facts.cross_entropy, t.element)
    own_gradient = 0.0 if facts.grad_fusion else shape.rows * shape.hidden / c.tensor * t.element
    backward = elements * t.element + t.whole * shape.hidden * t.element + own_gradient
    own = np.maximum(moment, backward)[:, None]
    size: Floats = np.where(c.output, own + (shape.depths * kept)[:, None], 0.0)
    return size
