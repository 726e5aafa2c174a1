"""Floating-point operations of a token and of a step, as Megatron counts them, and as others do.

Megatron's count (`num_floating_point_operations`, training/training.py:390 at 0.19.2) is what its log's TFLOP/s are
made of: forward and backward, two operations to a multiplication and addition, causal attention at half. It leaves out
the router, norms, recomputation, padding and imbalance, knows no gate but SwiGLU's, and no attention window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moekit.plan.parameters import parameters
from moekit.plan.shape import Delta, Experts, Grouped, Latent, Mamba, Shape

_PASSES = 3
"""A multiplication is done once forward and twice backward, for weights and for inputs."""


@dataclass(frozen=True, slots=True)
class Convention:
    """One way to count a token's operations."""

    name: str
    per_token: float
    who: str
    """What it counts and who prints it."""


def terms(shape: Shape, seq_length: int) -> dict[str, float]:
    """A token's operations in a sequence of `seq_length` as Megatron counts them, by what they are for."""
    found = _hybrid(shape, seq_length) if shape.stack == "hybrid" else _transformer(shape, seq_length)
    return {name: 2 * _PASSES * multiplications for name, multiplications in found.items() if multiplications}


def per_token(shape: Shape, seq_length: int) -> float:
    """The sum of `terms`."""
    return sum(terms(shape, seq_length).values())


def _transformer(shape: Shape, seq_length: int) -> dict[str, float]:
    """Multiplications of a token, forward. A prediction depth counts as one more layer like the last."""
    depths, last = shape.depths, shape.layers[-1]
    moe = shape.part_count("E") + depths * last.count("E")
    dense = len(shape.layers) + depths - moe
    linear = shape.part_count("G") + shape.depths_counted_linear
    full = len(shape.layers) + depths - linear
    of = shape.attention
    projections, core = _grouped(shape.hidden, of) if isinstance(of, Grouped) else _latent(shape.hidden, of)
    return {
        "attention projections": full * projections,
        "attention core": full * core * seq_length / 2,
        "delta net": linear * _delta(shape.hidden, shape.delta) if shape.delta else 0,
        "dense": dense * _matrices(shape) * shape.hidden * (shape.dense.width if shape.dense else 0),
        **(_experts(shape, shape.experts, moe) if shape.experts else {}),
        "prediction": depths * (3 * shape.hidden + 2 * shape.hidden**2),
        "logits": (depths + 1) * shape.hidden * shape.rows,
    }


def _hybrid(shape: Shape, seq_length: int) -> dict[str, float]:
    """The same of a hybrid stack, where Megatron leaves out latent attention and a prediction depth's projection."""
    count = {letter: shape.part_count(letter) + shape.depths * shape.depth.count(letter) for letter in "*GM-E"}
    projections, core = (
        _grouped(shape.hidden, replace(shape.attention, gate=False)) if isinstance(shape.attention, Grouped) else (0, 0)
    )
    return {
        "attention projections": count["*"] * projections,
        "attention core": count["*"] * core * seq_length / 2,
        "delta net": count["G"] * _delta(shape.hidden, shape.delta) if shape.delta else 0,
        "mamba": count["M"] * _mamba(shape.hidden, shape.mamba) if shape.mamba else 0,
        "dense": count["-"] * _matrices(shape) * shape.hidden * (shape.dense.width if shape.dense else 0),
        **(_experts(shape, shape.experts, count["E"]) if shape.experts else {}),
        "logits": (shape.depths + 1) * shape.hidden * shape.rows,
    }


def _matrices(shape: Shape) -> int:
    return 3 if shape.swiglu else 2


def _grouped(hidden: int, of: Grouped) -> tuple[int, int]:
    """Multiplications of the projections, and with each key that is attended to."""
    queries = of.heads * of.width
    inner = queries * (2 if of.gate else 1) + 2 * of.groups * of.width
    return hidden * (inner + queries), 2 * queries


def _latent(hidden: int, of: Latent) -> tuple[int, int]:
    query = of.heads * (of.width + of.position_width)
    queries = of.query_rank * (hidden + query + 1) if of.query_rank else hidden * query
    keys = of.rank * (hidden + of.heads * (of.width + of.value_width) + 1) + hidden * of.position_width
    return queries + keys + of.heads * of.value_width * hidden, query + of.heads * of.value_width


def _delta(hidden: int, of: Delta) -> int:
    keys, values = of.key_heads * of.key_width, of.value_heads * of.value_width
    rule = 4 * of.value_heads * of.value_width**2
    return hidden * (2 * keys + 3 * values + 2 * of.value_heads) + of.kernel * (2 * keys + values) + rule


def _mamba(hidden: int, of: Mamba) -> float:
    """With an inner width of twice the model's, whatever the heads make of it."""
    inner = 2 * hidden
    return hidden * (3 * inner + 2 * of.groups * of.state + of.heads) + 7 / 2 * inner * of.state


def _experts(shape: Shape, of: Experts, layers: int) -> dict[str, float]:
    outer, matrices = of.latent or shape.hidden, _matrices(shape)
    return {
        "routed experts": layers * matrices * outer * of.width * of.topk,
        "latent projections": layers * 2 * shape.hidden * of.latent if of.latent else 0,
        "shared expert": layers * matrices * shape.hidden * of.shared_width,
    }


def conventions(shape: Shape, seq_length: int) -> tuple[Convention, ...]:
    """The ways to count that published figures use, Megatron's first; those that change nothing here are left out."""
    megatron = per_token(shape, seq_length)
    found = [Convention("megatron", megatron, "Megatron's log, and so TFLOP/s and MFU made of it")]
    gated = replace(shape, swiglu=_is_gated(shape))
    if gated.swiglu != shape.swiglu:
        who = "three matrices for every gate, not SwiGLU's alone"
        found.append(Convention("every_gate", per_token(gated, seq_length), who))
    if any(shape.windowed):
        who = "the same, windows counted (Megatron-Bridge from 26.06)"
        found.append(Convention("every_gate_windowed", _windowed(gated, seq_length), who))
    core = terms(shape, seq_length).get("attention core", 0.0)
    if core:
        who = "attention to all tokens, not causal (Megatron-LM's examples/llama)"
        found.append(Convention("full_attention", megatron + core, who))
    if shape.depths:
        who = "without prediction depths (figures `w/o MTP`)"
        found.append(Convention("without_prediction", per_token(replace(shape, depths=0), seq_length), who))
    active = 6 * parameters(shape).active
    found.append(
        Convention("six_per_active_parameter", active, "6 x active parameters, all of them; no attention core")
    )
    return tuple(found)


def _is_gated(shape: Shape) -> bool:
    return 3 in [part.matrices for part in (shape.dense, shape.experts) if part]


def _windowed(shape: Shape, seq_length: int) -> float:
    """With the keys that a windowed layer's token attends to on average: the window's, fewer at the beginning."""
    assert shape.window is not None
    whole = terms(shape, seq_length)
    window = min(shape.window, seq_length)
    keys = window - window**2 / (2 * seq_length)
    share = sum(shape.windowed) / len(shape.layers)
    core = whole["attention core"]
    return sum(whole.values()) - core * share * (1 - keys / (seq_length / 2))
