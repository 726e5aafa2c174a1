"""A recipe to the `Shape` of its model: what is said, and Megatron's rules where it is silent (0.19.2's lines)."""

from __future__ import annotations

from moekit.plan.given import Given
from moekit.plan.shape import Delta, Dense, Experts, Grouped, Latent, Mamba, Shape
from moekit.plan.vocabulary import rows_of, vocabulary_of
from moekit.recipe.load import Loaded
from moekit.recipe.patterns import HybridPattern, LayerPattern

_UNCOUNTED = {
    "D": "sparse attention (`D` in `model.hybrid_layer_pattern`)",
}
_MAMBA_KERNEL, _MAMBA_EXPAND = 4, 2
"""core/ssm/mamba_mixer.py: `d_conv` and `expand`, which no option sets."""


def resolve(loaded: Loaded, vocabulary: int | None = None) -> Shape:
    """The model of a recipe. `vocabulary`: token ids, in place of what the recipe's tokenizer is known to have.

    Raises:
        MoekitError: a size is missing, or the sizes make no model.
    """
    return resolve_given(Given.of(loaded), vocabulary)


def resolve_given(given: Given, vocabulary: int | None = None) -> Shape:
    """`resolve`, of arguments that are read already."""
    hidden = given.needed("hidden_size", "model.hidden_size")
    pattern = _hybrid_pattern(given)
    if pattern is None:
        layers = _transformer_layers(given)
        depth, depths = layers[-1], given("mtp_num_layers") or 0
    else:  # arguments.py:838: the pattern says the depths, whatever `--mtp-num-layers` says
        layers, depths = tuple(pattern.layers), len(pattern.depths)
        depth = pattern.depths[0] if depths else ""
    used = set("".join(layers) + depth)
    for letter in used & set(_UNCOUNTED):
        raise given.refused("model.hybrid_layer_pattern", f"{_UNCOUNTED[letter]} is not counted", "")
    ids = vocabulary_of(given, vocabulary)
    window, windowed = _windowed(given, len(layers))
    return Shape(
        stack="gpt" if pattern is None else "hybrid",
        hidden=hidden,
        layers=layers,
        depth=depth,
        depths=depths,
        depth_copies=min(depths, 1) if given("mtp_use_repeated_layer") else depths,
        depths_counted_linear=_linear_depths(given, len(layers), depths) if pattern is None else 0,
        attention=_latent(given) if given("multi_latent_attention") else _grouped(given, hidden),
        delta=_delta(given) if "G" in used else None,
        mamba=_mamba(given, hidden) if "M" in used else None,
        dense=_dense(given, hidden) if "-" in used else None,
        experts=_experts(given, hidden) if "E" in used else None,
        vocabulary=ids,
        rows=rows_of(given, ids),
        tied=not given("untie_embeddings_and_output_weights"),
        positions=_positions(given),
        norm_weights=_norm_weights(given),
        seq_length=given("seq_length"),
        swiglu=given("swiglu"),
        window=window,
        windowed=windowed,
        notes=tuple(given.notes),
    )


def _hybrid_pattern(given: Given) -> HybridPattern | None:
    text = given("hybrid_layer_pattern")
    return None if text is None else given.parsed(HybridPattern, text, "model.hybrid_layer_pattern")


def _transformer_layers(given: Given) -> tuple[str, ...]:
    """`*-`, `*E` and the like for each layer (core/models/gpt/gpt_layer_specs.py:643)."""
    number = given.needed("num_layers", "model.num_layers")
    moe = _layer_flags(given, "moe_layer_freq", "moe.layer_freq", number) if given("num_experts") else (False,) * number
    attention = "+" if given("multi_latent_attention") else "*"
    variant = given("experimental_attention_variant")
    if variant not in (None, "gated_delta_net"):
        raise given.refused("megatron.extra", f"`--experimental-attention-variant {variant}` is not counted")
    linear = _linear(given, number) if variant else (False,) * number
    return tuple(
        ("G" if is_linear else attention) + ("E" if is_moe else "-")
        for is_linear, is_moe in zip(linear, moe, strict=True)
    )


def _layer_flags(given: Given, dest: str, name: str, number: int) -> tuple[bool, ...]:
    flags = given.parsed(LayerPattern, given.noted(dest), name).is_moe(number)
    if len(flags) != number:
        raise given.refused(name, f"`{name}` has {len(flags)} layers, and `model.num_layers` is {number}")
    return flags


def _linear(given: Given, number: int) -> tuple[bool, ...]:
    """Which layers are a gated delta net: all but each N-th (training/training.py:713)."""
    frequency = given("linear_attention_freq")
    if frequency is None:
        raise given.refused("megatron.extra", "a gated delta net needs `--linear-attention-freq` as well")
    pattern = given.parsed(LayerPattern, frequency, "megatron.extra")
    if pattern.period is not None:
        return tuple((layer + 1) % pattern.period != 0 for layer in range(number))
    if len(pattern.layers) != number:
        raise given.refused("megatron.extra", f"`--linear-attention-freq` has {len(pattern.layers)} layers of {number}")
    return pattern.is_moe(number)


def _linear_depths(given: Given, layers: int, depths: int) -> int:
    if given("experimental_attention_variant") is None:
        return 0
    return sum(_linear(given, layers + depths)[layers:])


def _windowed(given: Given, number: int) -> tuple[int | None, tuple[bool, ...]]:
    """Tokens that a window looks back, and which layers have it (core/transformer/utils.py:495)."""
    text = given("window_size")
    if not text:
        return None, (False,) * number
    try:
        left = int(str(text).strip("()").split(",")[0])
    except ValueError:
        raise given.refused("model.window_size", f"`model.window_size` `{text}` is not `left,right`") from None
    skip = given("window_attn_skip_freq")
    if skip is None:
        return left, (True,) * number
    pattern = given.parsed(LayerPattern, skip, "model.window_attn_skip_freq")
    if pattern.period is not None:
        return left, tuple((layer + 1) % pattern.period != 0 for layer in range(number))
    return left, pattern.is_moe(number)


def _norm_weights(given: Given) -> int:
    return 1 if given.noted("normalization") == "RMSNorm" else 2


def _positions(given: Given) -> int:
    if given.noted("position_embedding_type") != "learned_absolute":
        return 0
    return given.needed("max_position_embeddings", "model.max_position_embeddings")


def _heads(given: Given) -> int:
    return given.needed("num_attention_heads", "model.num_attention_heads")


def _grouped(given: Given, hidden: int) -> Grouped:
    heads = _heads(given)
    width = given("kv_channels")
    if width is None:
        width = given.divided(hidden, heads, "model.hidden_size", "model.num_attention_heads")
        given.note("kv_channels", width, "hidden_size / num_attention_heads, training/arguments.py:1291", "rule")
    groups = given.noted("num_query_groups") if given("group_query_attention") else heads
    given.divided(heads, groups, "model.num_attention_heads", "model.num_query_groups")
    bias = given.noted("add_bias_linear")
    return Grouped(
        heads=heads,
        groups=groups,
        width=width,
        gate=given("attention_output_gate"),
        input_bias=bias or given("add_qkv_bias"),
        output_bias=bias,
        norm_weights=_norm_weights(given) if given("qk_layernorm") else 0,
        sinks=given("softmax_type") == "learnable",
    )


def _latent(given: Given) -> Latent:
    return Latent(
        heads=_heads(given),
        query_rank=given("q_lora_rank"),
        rank=given.noted("kv_lora_rank"),
        width=given.noted("qk_head_dim"),
        position_width=given.noted("qk_pos_emb_head_dim"),
        value_width=given.noted("v_head_dim"),
        norm_weights=_norm_weights(given) if given("qk_layernorm") else 0,
        output_bias=given.noted("add_bias_linear"),
    )


def _delta(given: Given) -> Delta:
    return Delta(
        key_heads=given.noted("linear_num_key_heads"),
        key_width=given.noted("linear_key_head_dim"),
        value_heads=given.noted("linear_num_value_heads"),
        value_width=given.noted("linear_value_head_dim"),
        kernel=given.noted("linear_conv_kernel_dim"),
    )


def _mamba(given: Given, hidden: int) -> Mamba:
    width, heads = given.noted("mamba_head_dim"), given("mamba_num_heads")
    if heads is None:
        heads = _MAMBA_EXPAND * hidden // width
        given.note("mamba_num_heads", heads, "2 hidden_size / mamba_head_dim, core/ssm/mamba_mixer.py:246", "rule")
    return Mamba(
        heads=heads,
        width=width,
        groups=given.noted("mamba_num_groups"),
        state=given.noted("mamba_state_dim"),
        kernel=_MAMBA_KERNEL,
    )


def _matrices(given: Given) -> int:
    """Gated with `--swiglu` and `--quick-geglu` alone (training/argument_utils.py:314)."""
    return 3 if given("swiglu") or given("quick_geglu") else 2


def feed_forward_width(given: Given, hidden: int) -> int:
    """`--ffn-hidden-size`, or Megatron's 4 hidden sizes, two thirds of it with SwiGLU (training/arguments.py:1280)."""
    width = given("ffn_hidden_size")
    if width is None:
        gated = given("swiglu")
        width = int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden
        why = "8/3 hidden_size in steps of 64" if gated else "4 hidden_size"
        given.note("ffn_hidden_size", width, f"{why}, training/arguments.py:1280", "rule")
    return int(width)


def _dense(given: Given, hidden: int) -> Dense:
    width = feed_forward_width(given, hidden)
    return Dense(width=width, matrices=_matrices(given), bias=given.noted("add_bias_linear"))


def _experts(given: Given, hidden: int) -> Experts:
    number = given.needed("num_experts", "moe.num_experts")
    width = given("moe_ffn_hidden_size")
    if width is None:
        width = feed_forward_width(given, hidden)
        given.note("moe_ffn_hidden_size", width, "ffn_hidden_size, training/arguments.py:1595", "rule")
    topk = given.noted("moe_router_topk")
    if topk > number:
        raise given.refused("router.topk", f"`router.topk` = {topk} is more than `moe.num_experts` = {number}")
    for dest in ("moe_use_norm_before_up_proj", "moe_shortcut_post_norm", "moe_num_hash_layers"):
        if given(dest):
            why = "the handbook's commit has it, whose text moekit has not read: its weights are a guess"
            given.note(dest, given(dest), why, "assumed")
    return Experts(
        number=number,
        topk=topk,
        width=width,
        latent=given("moe_latent_size"),
        latent_norm=bool(given("moe_use_norm_before_up_proj")),
        norm_behind=bool(given("moe_shortcut_post_norm")),
        matrices=_matrices(given),
        bias=given.noted("add_bias_linear"),
        shared_width=given("moe_shared_expert_intermediate_size") or 0,
        shared_gate=given("moe_shared_expert_gate"),
        router_bias=given("moe_router_enable_expert_bias"),
    )
