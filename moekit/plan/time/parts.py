"""What one part of a layer does with one micro batch on one GPU, in seconds forward and backward, by term."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.run import Facts
from moekit.plan.shape import Experts, Grouped, Latent, Shape
from moekit.plan.time import gemm as on_gpu
from moekit.plan.time.communication import FLEX, exchange, ring, sharded_tokens, tokens
from moekit.plan.time.hardware import Hardware
from moekit.plan.time.launches import launches

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


def work(bench: Bench, letter: str) -> Work:
    """All of one part (`moekit.plan.shape`), with the norm before and the sum behind it."""
    inner = {"*": _grouped, "+": _latent, "G": _delta, "M": _mamba, "-": _dense, "E": _experts}[letter]
    return total(
        inner(bench), norm(bench), _residual(bench), launches(bench.facts, bench.candidates, bench.shape, letter)
    )


def norm(bench: Bench) -> Work:
    """A norm over the model's width: read and written; backward two read and one written."""
    size = bench.sharded * bench.shape.hidden * 2
    return bench.moved(2 * size, 3 * size)


def _residual(bench: Bench) -> Work:
    """Two streams are read and one is written, both ways."""
    return bench.moved(3 * bench.sharded * bench.shape.hidden * 2)


def _keys(bench: Bench) -> Floats:
    """Keys that a query sees on average over all layers: half of the sequence, or of a window what there is."""
    shape, length = bench.shape, bench.facts.seq_length
    if shape.window is None or not any(shape.windowed):
        return np.full(bench.candidates.number, length / 2)
    window = min(shape.window, length)
    share = sum(shape.windowed) / len(shape.windowed)
    return np.full(bench.candidates.number, (1 - share) * length / 2 + share * (window - window**2 / (2 * length)))


def _core(bench: Bench, heads: float, key: float, value: float, shared: float) -> Work:
    """Attention itself, and the keys and values that context-parallel ranks pass on behind it (`shared` features)."""
    operations = 2 * bench.tokens * _keys(bench) * heads * (key + value) / bench.tensor
    if not bench.facts.fused_attention:  # scores are written, read by the softmax, and read again
        scores = bench.tokens * bench.facts.seq_length * heads / bench.tensor
        extra = bench.moved(scores * 10, scores * 14)
    else:
        extra = {}
    length = bench.facts.seq_length / bench.candidates.context  # of one step around the context-parallel ring
    busy = on_gpu.attention(bench.hardware, operations, length, (key + value) / 2)
    passed = bench.tokens * shared * 2 / bench.tensor * (bench.candidates.context - 1)
    ranks, stride = bench.candidates.context, bench.candidates.tensor
    once = ring(bench.hardware, passed * ranks / np.maximum(ranks - 1, 1), ranks, stride)
    return total({ATTENTION: busy, CONTEXT: np.maximum(np.stack([once, 2 * once]) - busy, 0)}, extra)


def _grouped(bench: Bench) -> Work:
    of = bench.shape.attention
    assert isinstance(of, Grouped)
    hidden, queries, keys = bench.shape.hidden, of.heads * of.width, of.groups * of.width
    inner = queries * (2 if of.gate else 1) + 2 * keys
    turned = bench.tokens * (queries + keys) / bench.tensor * 2
    return total(
        bench.linear(bench.tokens, inner / bench.tensor, hidden),
        bench.linear(bench.tokens, hidden, queries / bench.tensor),
        _core(bench, of.heads, of.width, of.width, 2 * keys),
        bench.moved(2 * turned * (1 if bench.facts.rope_fusion else 3)),  # positions
        bench.moved(2 * turned, 3 * turned) if of.norm_weights else {},
        bench.moved(3 * bench.tokens * queries / bench.tensor * 2) if of.gate else {},
        bench.gathers(hidden, 2, 2),
    )


def latent_up(bench: Bench) -> Work:
    """What `mla_up_proj` computes again: the projections up, and queries, keys and values put together."""
    of = bench.shape.attention
    assert isinstance(of, Latent)
    query, value = of.heads * (of.width + of.position_width), of.heads * of.value_width
    made = bench.tokens * (2 * query + value) / bench.tensor * 2
    return total(
        bench.linear(bench.tokens, query / bench.tensor, of.query_rank or bench.shape.hidden),
        bench.linear(bench.tokens, of.heads * (of.width + of.value_width) / bench.tensor, of.rank),
        bench.moved(made * (2 if bench.facts.latent_rope_fusion else 5)),
    )


def _latent(bench: Bench) -> Work:
    of, hidden = bench.shape.attention, bench.shape.hidden
    assert isinstance(of, Latent)
    down = (of.query_rank or 0) + of.rank + of.position_width
    key = of.width + of.position_width
    return total(
        bench.linear(bench.sharded, down, hidden),
        bench.moved(2 * bench.sharded * down * 2, 3 * bench.sharded * down * 2),
        latent_up(bench),
        _core(bench, of.heads, key, of.value_width, of.heads * (key + of.value_width)),
        bench.linear(bench.tokens, hidden, of.heads * of.value_width / bench.tensor),
        bench.gathers(down),
        bench.gathers(hidden),
    )


def _scanned(bench: Bench, inner: float, wide: float, operations: float, streams: float) -> Work:
    """A mixer that scans: projection in to `wide`, convolution and scan over `inner`, projection out."""
    hidden = bench.shape.hidden
    size = bench.tokens * streams / bench.tensor * 2
    busy = on_gpu.scan(bench.hardware, bench.tokens * operations / bench.tensor)
    return total(
        bench.linear(bench.tokens, wide / bench.tensor, hidden),
        bench.linear(bench.tokens, hidden, inner / bench.tensor),
        {ATTENTION: busy},
        bench.moved(4 * size, 7 * size),
        bench.gathers(hidden, 2, 2),
    )


_CHUNK = 128
"""Tokens that a scan takes at once (core/ssm/mamba_mixer.py, `chunk_size`)."""


def _mamba(bench: Bench) -> Work:
    of = bench.shape.mamba
    assert of is not None
    inner, states = of.heads * of.width, of.groups * of.state
    operations = 2 * _CHUNK * (states + inner) / 2 + 4 * inner * of.state
    return _scanned(bench, inner, 2 * inner + 2 * states + of.heads, operations, 2 * inner + 2 * states)


def _delta(bench: Bench) -> Work:
    of = bench.shape.delta
    assert of is not None
    keys, values = of.key_heads * of.key_width, of.value_heads * of.value_width
    operations = 2 * _CHUNK * (keys + values) + 6 * values * of.key_width
    return _scanned(bench, values, 2 * keys + 2 * values + 2 * of.value_heads, operations, 2 * keys + 2 * values)


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


def _dense(bench: Bench) -> Work:
    of = bench.shape.dense
    assert of is not None
    return feed_forward(bench, of.width, of.matrices)


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


_UNFUSED_PERMUTE = 1.6
"""Kernels that sort tokens took 11.45 % of a step, 7.14 % fused (handbook 3.7)."""


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
    return bench.moved(token * (sorted_once + again) * factor)


def _router(bench: Bench, experts: Experts) -> Work:
    """Scores, the choice among them, and the losses over them: small, and unfused in many passes."""
    scores = bench.sharded * experts.number * bench.facts.router_bytes
    wide = np.full(bench.candidates.number, float(experts.number))
    deep = np.full(bench.candidates.number, float(bench.shape.hidden))
    busy = on_gpu.linear(bench.hardware, "bf16", bench.sharded, wide, deep)
    return total({DENSE: busy}, bench.moved(12 * scores))


def _experts(bench: Bench) -> Work:
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
        {INSIDE: np.stack([2 * inside] * 2), ACROSS: np.stack([2 * across] * 2)},
    )


def output(bench: Bench) -> Work:
    """The output layer in bf16, and the loss over a vocabulary's scores."""
    hidden, own = bench.shape.hidden, bench.shape.rows / bench.tensor
    wide, deep = own, np.full(bench.candidates.number, float(hidden))
    scores = bench.tokens * own
    forward, backward = {"te": (4, 4), "native": (18, 8)}.get(bench.facts.cross_entropy, (34, 14))
    return total(
        {DENSE: on_gpu.linear(bench.hardware, "bf16", bench.tokens, wide, deep, 1, bench.facts.grad_bytes)},
        bench.moved(scores * forward, scores * backward),
        bench.gathers(hidden),
        norm(bench),
        launches(bench.facts, bench.candidates, bench.shape, "output"),
    )


def depth(bench: Bench) -> Work:
    """One prediction depth: three norms, the projection of state and token, a layer, the output layer again."""
    hidden = bench.shape.hidden
    return total(
        *[norm(bench)] * 3,
        bench.linear(bench.tokens, hidden / bench.tensor, 2 * hidden),
        bench.gathers(hidden),
        *[work(bench, letter) for letter in bench.shape.depth],
        output(bench),
    )
