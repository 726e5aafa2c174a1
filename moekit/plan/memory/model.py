"""What each GPU of a layout holds: the sum of `moekit.plan.memory`, in bytes by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.memory.activations import activations
from moekit.plan.memory.loss import logits_bytes
from moekit.plan.memory.outside import graph_bytes, outside_terms
from moekit.plan.memory.static import gathered_layers, is_fully_sharded, static_terms, step_terms
from moekit.plan.memory.tokens import tokens_of
from moekit.plan.run import Facts
from moekit.plan.shape import Shape


@dataclass(frozen=True)
class Memory:
    """Bytes by name. `# (candidate, stage)`, 0 where there is no stage."""

    static: dict[str, Floats]
    """There all the time."""
    step: dict[str, Floats]
    """From an optimizer's step to the next forward pass alone, when a run's log reads what is allocated."""
    activations: dict[str, Floats]
    """Kept for the backward pass when a stage holds most."""
    moment: dict[str, Floats]
    """Beside them for a moment, at the peak: the logits or a layer's own work, whichever is more."""
    outside: dict[str, Floats]
    """An allowance for what torch's allocator does not count as allocated; assumed, not modelled."""

    @property
    def terms(self) -> dict[str, Floats]:
        """All that is there at the peak, and the allowance."""
        return {**self.static, **self.activations, **self.moment, **self.outside}

    @cached_property
    def allocated(self) -> Floats:
        """Between steps."""
        return _sum({**self.static, **self.step})

    @cached_property
    def peak(self) -> Floats:
        """Allocated at the peak (`torch.cuda.max_memory_allocated`)."""
        return np.maximum(_sum({**self.static, **self.activations, **self.moment}), self.allocated)

    @cached_property
    def needed(self) -> Floats:
        """What the GPU must have."""
        return self.peak + _sum(self.outside)

    @property
    def fullest(self) -> Floats:
        """Of the fullest stage. `# (candidate,)`"""
        most: Floats = self.needed.max(axis=1)
        return most


def _sum(terms: dict[str, Floats]) -> Floats:
    total: Floats = np.sum(list(terms.values()), axis=0)
    return total


def memory(shape: Shape, facts: Facts, c: Candidates, busiest: float | Floats = 1.0) -> Memory:
    """Work out all layouts. `busiest`: rows of the busiest expert-parallel rank over the mean, 1 balanced; of all
    layouts or `# (candidate,)` (`moekit.plan.memory.imbalance`)."""
    tokens = tokens_of(shape, facts, c, busiest)
    static = static_terms(shape, facts, c)
    if facts.graphs != "none":
        static["CUDA graphs"] = graph_bytes(c, shape, facts, tokens)
    kept = activations(shape, facts, c, tokens)
    loss = logits_bytes(shape, facts, c, tokens)
    at_loss = loss >= kept.working
    moment = {"logits": np.where(at_loss, loss, 0.0), "working": np.where(at_loss, 0.0, kept.working)}
    held = dict(kept.kept)
    if is_fully_sharded(facts):
        held["gathered layers"] = gathered_layers(shape, facts, c)
    named = {name: size for name, size in moment.items() if size.any()}
    found = Memory(static, step_terms(shape, facts, c), held, named, {})
    return replace(found, outside=outside_terms(c, shape, tokens, found.peak))
