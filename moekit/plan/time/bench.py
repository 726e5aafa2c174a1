"""What the formulas of all parts share: one model on one kind of GPU, and the work that is counted."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.run import Facts
from moekit.plan.shape import Shape
from moekit.plan.time import gemm as on_gpu
from moekit.plan.time.communication import ring, sharded_tokens, tokens
from moekit.plan.time.hardware import Hardware

Work = dict[str, Floats]
"""Seconds by term, `# (2, candidate)`: forward and backward; of `launches` their number."""

DENSE, GROUPED, ATTENTION, MEMORY = "dense gemm", "grouped gemm", "attention", "memory"
INSIDE, ACROSS = "exchange inside nodes", "exchange across nodes"
TENSOR, CONTEXT, LAUNCHES = "tensor parallel", "context parallel", "launches"


class Bench:
    """One model on one kind of GPU, for all candidates: what the formulas of its parts share."""

    def __init__(self, shape: Shape, facts: Facts, candidates: Candidates, hardware: Hardware, busiest: Floats) -> None:
        """`busiest`: rows of the busiest expert rank over the mean, `# (candidate,)`."""
        self.shape, self.facts, self.candidates, self.hardware = shape, facts, candidates, hardware
        self.tokens = tokens(facts, candidates)
        self.sharded = sharded_tokens(facts, candidates)
        self.tensor = candidates.tensor.astype(np.float64)
        self.kind = on_gpu.kind_of(facts)
        capacity = facts.capacity
        if capacity is None:
            self.busiest = busiest
        else:
            self.busiest = (
                np.full(candidates.number, capacity) if facts.pad_to_capacity else np.minimum(busiest, capacity)
            )

    def linear(self, rows: Floats, out: Floats | float, into: Floats | float) -> Work:
        """A layer's multiplications, and what quantizing its operands costs the memory."""
        wide, deep = np.broadcast_to(np.float64(out), rows.shape), np.broadcast_to(np.float64(into), rows.shape)
        return {
            DENSE: on_gpu.linear(self.hardware, self.kind, rows, wide, deep, 1, self.facts.grad_bytes),
            MEMORY: self.quantized(rows * deep, rows * wide),
        }

    def moved(self, forward: Floats, backward: Floats | None = None) -> Work:
        """A pass over the memory of so many bytes; as many backward where nothing else is said."""
        both = np.stack([forward, forward if backward is None else backward])
        return {MEMORY: both / on_gpu.memory(self.hardware)}

    def quantized(self, inputs: Floats, outputs: Floats) -> Floats:
        """Seconds to write inputs and gradients in FP8 or FP4, plain and transposed; a tensor's own scale needs a look
        at all of it first."""
        if self.kind == "bf16":
            return np.zeros((2, len(inputs)))
        looks = 2 if self.kind == "fp4" or self.facts.fp8_recipe == "tensorwise" else 0
        each = 2 + looks + 2 * (1 if self.kind == "fp8" else 0.5)
        return np.stack([inputs * each, outputs * each]) / on_gpu.memory(self.hardware)

    def gathers(self, width: Floats | float, forward: int = 1, backward: int = 1) -> Work:
        """So many gathers and scatters of `width` features over tensor-parallel ranks."""
        size = self.tokens * width * 2
        once = ring(self.hardware, size, self.candidates.tensor, np.ones_like(self.candidates.tensor))
        shown = 1 - self.hardware.constants.overlap if self.facts.tensor_overlap else 1.0
        return {TENSOR: np.stack([once * forward, once * backward]) * shown}


def total(*works: Work) -> Work:
    """Their sum."""
    found: Work = {}
    for work in works:
        for term, seconds in work.items():
            found[term] = found[term] + seconds if term in found else seconds
    return found


def norm(bench: Bench) -> Work:
    """A norm over the model's width: read and written; backward two read and one written."""
    size = bench.sharded * bench.shape.hidden * 2
    return bench.moved(2 * size, 3 * size)


def residual(bench: Bench) -> Work:
    """Two streams are read and one is written, both ways."""
    return bench.moved(3 * bench.sharded * bench.shape.hidden * 2)


def feed_forward(bench: Bench, width: float, matrices: int) -> Work:
    """A dense network, or a shared expert, without its norm."""
    hidden, own = bench.shape.hidden, width / bench.tensor
    return total(
        bench.linear(bench.tokens, (matrices - 1) * own, hidden),
        activation(bench, bench.tokens * own, matrices),
        bench.linear(bench.tokens, hidden, own),
        bench.gathers(hidden, 2, 2),
    )


def activation(bench: Bench, elements: Floats, matrices: int) -> Work:
    """The gate of so many elements of its result: its inputs read, it written; unfused, over and over. Clamped inputs
    are cut, clamped and put together again first (core/fusions/fused_bias_geglu.py:410)."""
    facts = bench.facts
    factor = 1 if facts.activation_fusion or facts.op_fuser else 2.5
    clamp = 2 * (matrices - 1) if facts.clamped and not facts.op_fuser else 0
    inputs, all_of_it = matrices + 2 * clamp, 2 * matrices - 1 + 3 * clamp
    return bench.moved(inputs * elements * 2 * factor, all_of_it * elements * 2 * factor)
