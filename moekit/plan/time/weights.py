"""What each stage's data-parallel groups sum and gather every step, and what the optimizer reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.parameters import Weight, depth_weights, part_weights
from moekit.plan.run import Facts
from moekit.plan.shape import Shape
from moekit.plan.time.communication import ring
from moekit.plan.time.gemm import memory
from moekit.plan.time.hardware import Hardware


@dataclass(frozen=True)
class Held:
    """Elements of one GPU's weights by the group that has copies of them: `# (candidate, stage)`."""

    dense: Floats
    experts: Floats


def held(shape: Shape, candidates: Candidates) -> Held:
    """Weights of every stage; a final norm's few are left out."""
    tensor = candidates.tensor[:, None]
    dense, experts = np.zeros(candidates.layers.shape), np.zeros(candidates.layers.shape)

    def add(weights: list[Weight] | tuple[Weight, ...], times: Floats) -> None:
        nonlocal dense, experts
        for weight in weights:
            if weight.split in ("whole", "tensor"):
                dense = dense + times * weight.count / (1 if weight.split == "whole" else tensor)
            else:
                cut = candidates.expert_tensor if weight.split == "expert" else 1
                experts = experts + times * weight.count / (candidates.expert * cut)[:, None]

    for letter, number in candidates.parts.items():
        if number.any():
            add(part_weights(shape, letter), number.astype(np.float64))
    if shape.depths:
        add(depth_weights(shape), (candidates.depths * shape.depth_copies).astype(np.float64))
    rows = [Weight("embedding", shape.rows * shape.hidden, "tensor")]
    add(rows, (candidates.embedding | candidates.depths).astype(np.float64))
    add(rows, (candidates.output & ~(candidates.embedding & shape.tied)).astype(np.float64))
    return Held(dense, experts)


def _both(held: Held, each: float, candidates: Candidates, hardware: Hardware) -> Floats:
    """Seconds to gather, or to reduce and scatter, `each` bytes of every element over its copies."""
    copies, stride = candidates.data * candidates.context, candidates.tensor
    of_experts, between = candidates.expert_data, candidates.expert * candidates.expert_tensor
    dense = ring(hardware, held.dense * each, copies[:, None], stride[:, None])
    experts = ring(hardware, held.experts * each, of_experts[:, None], between[:, None])
    seconds: Floats = np.where(held.dense > 0, dense, 0) + np.where(held.experts > 0, experts, 0)
    return seconds


def reduced(held: Held, facts: Facts, candidates: Candidates, hardware: Hardware) -> Floats:
    """Seconds that gradients take to their owners, or to everybody without divided state: `# (candidate, stage)`."""
    seconds = _both(held, facts.grad_bytes, candidates, hardware)
    return seconds if facts.sharding != "none" else 2 * seconds


def gathered(held: Held, facts: Facts, candidates: Candidates, hardware: Hardware) -> Floats:
    """Seconds that new weights take from their owners to everybody: `# (candidate, stage)`."""
    if facts.sharding == "none":
        return np.zeros(held.dense.shape)
    return _both(held, 1 if facts.fp8_weights else facts.weight_bytes, candidates, hardware)


def optimized(held: Held, facts: Facts, candidates: Candidates, hardware: Hardware) -> Floats:
    """Seconds of the optimizer's own work: gradients zeroed and measured, state read and written.

    What lives on the host crosses its link with gradients and weights, and is computed there, half as fast as the link.
    """
    owners = np.ones((2, candidates.number))
    if facts.sharding != "none":
        owners = np.stack([candidates.data * candidates.context, candidates.expert_data]).astype(np.float64)
    owned = held.dense / owners[0][:, None] + held.experts / owners[1][:, None]
    state = 2 * (facts.main_weight_bytes + facts.first_moment_bytes + facts.second_moment_bytes)
    each = state + 2 * facts.grad_bytes + facts.weight_bytes
    away = facts.optimizer_offload
    here = (held.dense + held.experts) * facts.grad_bytes + owned * (1 - away) * each
    crossed = owned * away * (facts.grad_bytes + facts.weight_bytes + 2 * state)
    seconds: Floats = here / memory(hardware) + crossed / hardware.gpu.host_link
    return seconds
