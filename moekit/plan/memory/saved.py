"""What autograd keeps of one micro batch in one part of a layer, tensor by tensor.

A tensor that several operations keep is counted once, where it is first kept. Transformer Engine's modules keep the
inputs of their linear layers, and where a norm is fused into one both the norm's input and its output; what
Megatron's own classes keep (`--transformer-impl local`), `tests/plan` asks them. Line numbers are megatron-core
0.19.2's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.memory.tokens import Tokens
from moekit.plan.run import Facts
from moekit.plan.shape import Delta, Dense, Experts, Grouped, Latent, Mamba, Shape

_CHUNK = 64
"""Tokens that a gated delta rule works on at once (flash-linear-attention)."""


@dataclass(frozen=True)
class Saved:
    """One tensor, or several that come and go together."""

    term: str
    """What it is added to."""
    size: Floats
    """Bytes. `# (candidate,)`"""
    by: tuple[str, ...] = ()
    """Modules of selective recomputation that do without it."""
    offload: str | None = None
    """The module of activation offload that moves it."""


def saved(shape: Shape, facts: Facts, c: Candidates, t: Tokens, letter: str) -> list[Saved]:
    """The tensors of one part, its norm and the residual stream before it with it."""
    return [one for one in _of(shape, facts, c, t, letter) if one.size.any()]


def _of(shape: Shape, facts: Facts, c: Candidates, t: Tokens, letter: str) -> Iterator[Saved]:
    hidden = t.part * shape.hidden
    yield Saved("norms", hidden * t.element, offload=_norm_offload(facts, letter))
    yield Saved("norms", t.part * 4 * shape.norm_weights)
    if facts.hidden_dropout:
        yield Saved("dropout", hidden)
    match letter:
        case "*":
            assert isinstance(shape.attention, Grouped)
            yield from _grouped(shape, shape.attention, facts, c, t)
        case "+":
            assert isinstance(shape.attention, Latent)
            yield from _latent(shape.hidden, shape.attention, facts, c, t)
        case "G":
            assert shape.delta
            yield from _delta(shape.hidden, shape.delta, c, t)
        case "M":
            assert shape.mamba
            yield from _mamba(shape.hidden, shape.mamba, c, t)
        case "-":
            assert shape.dense
            yield from _dense(shape.hidden, shape.dense, facts, c, t)
        case _:
            assert shape.experts
            yield from _experts(shape.hidden, shape.experts, facts, c, t)


def _norm_offload(facts: Facts, letter: str) -> str | None:
    """Which offload moves the input of a part's norm (core/transformer/transformer_layer.py:1442): a norm that is fused
    into a linear layer goes with it, and of a dense network stays."""
    alone = not facts.transformer_engine
    return {
        "*": "attn_norm" if alone else "qkv_linear",
        "+": "attn_norm",
        "-": "mlp_norm" if alone else None,
        "E": "mlp_norm",
    }.get(letter)


def _grouped(shape: Shape, of: Grouped, facts: Facts, c: Candidates, t: Tokens) -> Iterator[Saved]:
    """core/transformer/attention.py. A norm of its own only without Transformer Engine, which fuses it into the
    projection, so that recomputing `layernorm` then frees nothing here."""
    own_norm = () if facts.transformer_engine else ("layernorm",)
    queries, keys = of.heads * of.width / c.tensor, of.groups * of.width / c.tensor
    yield Saved("attention", t.part * shape.hidden * t.linear, own_norm, "qkv_linear")
    kept = queries + 2 * keys
    if not facts.transformer_engine:
        # core/transformer/dot_product_attention.py:160 repeats keys and values for each query head; where there is
        # nothing to repeat, values are a view of the whole projection, and rotated queries and keys stand beside it
        is_view = of.groups == of.heads and not shape.positions
        kept = queries * (5 if is_view else 3)
    yield Saved("attention", t.whole * kept * t.element, offload="core_attn")
    if of.norm_weights:
        normed = queries + of.groups * of.width / c.tensor
        yield Saved("attention", t.whole * normed * t.element)
    if of.gate:
        yield Saved("attention", t.whole * queries * 2 * t.element)
    yield from _core(of.heads, queries, facts, c, t)


def _core(heads: int, values: Floats, facts: Facts, c: Candidates, t: Tokens) -> Iterator[Saved]:
    """Scores are kept whole only by attention that is not fused; its output is the projection's input as well.

    Context-parallel attention by all-to-all keeps its output before the exchange back beside the projection's input.
    """
    per_head = heads / c.tensor
    if facts.fused_attention:
        yield Saved("attention core", t.whole * per_head * 4, ("core_attn",))
        yield Saved("attention", t.whole * values * t.element, offload="attn_proj")
        if t.linear < t.element:
            yield Saved("attention", t.whole * values * t.linear)
        again = (c.context > 1) & facts.context_all_to_all
        yield Saved("attention core", t.whole * values * t.element * again, ("core_attn",))
        return
    scores = t.sequences * per_head * t.length * t.length * c.context
    kept = t.element + (t.element + 1 if facts.attention_dropout else 0)
    yield Saved("attention core", scores * kept, ("core_attn",), "core_attn")
    yield Saved("attention", t.whole * values * t.linear, offload="attn_proj")


def _latent(hidden: int, of: Latent, facts: Facts, c: Candidates, t: Tokens) -> Iterator[Saved]:
    """core/transformer/multi_latent_attention.py: `mla_up_proj` is computed again from the compressed vectors."""
    heads = of.heads / c.tensor
    query, value = heads * (of.width + of.position_width), heads * of.value_width
    yield Saved("attention", t.part * hidden * t.linear, ("layernorm",), "qkv_linear")
    compressed = (of.query_rank or 0) + of.rank
    yield Saved("attention", t.part * (compressed + of.position_width) * t.element, (), "qkv_linear")
    if of.norm_weights:
        yield Saved("attention", t.part * compressed * t.linear, ("mla_up_proj",), "qkv_linear")
    yield Saved("attention", t.whole * (2 * query + value) * t.element, ("mla_up_proj",), "core_attn")
    yield from _core(of.heads, value, facts, c, t)


def _delta(hidden: int, of: Delta, c: Candidates, t: Tokens) -> Iterator[Saved]:
    """core/ssm/gated_delta_net/gdn.py: the projection, of which convolution and gate keep views; normed queries and
    keys, and repeated for each value head where those are more; values, gate and output; a matrix of each chunk."""
    keys, values = of.key_heads * of.key_width / c.tensor, of.value_heads * of.value_width / c.tensor
    repeated = 2 * of.value_heads * of.key_width / c.tensor if of.value_heads != of.key_heads else 0.0
    yield Saved("delta net", t.part * hidden * t.linear)
    yield Saved("delta net", t.whole * (2 * keys + 2 * values) * t.element)
    yield Saved("delta net", t.whole * (2 * keys + repeated + 3 * values) * t.element)
    yield Saved("delta net", t.whole * of.value_heads / c.tensor * _CHUNK * t.element)
    yield Saved("delta net", t.whole * values * t.linear, ("gdn_norm_out",))


def _mamba(hidden: int, of: Mamba, c: Candidates, t: Tokens) -> Iterator[Saved]:
    """The fused scan keeps its input and its output, and computes the rest again (core/ssm/mamba_mixer.py)."""
    inner = of.heads * of.width / c.tensor
    projected = 2 * inner + (2 * of.groups * of.state + of.heads) / c.tensor
    yield Saved("mamba", t.part * hidden * t.linear)
    yield Saved("mamba", t.whole * projected * t.element)
    yield Saved("mamba", t.whole * inner * (t.element + t.linear))


def _dense(hidden: int, of: Dense, facts: Facts, c: Candidates, t: Tokens) -> Iterator[Saved]:
    """core/transformer/mlp.py; the norm is fused as the attention's is."""
    own_norm = ("mlp",) if facts.transformer_engine else ("layernorm",)
    width = of.width / c.tensor
    yield Saved("mlp", t.part * hidden * t.linear, own_norm)
    yield Saved("mlp", t.whole * (of.matrices - 1) * width * t.element, ("mlp",))
    yield Saved("mlp", t.whole * width * t.linear, ("mlp",))
    if not facts.activation_fusion and of.matrices == 3:  # the gate's activation, before it is multiplied
        yield Saved("mlp", t.whole * width * t.element, ("mlp",))


def _experts(hidden: int, of: Experts, facts: Facts, c: Candidates, t: Tokens) -> Iterator[Saved]:
    """core/transformer/moe/: router, dispatcher, experts; within `moe` all of it is computed again."""
    yield Saved("router", t.part * hidden * t.element, ("layernorm",))
    yield Saved("router", t.part * (of.number * 4 + of.topk * 20), ("moe",))
    yield from _dispatch(of, c, facts, t)
    outer, width = of.latent or hidden, of.width / c.expert_tensor
    if of.latent:
        yield Saved("experts", t.part * of.latent * t.linear, ("moe",))
    yield Saved("experts", t.kept_rows * outer * t.linear, ("moe",), "expert_fc1")
    yield Saved("experts", t.kept_rows * ((of.matrices - 1) * width * t.element + 4), ("moe",), "moe_act")
    yield Saved("experts", t.kept_rows * width * t.linear, ("moe", "moe_act"))
    if not facts.activation_fusion:  # before it is multiplied with the routing weight, and with what is gated
        yield Saved("experts", t.kept_rows * width * t.element * (of.matrices - 1), ("moe", "moe_act"))
    if facts.deterministic and not facts.permute_fusion:  # moe_utils.py:563: `index_add_` keeps what it adds
        yield Saved("experts", t.sent * outer * t.element, ("moe",))
    if of.shared_width:
        shared = of.shared_width / c.tensor
        yield Saved("shared expert", t.whole * (of.matrices - 1) * shared * t.element, ("moe", "shared_experts"))
        yield Saved("shared expert", t.whole * shared * t.linear, ("moe", "shared_experts"))
        if facts.shared_overlap:  # shared_experts.py gathers its input itself, and its linear layer keeps that
            yield Saved("shared expert", t.whole * hidden * t.linear * (c.tensor > 1), ("moe", "shared_experts"))


def _dispatch(of: Experts, c: Candidates, facts: Facts, t: Tokens) -> Iterator[Saved]:
    """The map of tokens to experts and the order of the sorted rows (token_dispatcher.py; the fused permutation of
    Transformer Engine has 2 experts + 1 integers to a token, torch's two of 8 bytes to a copy)."""
    maps = t.part * of.number * (1 + 4)
    order = t.part * (2 * of.number + 1) * 4 if facts.permute_fusion else t.sent * 16
    yield Saved("dispatch", maps + order, ("moe",))
    everyone = c.tensor * c.expert * (c.dispatcher == "allgather")
    yield Saved("dispatch", t.part * everyone * of.number / c.expert * (1 + 4), ("moe",))
