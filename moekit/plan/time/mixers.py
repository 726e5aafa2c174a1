"""Attention, latent attention and what scans in place of it: one part's work on a micro batch."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Floats
from moekit.plan.shape import Grouped, Latent
from moekit.plan.time import gemm as on_gpu
from moekit.plan.time.bench import ATTENTION, CONTEXT, Bench, Work, total
from moekit.plan.time.communication import ring

_BLOCK = 128
"""Keys that an attention kernel takes at once: a window's edges lie inside two blocks."""


def _scores(bench: Bench, heads: float, key: float, value: float) -> Floats:
    """Attention itself: causal over the whole sequence, or over a window whose blocks are computed whole."""
    shape, length, context = bench.shape, bench.facts.seq_length, bench.candidates.context
    work = 2 * bench.tokens * heads * (key + value) / bench.tensor
    width = (key + value) / 2
    # around a context-parallel ring each step sees a part of the sequence
    full = on_gpu.attention(bench.hardware, work * length / 2, length / context, width)
    if shape.window is None or not any(shape.windowed):
        return full
    seen = np.full(bench.candidates.number, float(min(shape.window + _BLOCK, length)))
    share = sum(shape.windowed) / len(shape.windowed)
    return (1 - share) * full + share * np.minimum(full, on_gpu.attention(bench.hardware, work * seen, seen, width))


def _core(bench: Bench, heads: float, key: float, value: float, shared: float) -> Work:
    """Attention, and the keys and values that context-parallel ranks pass on behind it (`shared` features)."""
    busy = _scores(bench, heads, key, value)
    if bench.facts.fused_attention:
        extra: Work = {}
    else:  # scores are written, read by the softmax, and read again
        scores = bench.tokens * bench.facts.seq_length * heads / bench.tensor
        extra = bench.moved(scores * 10, scores * 14)
    passed = bench.tokens * shared * 2 / bench.tensor * (bench.candidates.context - 1)
    ranks, stride = bench.candidates.context, bench.candidates.tensor
    once = ring(bench.hardware, passed * ranks / np.maximum(ranks - 1, 1), ranks, stride)
    return total({ATTENTION: busy, CONTEXT: np.maximum(np.stack([once, 2 * once]) - busy, 0)}, extra)


def grouped(bench: Bench) -> Work:
    """Projections, positions, norms of queries and keys, attention."""
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
        bench.moved(2 * turned, 2 * turned),  # queries, keys and values cut out of one result, and put together again
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


def latent(bench: Bench) -> Work:
    """Projections down and up, positions, attention over heads of their own keys and values."""
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


def mamba(bench: Bench) -> Work:
    """A state space layer: a chunk's own scores, and the state carried from chunk to chunk."""
    of = bench.shape.mamba
    assert of is not None
    inner, states = of.heads * of.width, of.groups * of.state
    operations = 2 * _CHUNK * (states + inner) / 2 + 4 * inner * of.state
    return _scanned(bench, inner, 2 * inner + 2 * states + of.heads, operations, 2 * inner + 2 * states)


def delta(bench: Bench) -> Work:
    """A gated delta net: the same with a rule that also takes away."""
    of = bench.shape.delta
    assert of is not None
    keys, values = of.key_heads * of.key_width, of.value_heads * of.value_width
    operations = 2 * _CHUNK * (keys + values) + 6 * values * of.key_width
    return _scanned(bench, values, 2 * keys + 2 * values + 2 * of.value_heads, operations, 2 * keys + 2 * values)
