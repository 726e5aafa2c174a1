"""What stays on a GPU between steps: weights, gradients, the optimizer's state, and the libraries' own buffers.

Line numbers are megatron-core 0.19.2's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.parameters import (
    Split,
    Weight,
    depth_weights,
    embedding_weights,
    output_weight,
    part_weights,
)
from moekit.plan.run import Facts
from moekit.plan.shape import Grouped, Latent, Shape

MATRICES = ("attention", "dense", "experts", "shared_expert", "delta_net", "mamba", "prediction", "latent")
"""Modules whose weights are of linear layers of Transformer Engine (of a few vectors in them nothing is said)."""
_EXPERTS: tuple[Split, ...] = ("expert", "expert_whole")
_MIB = 2**20
_WORKSPACES, _GROUPED_WORKSPACES, _WORKSPACE_BYTES = 3, 4, 32 * _MIB
"""cuBLAS's work areas of 32 MiB on Hopper and Blackwell: torch's, Transformer Engine's and one more stream's; grouped
matrix multiplications run on four streams of their own (transformer_engine/pytorch/module/base.py)."""


@dataclass(frozen=True)
class Elements:
    """Weights that one GPU of a stage holds. `# (candidate, stage)`"""

    dense: Floats
    """Divided by data- and context-parallel ranks, where something is."""
    experts: Floats
    """Divided by expert-data-parallel ranks."""
    matrices: Floats
    """Of both, those of linear layers."""

    @property
    def all(self) -> Floats:
        """Both."""
        return self.dense + self.experts


def elements(shape: Shape, c: Candidates) -> Elements:
    """Count, as `moekit.plan.parameters.held` does of one layout."""
    dense = np.zeros(c.layers.shape)
    experts, matrices = dense.copy(), dense.copy()

    def add(weights: Iterable[Weight], times: Floats) -> None:
        for (split, matrix), count in _by_split(weights).items():
            part: Floats = count / divisor(c, split)[:, None] * times
            for total in (experts if split in _EXPERTS else dense, *([matrices] if matrix else [])):
                total += part

    for letter, count in c.parts.items():
        if count.any():
            add(part_weights(shape, letter), count.astype(float))
    add(embedding_weights(shape), (c.embedding | c.depths).astype(float))
    add([Weight("norms", shape.hidden * shape.norm_weights, "whole")], c.output.astype(float))
    add([output_weight(shape)], (c.output & ~(c.embedding if shape.tied else np.False_)).astype(float))
    if shape.depths:
        add(depth_weights(shape), c.depths.astype(float) * shape.depth_copies)
    return Elements(dense, experts, matrices)


def divisor(c: Candidates, split: Split) -> Floats:
    """How many ranks share a weight. `# (candidate,)`"""
    ones = np.ones(c.number)
    return {
        "whole": ones,
        "tensor": c.tensor * ones,
        "expert": c.expert * c.expert_tensor * ones,
        "expert_whole": c.expert * ones,
    }[split]


def _by_split(weights: Iterable[Weight]) -> Counter[tuple[Split, bool]]:
    counts = Counter[tuple[Split, bool]]()
    for weight in weights:
        counts[weight.split, weight.module in MATRICES] += weight.count
    return counts


def static_terms(shape: Shape, facts: Facts, c: Candidates) -> dict[str, Floats]:
    """Bytes by name. `# (candidate, stage)`"""
    held = elements(shape, c)
    whole, divided = held.all, _divided(shape, held, facts, c)
    strategy = facts.fsdp_strategy if facts.sharding == "fsdp" else ""
    weights = divided if is_fully_sharded(facts) else whole
    gradients = divided if strategy in ("optim_grads", "optim_grads_params") else whole
    states = _states(held, divided, facts)
    kept = 1 - facts.optimizer_offload
    exists = c.exists
    terms = {
        "weights": weights / np.maximum(whole, 1) * _weight_bytes(held, facts),
        "FP4 copies" if facts.fp4 else "FP8 copies": held.matrices * _copy_bytes(facts),
        "gradients": gradients * facts.grad_bytes,
        **{name: kept * size for name, size in states.items()},
        "whole weights": _ends(shape, facts, c) * is_fully_sharded(facts),
        "placeholder gradients": _placeholders(shape, facts, c),
        "workspaces": np.full(whole.shape, _workspaces(shape, facts)),
        "buffers": _buffers(shape, facts, c),
    }
    return {name: np.where(exists, size, 0.0) for name, size in terms.items() if np.any(size)}


def step_terms(shape: Shape, facts: Facts, c: Candidates) -> dict[str, Floats]:
    """What is there from an optimizer's step to the next forward pass: its fp32 copy of gradients that are summed in
    less (core/optimizer/distrib_optimizer.py `_copy_model_grads_to_main_grads`). `# (candidate, stage)`"""
    if facts.grad_bytes == 4 or facts.precision_aware:  # a precision-aware optimizer reads them as they are
        return {}
    size = _divided(shape, elements(shape, c), facts, c) * 4 * (1 - facts.optimizer_offload)
    return {"fp32 gradients": np.where(c.exists, size, 0.0)}


def _divided(shape: Shape, held: Elements, facts: Facts, c: Candidates) -> Floats:
    """Elements whose state a GPU has."""
    words = (shape.rows * shape.hidden / c.tensor)[:, None]
    if facts.sharding == "none" or (facts.sharding == "fsdp" and facts.fsdp_strategy == "no_shard"):
        return held.all
    dense_ranks, expert_ranks = _shards(facts, c)
    dense = held.dense / dense_ranks
    if facts.whole_tensors:  # some rank has the embedding, or the output layer
        dense = np.maximum(dense, words * (c.embedding | c.depths | c.output))
    return dense + held.experts / expert_ranks


def _shards(facts: Facts, c: Candidates) -> tuple[Floats, Floats]:
    """Ranks that divide the state of dense weights and of experts (core/parallel_state.py). `# (candidate, 1)`"""
    dense = np.maximum(c.data * c.context // facts.optimizer_instances, 1)
    experts = np.maximum(c.expert_data // facts.optimizer_instances, 1)
    return dense[:, None].astype(float), experts[:, None].astype(float)


def _weight_bytes(held: Elements, facts: Facts) -> Floats:
    """FP8 weights have a byte by rows and one by columns, for the multiplications of both directions."""
    return held.all * facts.weight_bytes + held.matrices * ((2.0 - facts.weight_bytes) * facts.fp8_weights)


def _copy_bytes(facts: Facts) -> float:
    """A byte by rows and one by columns where weights are not stored so, kept for all micro batches; half in FP4."""
    if facts.fp4:
        return 1.0
    return 2.0 if facts.fp8 and not facts.fp8_weights else 0.0


def _states(held: Elements, divided: Floats, facts: Facts) -> dict[str, Floats]:
    """Of Adam two moments; of Muon one momentum for matrices (embedding and output layer stay with Adam)."""
    own = facts.weight_bytes < 4 or facts.precision_aware or facts.fp8_weights
    main = facts.main_weight_bytes if own else 0
    matrices = held.matrices / np.maximum(held.all, 1) if "muon" in facts.optimizer else 0.0
    second = facts.second_moment_bytes * (1 - matrices)
    if facts.optimizer in ("sgd", "lion"):
        second = np.zeros_like(divided)
    return {
        "main weights": divided * main,
        "first moments": divided * facts.first_moment_bytes,
        "second moments": divided * second,
    }


def _ends(shape: Shape, facts: Facts, c: Candidates) -> Floats:
    """Fully sharded, what is in no layer stays whole: embedding and output layer."""
    words = shape.rows * shape.hidden / c.tensor * facts.weight_bytes
    ends = (c.embedding | c.depths).astype(float) + (c.output & ~(c.embedding if shape.tied else np.False_))
    whole: Floats = words[:, None] * ends
    return whole


def gathered_layers(shape: Shape, facts: Facts, c: Candidates) -> Floats:
    """Fully sharded, while it is computed: the largest layer whole, with its gradients, and the one that is fetched
    meanwhile. `# (candidate, stage)`"""
    largest = np.zeros(c.number)
    for layer in {*shape.layers, *([shape.depth] if shape.depths else [])}:
        weights = [weight for letter in layer for weight in part_weights(shape, letter)]
        size = sum((weight.count / divisor(c, weight.split) for weight in weights), np.zeros(c.number))
        largest = np.maximum(largest, size)
    bytes_each = 2 * facts.weight_bytes + facts.grad_bytes
    return np.where(c.exists, (largest * bytes_each)[:, None], 0.0)


def is_fully_sharded(facts: Facts) -> bool:
    """Whether data-parallel ranks divide the weights themselves."""
    return facts.sharding == "fsdp" and facts.fsdp_strategy == "optim_grads_params"


def _placeholders(shape: Shape, facts: Facts, c: Candidates) -> Floats:
    """With gradients summed by the multiplication, Transformer Engine hands autograd a tensor of each weight's shape
    that it keeps for good, one to a shape (`get_dummy_wgrad`, transformer_engine/pytorch/module/base.py); Megatron's
    output layer asks it for one too (core/tensor_parallel/layers.py:692)."""
    total = np.zeros(c.layers.shape)
    if not (facts.grad_fusion and facts.transformer_engine):
        return total
    for letter, count in c.parts.items():
        present = (count > 0) | (c.depths & (letter in shape.depth))
        for size in _shapes(shape, letter, c):
            total = total + present * (size * facts.weight_bytes)[:, None]
    words = shape.rows * shape.hidden / c.tensor * facts.weight_bytes
    prediction = 2.0 * shape.hidden**2 / c.tensor * facts.weight_bytes
    return total + c.output * words[:, None] + c.depths * prediction[:, None]


def _shapes(shape: Shape, letter: str, c: Candidates) -> list[Floats]:
    """Elements of each weight of a part, of different shapes. `# (candidate,)`"""
    tensor, hidden = c.tensor.astype(float), shape.hidden
    if letter in "*+":
        return _attention_shapes(shape.hidden, shape.attention, tensor)
    if letter == "-" and shape.dense:
        up = (shape.dense.matrices - 1) * shape.dense.width * hidden / tensor
        return [up, hidden * shape.dense.width / tensor]
    if letter == "M" and shape.mamba:
        inner = shape.mamba.heads * shape.mamba.width
        projected = 2 * inner + 2 * shape.mamba.groups * shape.mamba.state + shape.mamba.heads
        return [hidden * projected / tensor, hidden * inner / tensor]
    if letter == "E" and shape.experts:
        of, outer = shape.experts, shape.experts.latent or hidden
        each = outer * of.width / c.expert_tensor.astype(float)
        shared = hidden * of.shared_width / tensor
        return [(of.matrices - 1) * each, each, (of.matrices - 1) * shared, shared]
    return []


def _attention_shapes(hidden: int, of: Grouped | Latent, tensor: Floats) -> list[Floats]:
    if isinstance(of, Grouped):
        queries = of.heads * of.width
        inner = queries * (2 if of.gate else 1) + 2 * of.groups * of.width
        return [hidden * inner / tensor, hidden * queries / tensor]
    query = of.heads * (of.width + of.position_width) / tensor
    down = np.full(tensor.shape, float(hidden))
    return [
        down * (of.rank + of.position_width),
        down * (of.query_rank or 0),
        (of.query_rank or hidden) * query,
        of.rank * of.heads * (of.width + of.value_width) / tensor,
        of.heads * of.value_width * hidden / tensor,
    ]


def _workspaces(shape: Shape, facts: Facts) -> float:
    grouped = _GROUPED_WORKSPACES if shape.is_moe and facts.grouped_gemm else 0
    return float((_WORKSPACES + grouped) * _WORKSPACE_BYTES)


def _buffers(shape: Shape, facts: Facts, c: Candidates) -> Floats:
    """Megatron's own, which grows to the largest asked of it: the output layer's gathered input, and scores that are
    not fused (core/tensor_parallel/layers.py:468, core/transformer/dot_product_attention.py:190); the data's mask."""
    tokens = c.micro_batch * facts.seq_length / c.context
    gathered = np.where(c.sequence_parallel, tokens * shape.hidden * facts.weight_bytes, 0.0)
    scores = tokens * facts.seq_length * shape.attention.heads / c.tensor * facts.weight_bytes
    own = np.zeros(c.number) if facts.transformer_engine else scores
    mask = tokens * facts.seq_length * float(facts.attention_mask)
    size: Floats = np.maximum(c.output * gathered[:, None], own[:, None]) + mask[:, None]
    return size
