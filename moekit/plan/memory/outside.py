"""What is on a GPU beside what torch allocates: an allowance, assumed and named, and what CUDA graphs reserve."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.memory.flight import in_flight
from moekit.plan.memory.tokens import Tokens
from moekit.plan.run import Facts
from moekit.plan.shape import Shape

_GIB = 2.0**30
_FIRST = ("attn", "mamba")
"""Modules of CUDA graphs that are a layer's first part."""
CONTEXT_BYTES = 0.8 * _GIB
"""CUDA's context and the kernels loaded into it."""
COMMUNICATOR_BYTES = 0.25 * _GIB
"""NCCL's buffers, a group of ranks that a GPU talks in."""
FRAGMENTED_SHARE = 0.04
"""Of the peak: what the allocator holds and cannot use."""


def outside_terms(c: Candidates, shape: Shape, t: Tokens, peak: Floats) -> dict[str, Floats]:
    """The allowance. `# (candidate, stage)`

    What is allocated on the stream of an exchange that is overlapped is not used again on the other: rows as they
    arrive, of all layers (the handbook saw 5 to 10 GB more reserved and no more allocated, 3.7).
    """
    groups = [c.tensor > 1, c.pipeline > 1, c.context > 1, c.expert > 1, c.data > 1, c.expert_data > 1]
    communicators = sum((group.astype(float) for group in groups), np.zeros(c.number))
    terms = {
        "CUDA context": np.full(peak.shape, CONTEXT_BYTES),
        "NCCL": np.broadcast_to((communicators * COMMUNICATOR_BYTES)[:, None], peak.shape),
        "fragmentation": peak * FRAGMENTED_SHARE,
    }
    library = _dispatch_library(shape, c, t)
    if library.any():
        terms["dispatch library"] = np.broadcast_to(library[:, None], peak.shape)
    if shape.experts and c.overlap_expert.any():
        rows = t.rows * (shape.experts.latent or shape.hidden) * t.element * c.overlap_expert
        terms["second stream"] = rows[:, None] * c.parts["E"] * in_flight(c)
    return {name: np.where(c.exists, size, 0.0) for name, size in terms.items()}


def _dispatch_library(shape: Shape, c: Candidates, t: Tokens) -> Floats:
    """HybridEP and DeepEP receive into buffers of their own, for every rank's tokens at once at the worst."""
    own = np.isin(c.dispatcher, ("deepep", "hybridep", "ncclep")) & (c.parts["E"].sum(axis=1) > 0)
    return np.where(own, t.part * c.expert * c.expert_tensor * shape.hidden * t.element, 0.0)


def graph_bytes(c: Candidates, shape: Shape, facts: Facts, t: Tokens) -> Floats:
    """Inputs and outputs of what is captured of each layer, and their gradients, which a graph holds at fixed places;
    of a graph of the whole iteration nothing stays between its parts. `# (candidate, stage)`"""
    if facts.graphs not in ("local", "transformer_engine"):
        return np.zeros(c.layers.shape)
    attention = not facts.graph_modules or any(name in _FIRST for name in facts.graph_modules)
    second = not facts.graph_modules or any(name not in _FIRST for name in facts.graph_modules)
    each = 4 * (attention + second) * t.part * shape.hidden * t.element
    size: Floats = each[:, None] * c.layers * in_flight(c)
    return size
