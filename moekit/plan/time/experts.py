"""A layer of experts: router, permutation, exchange, the experts themselves."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Floats
from moekit.plan.shape import Experts
from moekit.plan.time import gemm as on_gpu
from moekit.plan.time.bench import ACROSS, DENSE, GROUPED, INSIDE, MEMORY, Bench, Work, activation, feed_forward, total
from moekit.plan.time.communication import FLEX, exchange


def rows(bench: Bench, experts: Experts) -> Floats:
    """Rows that the busiest rank's experts get together."""
    return bench.sharded * experts.topk * bench.candidates.expert_tensor * bench.busiest


def routed(bench: Bench, experts: Experts) -> Work:
    """The experts' own multiplications."""
    here = experts.number / bench.candidates.expert
    each = rows(bench, experts) / here
    outer = np.full(bench.candidates.number, float(experts.latent or bench.shape.hidden))
    inner = experts.width / bench.candidates.expert_tensor
    up = on_gpu.linear(
        bench.hardware, bench.kind, each, (experts.matrices - 1) * inner, outer, here, bench.facts.grad_bytes
    )
    down = on_gpu.linear(bench.hardware, bench.kind, each, outer, inner, here, bench.facts.grad_bytes)
    quantized = bench.quantized(rows(bench, experts) * outer, rows(bench, experts) * (experts.matrices - 1) * inner)
    if not bench.facts.op_fuser:  # which quantizes the gate's result where it is made
        quantized = quantized + bench.quantized(rows(bench, experts) * inner, rows(bench, experts) * outer)
    return {GROUPED: up + down, MEMORY: quantized}


_BIAS_FORWARD, _BIAS_BACKWARD = 28, 36
"""Bytes that an element of the experts' output moves to get its bias: `t + b * p` expert by expert in fp32, put
together and cast (core/transformer/moe/experts.py:313, `_apply_bias`)."""


def _biased(bench: Bench, experts: Experts) -> Work:
    if not experts.bias or bench.facts.op_fuser:
        return {}
    elements = rows(bench, experts) * (experts.latent or bench.shape.hidden)
    return bench.moved(elements * _BIAS_FORWARD, elements * _BIAS_BACKWARD)


def expert_activation(bench: Bench, experts: Experts) -> Work:
    """What `moe_act` computes again."""
    return activation(bench, rows(bench, experts) * experts.width / bench.candidates.expert_tensor, experts.matrices)


_UNFUSED_PERMUTE, _COPIES = 1.6, 0.76
"""Kernels that sort tokens took 11.45 % of a step, 7.14 % fused: the share of the memory's bandwidth that the fused
ones reach, if the step is that of 149.4 TFLOP/s (handbook 3.7, 3.3)."""


def _permuted(bench: Bench, experts: Experts) -> Work:
    """Tokens are copied once for each of their experts and sorted, sorted again by local expert, and all of it back."""
    outer = float(experts.latent or bench.shape.hidden)
    token = bench.sharded * outer * 2
    flex = np.isin(bench.candidates.dispatcher, FLEX)
    several = (experts.number // bench.candidates.expert) > 1
    copies = experts.topk * bench.busiest
    sorted_once = 2 * (1 + copies)
    again = np.where(flex, 0, np.where(several, 4 * copies, 0))
    factor = 1.0 if bench.facts.permute_fusion else _UNFUSED_PERMUTE
    both = np.broadcast_to(token * (sorted_once + again) * factor, (2, bench.candidates.number))
    return {MEMORY: both / (bench.hardware.gpu.memory * _COPIES)}


def _router(bench: Bench, experts: Experts) -> Work:
    """Scores, the choice among them, and the losses over them: small, and unfused in many passes."""
    scores = bench.sharded * experts.number * bench.facts.router_bytes
    wide = np.full(bench.candidates.number, float(experts.number))
    deep = np.full(bench.candidates.number, float(bench.shape.hidden))
    busy = on_gpu.linear(bench.hardware, "bf16", bench.sharded, wide, deep)
    return total({DENSE: busy}, bench.moved(12 * scores))


def _summed_gradients(bench: Bench, experts: Experts) -> Work:
    """A layer's input goes to the router, the experts and a shared one: their gradients meet, as their outputs do."""
    stream = 3 * bench.sharded * bench.shape.hidden * 2
    shared = bool(experts.shared_width)
    return bench.moved(stream * shared, stream * (1 + shared))


def experts_of_layer(bench: Bench) -> Work:
    """All of it; dispatch and combine cross the same links, forward and backward."""
    of, hidden = bench.shape.experts, bench.shape.hidden
    assert of is not None
    inside, across = exchange(bench.shape, bench.facts, bench.candidates, bench.hardware, bench.busiest)
    shared = feed_forward(bench, of.shared_width, of.matrices) if of.shared_width else {}
    latent = (
        total(bench.linear(bench.sharded, of.latent, hidden), bench.linear(bench.sharded, hidden, of.latent))
        if of.latent
        else {}
    )
    return total(
        _router(bench, of),
        _permuted(bench, of),
        routed(bench, of),
        expert_activation(bench, of),
        _biased(bench, of),
        shared,
        latent,
        _summed_gradients(bench, of),
        {INSIDE: np.stack([2 * inside] * 2), ACROSS: np.stack([2 * across] * 2)},
    )
