"""Logits and the loss over them, on the stage that has the output layer. Line numbers are megatron-core 0.19.2's."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.memory.tokens import Tokens
from moekit.plan.run import Facts
from moekit.plan.shape import Shape


def logits_bytes(shape: Shape, facts: Facts, c: Candidates, t: Tokens) -> Floats:
    """What logits need at their worst, at the end of a forward pass. `# (candidate, stage)`

    Megatron's own cross-entropy keeps softmax in fp32, made in place of a copy of the logits
    (core/tensor_parallel/cross_entropy.py:20), while the logits themselves are still there; in the backward pass it
    turns into their gradient, of which a copy in the weights' format is taken. Fused (`native`), it does the same in
    fewer kernels. Transformer Engine's writes the gradient over the logits. Each prediction depth has logits of its
    own before the model's, and keeps their softmax until its backward pass.
    """
    elements = t.whole * shape.rows / c.tensor
    softmax = 0 if facts.cross_entropy == "te" else 4
    kept = elements * (softmax or t.element)
    moment = elements * (softmax + t.element)
    weight = shape.rows * shape.hidden / c.tensor * t.element  # its gradient, before it is summed
    backward = elements * t.element + t.whole * shape.hidden * t.element + weight
    own = np.maximum(moment, backward)[:, None]
    of_depths = (shape.depths * kept)[:, None] * c.depths
    size: Floats = np.where(c.output, own + of_depths, 0.0)
    return size
