"""Rules on the transformer: its sizes, activation, norms, dropout, initial weights."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def needed_sizes_are_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron has no default for these.

    Megatron, validate: `num_layers argument is None` and its like, of the sequence a bare assert
    (megatron/training/arguments.py:1262, 1277, 1310).
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"):
        counted = name == "num_layers" and recipe.model.hybrid_layer_pattern is not None
        if getattr(recipe.model, name) is None and not counted:
            yield Violation((f"model.{name}",), f"`model.{name}` is missing", "Megatron has no default for it")


def widths_divide_over_tensor_ranks(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each tensor-parallel rank holds an equal part of a dense layer's feed-forward network.

    Megatron, build: `130 is not divisible by 4` (megatron/core/utils.py:558).
    """
    width, ranks = _width(recipe), recipe.parallel.tensor_model or 1
    if width and width % ranks and _has_dense_layers(recipe):
        yield Violation(
            ("model.ffn_hidden_size", "parallel.tensor_model"),
            f"model.ffn_hidden_size = {width} cannot be divided over parallel.tensor_model = {ranks} ranks",
            f"use a multiple of {ranks}",
        )


def gated_widths_are_even(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron warms the fused SwiGLU up with a tensor as wide as a rank's part, and halves it, with experts too.

    Megatron, first step: `The size of tensor a (64) must match the size of tensor b (63)`
    (megatron/training/initialize.py:526).
    """
    width, ranks = _width(recipe), recipe.parallel.tensor_model or 1
    divided = not width or not width % ranks or not _has_dense_layers(recipe)
    if recipe.model.swiglu and width and divided and width // ranks % 2 and width // ranks != 3:  # 2 and 1 go together
        yield Violation(
            ("model.ffn_hidden_size", "model.swiglu", "parallel.tensor_model"),
            f"model.ffn_hidden_size = {width} leaves {width // ranks} to each tensor-parallel rank, an odd number, "
            "and `model.swiglu` halves it",
            f"use a multiple of {2 * ranks}",
        )


def _width(recipe: Recipe) -> int | None:
    """Width of a dense feed-forward network, Megatron's own where none is given (arguments.py:1280-1288)."""
    width, hidden = recipe.model.ffn_hidden_size, recipe.model.hidden_size
    if width is None and hidden is not None:
        return int((4 * hidden * 2 / 3) / 64) * 64 if recipe.model.swiglu else 4 * hidden
    return width


def _has_dense_layers(recipe: Recipe) -> bool:
    """Whether some layer is not MoE; in a hybrid stack, whether there is a `-`."""
    if recipe.model.hybrid_layer_pattern is not None:
        return "-" in str(recipe.model.hybrid_layer_pattern)
    pattern, layers = recipe.moe.layer_freq, recipe.model.num_layers
    return not recipe.moe.num_experts or (pattern is not None and not all(pattern.is_moe(layers or 0)))


def one_activation(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """SwiGLU is one activation, and these are others.

    Megatron, config: a bare assert (megatron/training/argument_utils.py:319, 322).
    """
    for name in ("squared_relu", "quick_geglu"):
        if recipe.model.swiglu and getattr(recipe.model, name):
            yield Violation(
                (f"model.{name}", "model.swiglu"),
                f"`model.swiglu` and `model.{name}` exclude each other",
                "unset one of them with `null`",
            )


def squared_relu_is_not_gated(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Of the two activations besides SwiGLU one is taken.

    Megatron, never: squared ReLU comes first (megatron/training/argument_utils.py:318-324).
    """
    if recipe.model.squared_relu and recipe.model.quick_geglu:
        yield Violation(
            ("model.quick_geglu", "model.squared_relu"),
            "`model.quick_geglu` does nothing beside `model.squared_relu`",
            "unset one of them with `null`",
        )


def _fuses_biases(recipe: Recipe) -> bool:
    """Whether biases are fused into an activation that is not SwiGLU (arguments.py:1539)."""
    return not recipe.model.disable_bias_linear and "--no-bias-gelu-fusion" not in (recipe.megatron.extra or ())


def _is_gated(recipe: Recipe) -> bool:
    return bool(recipe.model.swiglu or (recipe.model.quick_geglu and not recipe.model.squared_relu))


def quick_geglu_is_unfused_in_dense_layers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Dense layers have no kernel that fuses their bias into it; experts have one.

    Megatron, first step: `Only support fusion of gelu and swiglu` (megatron/core/transformer/mlp.py:318).
    """
    model = recipe.model
    chosen = model.quick_geglu and not model.squared_relu and not model.swiglu
    if chosen and _fuses_biases(recipe) and _has_dense_layers(recipe):
        yield Violation(
            ("model.quick_geglu", "model.disable_bias_linear"),
            "`model.quick_geglu` needs dense layers without bias",
            "add `disable_bias_linear: true`, or `[--no-bias-gelu-fusion]` to `megatron.extra`",
        )


def offsets_are_unfused(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Of the fused activations only quick GeGLU takes an offset.

    Megatron, config: `glu_linear_offset is non-zero, activation function must be quick_gelu`
    (megatron/core/transformer/transformer_config.py:2136).
    """
    model = recipe.model
    fused = not model.no_bias_swiglu_fusion if model.swiglu else _fuses_biases(recipe)
    if model.glu_linear_offset and fused and not model.quick_geglu and not model.squared_relu:
        yield Violation(
            ("model.glu_linear_offset", "model.no_bias_swiglu_fusion" if model.swiglu else "model.quick_geglu"),
            "`model.glu_linear_offset` does not go with this fused activation",
            "add `no_bias_swiglu_fusion: true`" if model.swiglu else "use `quick_geglu`, or unset this with `null`",
        )


def offsets_are_of_a_gate(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """GELU and squared ReLU have no linear branch.

    Megatron, never: only a gated activation looks at the value (megatron/core/transformer/mlp.py:330).
    """
    unfused = recipe.model.squared_relu or not _fuses_biases(recipe)
    if recipe.model.glu_linear_offset and not _is_gated(recipe) and unfused:
        yield Violation(
            ("model.glu_linear_offset", "model.swiglu"),
            "`model.glu_linear_offset` does nothing without a gated activation",
            "add `swiglu: true` or `quick_geglu: true`, or unset this with `null`",
        )


def squared_relu_is_unfused(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Where layers have biases, Megatron fuses them into the activation, and has no such kernel for squared ReLU.

    Megatron, config: `activation function should be either gelu, swiglu, or quick_geglu`
    (megatron/core/transformer/transformer_config.py:2116).
    """
    model = recipe.model
    if model.squared_relu and not model.swiglu and _fuses_biases(recipe):
        yield Violation(
            ("model.squared_relu", "model.disable_bias_linear"),
            "`model.squared_relu` needs layers without bias",
            "add `disable_bias_linear: true`, or `[--no-bias-gelu-fusion]` to `megatron.extra`",
        )


def clamps_are_of_a_gate(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """GELU and squared ReLU are not clipped.

    Megatron, never: only a gated activation looks at the value (megatron/core/transformer/mlp.py:326).
    """
    model = recipe.model
    gated = model.swiglu or model.quick_geglu
    if model.activation_func_clamp_value is not None and not gated:
        yield Violation(
            ("model.activation_func_clamp_value", "model.swiglu"),
            "`model.activation_func_clamp_value` does nothing without a gated activation",
            "add `swiglu: true`, or unset this with `null`",
        )


def clamps_are_unfused(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The fused SwiGLU of 0.19.2 does not clip, and it is the default.

    Megatron, never: the fused kernels are not given the value (megatron/core/transformer/moe/experts.py:829,
    megatron/core/transformer/mlp.py:280, 309).
    """
    model = recipe.model
    clamped = model.swiglu and model.activation_func_clamp_value is not None
    if clamped and not model.no_bias_swiglu_fusion and recipe.megatron.version == "0.19.2":
        yield Violation(
            ("model.activation_func_clamp_value", "model.no_bias_swiglu_fusion"),
            "`model.activation_func_clamp_value` does nothing in the fused SwiGLU of Megatron 0.19.2",
            "add `no_bias_swiglu_fusion: true`",
        )


def local_norms_are_plain(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """RMSNorm of the local layers is torch's, which has none of these.

    Megatron, build: `not supported by torch LayerNorm` (megatron/core/transformer/torch_norm.py:44-50).
    """
    model, parallel = recipe.model, recipe.parallel
    others = recipe.runtime.device == "cpu" or model.stack == "hybrid"  # one has limits, one no local layers
    if model.transformer_impl != "local" or model.normalization != "RMSNorm" or others:
        return
    for name, refused, remedy in (
        ("model.apply_layernorm_1p", model.apply_layernorm_1p, "unset it with `null`"),
        ("parallel.sequence", parallel.sequence and (parallel.tensor_model or 1) > 1, "unset it with `null`"),
        ("model.no_persist_layer_norm", not model.no_persist_layer_norm, "add `no_persist_layer_norm: true`"),
    ):
        if refused:
            said = f"`{name}`" if name != "model.no_persist_layer_norm" else "a persistent kernel"
            yield Violation(
                (name, "model.transformer_impl"), f"the RMSNorm of `transformer_impl: local` has no {said}", remedy
            )


def inference_layers_are_plain(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Layers made for inference have one norm and no biases.

    Megatron, config: bare asserts (megatron/core/transformer/transformer_config.py:2830-2834).
    """
    model = recipe.model
    if model.transformer_impl != "inference_optimized":
        return
    for name, refused, remedy in (
        ("model.normalization", model.normalization != "RMSNorm", "normalization: RMSNorm"),
        ("model.apply_layernorm_1p", model.apply_layernorm_1p, "apply_layernorm_1p: null"),
        ("model.disable_bias_linear", not model.disable_bias_linear, "disable_bias_linear: true"),
        ("model.add_qkv_bias", model.add_qkv_bias and model.disable_bias_linear, "add_qkv_bias: null"),
    ):
        if refused:
            yield Violation(
                (name, "model.transformer_impl"),
                f"`transformer_impl: inference_optimized` does not go with this `{name}`",
                f"`model: {{{remedy}}}`, or leave `transformer_impl` to Megatron: it is `transformer_engine`",
            )


def dropped_shares_are_shares(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A dropout is a probability.

    Megatron, build: `dropout probability has to be between 0 and 1, but got 1.5`
    (megatron/core/models/common/embeddings/language_model_embedding.py:86).
    """
    for name in ("attention_dropout", "hidden_dropout"):
        share = getattr(recipe.model, name)
        if share is not None and share > 1:
            yield Violation(
                (f"model.{name}",), f"model.{name} = {share} is above 1", "it is a probability: 0 drops nothing"
            )


def gradients_reach_the_weights(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Weights that are all zero, or activations that are all dropped, have a gradient of zero, and stay so.

    Megatron, never: it trains, and nothing is learnt (megatron/core/transformer/transformer_config.py:2196).
    """
    model = recipe.model
    if model.init_method_std == 0:
        yield Violation(
            ("model.init_method_std",),
            "`init_method_std: 0` makes all weights 0, where no gradient moves them",
            "Megatron's own is 0.02",
        )
    if model.hidden_dropout == 1:
        yield Violation(
            ("model.hidden_dropout",),
            "`hidden_dropout: 1` drops every activation, and nothing is learnt",
            "0 drops nothing",
        )


RULES: tuple[Rule, ...] = (
    needed_sizes_are_given,
    widths_divide_over_tensor_ranks,
    gated_widths_are_even,
    one_activation,
    squared_relu_is_not_gated,
    squared_relu_is_unfused,
    quick_geglu_is_unfused_in_dense_layers,
    offsets_are_unfused,
    offsets_are_of_a_gate,
    clamps_are_of_a_gate,
    clamps_are_unfused,
    local_norms_are_plain,
    inference_layers_are_plain,
    dropped_shares_are_shares,
    gradients_reach_the_weights,
)
