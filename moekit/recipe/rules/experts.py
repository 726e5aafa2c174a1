"""Rules on the experts: how many, how wide, in which layers, with a bias, beside a shared one, begun from what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from moekit.recipe.rules.violation import Rule, Target, Violation, divisors, listed
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import expert_tensor_ranks, sizes


def dense_models_say_nothing_of_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without experts such a field is ignored, and what was meant to be an MoE trains as a dense model.

    Megatron, never: a dense model looks at none of them (megatron/core/models/gpt/gpt_layer_specs.py:600).
    """
    if recipe.moe.num_experts is not None:
        return
    elsewhere = ("moe.latent_size",) if _layers_are_mixed(recipe) else ("moe.latent_size", "moe.ffn_hidden_size")
    for section in ("moe", "router", "balance"):
        values = getattr(recipe, section)
        for field in fields(values):
            name, value = f"{section}.{field.name}", getattr(values, field.name)
            if value is None or value is False or name in elsewhere:
                continue
            yield Violation((name,), f"`{name}` has no meaning without `moe.num_experts`", "unset it with `null`")


def _layers_are_mixed(recipe: Recipe) -> bool:
    """Whether `moe.layer_freq` leaves layers dense; Megatron then takes a dense model to be such layers."""
    pattern = recipe.moe.layer_freq
    return pattern is not None and ((pattern.period or 0) > 1 or 0 in pattern.layers)


def a_width_of_experts_needs_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A dense layer's width is `model.ffn_hidden_size`.

    Megatron, config: `moe_ffn_hidden_size is set but num_moe_experts is None`
    (megatron/core/transformer/transformer_config.py:1551).
    """
    if recipe.moe.num_experts is None and recipe.moe.ffn_hidden_size and not _layers_are_mixed(recipe):
        yield Violation(
            ("moe.ffn_hidden_size", "moe.num_experts"),
            f"moe.ffn_hidden_size = {recipe.moe.ffn_hidden_size} is an expert's width, and there are no experts",
            "give `moe.num_experts`, or unset it with `null`: a dense layer has `model.ffn_hidden_size`",
        )


def a_latent_space_needs_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Experts are what works in the latent space.

    Megatron, validate: `MoE latent projections are applicable only for MoE models`
    (megatron/training/arguments.py:1901).
    """
    if recipe.moe.num_experts is None and recipe.moe.latent_size:
        yield Violation(
            ("moe.latent_size", "moe.num_experts"),
            f"moe.latent_size = {recipe.moe.latent_size} is the experts' space, and there are no experts",
            "give `moe.num_experts`, or unset it with `null`",
        )


def expert_ranks_need_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Ranks that share experts need some.

    Megatron, validate: `num_experts must be non None to use expert model parallelism`
    (megatron/training/arguments.py:1601).
    """
    if recipe.moe.num_experts is None and (recipe.parallel.expert_model or 1) > 1:
        yield Violation(
            ("parallel.expert_model", "moe.num_experts"),
            f"parallel.expert_model = {recipe.parallel.expert_model}, but there are no experts (`moe.num_experts`)",
        )


def experts_divide_over_ranks(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each rank holds as many experts as every other.

    Megatron, validate: `Number of experts should be a multiple of expert model parallel_size`
    (megatron/training/arguments.py:1602).
    """
    experts, ranks = recipe.moe.num_experts, recipe.parallel.expert_model
    if experts and ranks and experts % ranks:
        yield Violation(
            ("parallel.expert_model", "moe.num_experts"),
            f"{experts} experts cannot be split over parallel.expert_model = {ranks} ranks",
            f"use one of {divisors(experts)}",
        )


def expert_ranks_divide_the_world(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The same world is laid out twice: over the dense layers, and over copies of the experts, of a dense model too.

    Megatron, groups: once all GPUs are held, `world_size is not divisible by expert_tensor_model_pipeline_parallel
    size` (megatron/core/parallel_state.py:882).
    """
    size = sizes(recipe)
    if size and size.world % size.expert_ranks and not size.world % size.model_ranks:
        yield Violation(
            ("parallel.expert_model", "parallel.expert_tensor", "parallel.gpus"),
            f"parallel.gpus = {size.world} cannot be divided into copies of the experts over {size.expert_ranks} ranks "
            f"(expert {size.expert} x expert-tensor {size.expert_tensor} x pipeline {size.pipeline})",
            "`parallel.expert_tensor: 1` keeps experts whole; unset, it is the tensor-parallel size",
        )


def pattern_has_every_layer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A pattern has one 0 or 1 for each layer.

    Megatron, build: `Invalid length of moe_layer_pattern` (megatron/core/models/gpt/gpt_layer_specs.py:653).
    """
    pattern, layers = recipe.moe.layer_freq, recipe.model.num_layers
    if recipe.moe.num_experts and pattern and pattern.layers and layers and len(pattern.layers) != layers:
        yield Violation(
            ("moe.layer_freq", "model.num_layers"),
            f"`moe.layer_freq` has {len(pattern.layers)} layers, but model.num_layers = {layers}",
            "it has one 0 (dense) or 1 (MoE) for each layer",
        )


def some_layer_has_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A pattern of zeros alone is a dense model, whatever else is said of experts.

    Megatron, never: it trains the dense model (megatron/core/models/gpt/gpt_layer_specs.py:665).
    """
    pattern = recipe.moe.layer_freq
    if recipe.moe.num_experts and pattern and pattern.layers and not any(pattern.layers):
        yield Violation(
            ("moe.layer_freq", "moe.num_experts"),
            f"`moe.layer_freq` makes every layer dense, and there are {recipe.moe.num_experts} experts",
            "each 1 in it is an MoE layer; unset `moe.num_experts` for a dense model",
        )


def every_nth_layer_counts_from_the_first(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """N makes layers 0, N, 2N ... MoE: the first layer has experts, where most expect it dense.

    A warning, since some mean it. Megatron's own count, nothing refuses it.

    Megatron, never: layer i is MoE where `i % N == 0` (megatron/core/models/gpt/gpt_layer_specs.py:648; handbook 3.5).
    """
    pattern, layers = recipe.moe.layer_freq, recipe.model.num_layers
    if not (recipe.moe.num_experts and layers and pattern and pattern.period and pattern.period > 1):
        return
    period = pattern.period
    whole = f"([0]*{period - 1}+[1])*{layers // period}" if layers % period == 0 else "a list of 0 and 1"
    yield Violation(
        ("moe.layer_freq",),
        f"`moe.layer_freq: {period}` begins with an MoE layer: layers {listed([*range(0, layers, period)][:3])}"
        f"{' ...' if layers > 3 * period else ''} of 0 to {layers - 1} have experts",
        f"a pattern says it plainly; `{whole}` begins with a dense layer"
        if layers % period == 0
        else "a pattern such as `[0]*1+[1]*15` says each layer plainly",
        "warning",
    )


def tensor_parallel_experts_need_sequence(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each tensor-parallel rank would route the same tokens again.

    Megatron, first step: a ValueError that reads like a warning, `performance may degrade`
    (megatron/core/transformer/moe/moe_layer.py:630).
    """
    if recipe.moe.num_experts and (recipe.parallel.tensor_model or 1) > 1 and not recipe.parallel.sequence:
        yield Violation(
            ("parallel.tensor_model", "parallel.sequence"),
            f"an MoE with parallel.tensor_model = {recipe.parallel.tensor_model} needs `parallel.sequence`",
            "add `sequence: true` to `parallel`",
        )


def experts_divide_over_tensor_ranks(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each rank holds an equal slice of an expert.

    Megatron, build: `65 is not divisible by 2` (megatron/core/utils.py:558).
    """
    width, ranks = recipe.moe.ffn_hidden_size, expert_tensor_ranks(recipe)
    if recipe.moe.num_experts and width and width % ranks:
        yield Violation(
            ("moe.ffn_hidden_size", "parallel.expert_tensor", "parallel.tensor_model"),
            f"experts of width {width} cannot be cut over {ranks} expert-tensor ranks",
            "`parallel.expert_tensor: 1` keeps experts whole; unset, it is the tensor-parallel size",
        )


def experts_cut_in_parts_have_no_bias(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Linear layers have a bias unless told otherwise, and each of an expert's ranks would add it.

    Megatron, config: `Bias in Moe is only supported when ETP==1`
    (megatron/core/transformer/transformer_config.py:2280).
    """
    ranks = expert_tensor_ranks(recipe)
    if recipe.moe.num_experts and not recipe.model.disable_bias_linear and ranks > 1:
        yield Violation(
            ("model.disable_bias_linear", "parallel.expert_tensor", "parallel.tensor_model"),
            f"experts cut over {ranks} expert-tensor ranks cannot have a bias, and linear layers have one by default",
            "add `disable_bias_linear: true` to `model`, or `expert_tensor: 1` to `parallel`",
        )


def experts_with_a_bias_drop_unfused(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Grouped experts of Transformer Engine take no fused bias and dropout, which is Megatron's default.

    Megatron, build: `bias_dropout_fusion is not supported in TEGroupedMLP when add_bias_linear=True`
    (megatron/core/transformer/moe/experts.py:204).
    """
    model = recipe.model
    grouped = recipe.moe.num_experts and recipe.moe.grouped_gemm and model.transformer_impl != "local"
    if grouped and not model.disable_bias_linear and not model.no_bias_dropout_fusion:
        yield Violation(
            ("moe.grouped_gemm", "model.disable_bias_linear", "model.no_bias_dropout_fusion"),
            "grouped experts with a bias need `model.no_bias_dropout_fusion`",
            "add `no_bias_dropout_fusion: true` to `model`, or `disable_bias_linear: true` for experts without bias",
        )


def experts_with_a_bias_activate_unfused(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The fused activation that weighs tokens, Megatron's default, takes no bias.

    Megatron, first step: `Bias is not supported for weighted swiglu fusion`
    (megatron/core/fusions/fused_bias_swiglu.py:247), and for GELU `Only support fusion of swiglu and quick_gelu`
    (megatron/core/transformer/mlp.py:296).
    """
    model, extra = recipe.model, recipe.megatron.extra or ()
    if not recipe.moe.num_experts or model.disable_bias_linear or "--use-te-activation-func" in extra:
        return
    if model.swiglu and not model.no_bias_swiglu_fusion:
        yield Violation(
            ("model.swiglu", "model.disable_bias_linear", "model.no_bias_swiglu_fusion"),
            "the fused SwiGLU of experts takes no bias, and linear layers have one by default",
            "add `disable_bias_linear: true` to `model`, or `no_bias_swiglu_fusion: true` to keep the bias",
        )
    other = model.swiglu or model.squared_relu or model.quick_geglu
    if not other and "--no-bias-gelu-fusion" not in extra:
        yield Violation(
            ("model.disable_bias_linear", "model.swiglu"),
            "the fused GELU has no version for experts, and is on where linear layers have a bias",
            "add `disable_bias_linear: true` to `model`, or `[--no-bias-gelu-fusion]` to `megatron.extra`",
        )


def experts_made_for_inference_are_plain(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Experts made for inference are whole, ungated, of fp32 scores, and drop and pad nothing.

    Megatron, config: `Inference-optimized MoE layers ...` (megatron/core/transformer/transformer_config.py:1471-1501).
    """
    if recipe.model.transformer_impl != "inference_optimized" or not recipe.moe.num_experts:
        return
    precision = recipe.precision
    for name, refused in (
        ("parallel.expert_tensor", expert_tensor_ranks(recipe) > 1),
        ("moe.expert_capacity_factor", recipe.moe.expert_capacity_factor is not None),
        ("router.padding_for_quantization", recipe.router.padding_for_quantization),
        ("router.dtype", recipe.router.dtype != "fp32"),
        ("model.swiglu", recipe.model.swiglu),
        ("model.quick_geglu", recipe.model.quick_geglu),
        ("precision.fp8_param_gather", precision.fp8_recipe == "mxfp8" and not precision.fp8_param_gather),
    ):
        if refused:
            yield Violation(
                (name, "model.transformer_impl"),
                f"experts of `transformer_impl: inference_optimized` do not go with this `{name}`",
                "leave `transformer_impl` to Megatron: it is `transformer_engine`",
            )


RULES: tuple[Rule, ...] = (
    dense_models_say_nothing_of_experts,
    a_width_of_experts_needs_experts,
    a_latent_space_needs_experts,
    expert_ranks_need_experts,
    experts_divide_over_ranks,
    expert_ranks_divide_the_world,
    pattern_has_every_layer,
    some_layer_has_experts,
    every_nth_layer_counts_from_the_first,
    tensor_parallel_experts_need_sequence,
    experts_divide_over_tensor_ranks,
    experts_cut_in_parts_have_no_bias,
    experts_with_a_bias_drop_unfused,
    experts_with_a_bias_activate_unfused,
    experts_made_for_inference_are_plain,
)
