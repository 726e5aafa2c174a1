"""Rules on experts whose weights are one tensor or one operation, and on the pages that keep their activations."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below, variable
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import expert_tensor_ranks


def _one_tensor(recipe: Recipe) -> bool:
    return bool(recipe.moe.num_experts and recipe.moe.single_grouped_weight)


def one_tensor_of_experts_is_grouped(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only the grouped multiplication reads it.

    Megatron, config: `moe_single_grouped_weight and moe_single_grouped_bias require moe_grouped_gemm=True`
    (megatron/core/transformer/transformer_config.py:1558).
    """
    if _one_tensor(recipe) and not recipe.moe.grouped_gemm:
        yield Violation(
            ("moe.single_grouped_weight", "moe.grouped_gemm"), "`moe.single_grouped_weight` needs `moe.grouped_gemm`"
        )


def one_tensor_of_experts_needs_te_2_14(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine has such tensors since 2.14.

    Megatron, config: `require transformer-engine>=2.14.0` (megatron/core/transformer/transformer_config.py:1563).
    """
    if _one_tensor(recipe) and below(target.transformer_engine, "2.14.0"):
        yield Violation(
            ("moe.single_grouped_weight",),
            f"`moe.single_grouped_weight` needs Transformer Engine 2.14 or later, and {target.name} has "
            f"{target.transformer_engine}",
        )


def one_tensor_of_experts_has_a_format(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """It is kept in BF16 or FP16, or quantized as MXFP8 or NVFP4; FP8's default recipe is delayed scaling.

    Megatron, config: `moe_single_grouped_weight is currently supported with high-precision primary weights ...`
    (megatron/core/transformer/transformer_config.py:1575).
    """
    precision = recipe.precision
    fp8 = precision.fp8_format and precision.fp8_recipe != "mxfp8"
    fp4 = precision.fp4_format and precision.fp4_recipe not in (None, "nvfp4")
    if _one_tensor(recipe) and (fp8 or fp4):
        name = "fp8_recipe" if fp8 else "fp4_recipe"
        yield Violation(
            ("moe.single_grouped_weight", f"precision.{name}"),
            f"`moe.single_grouped_weight` does not go with `precision.{name}: "
            f"{getattr(precision, name) or 'delayed'}`{'' if getattr(precision, name) else ', the default'}",
            f"use {'mxfp8' if fp8 else 'nvfp4'}, or train in bf16",
        )


def one_tensor_of_experts_is_fused(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Elsewhere it would be split into each expert's again.

    Megatron, config: `moe_single_grouped_weight requires use_transformer_engine_op_fuser=True`
    (megatron/core/transformer/transformer_config.py:1580).
    """
    if _one_tensor(recipe) and recipe.moe.grouped_gemm and not recipe.memory.use_transformer_engine_op_fuser:
        yield Violation(
            ("moe.single_grouped_weight", "memory.use_transformer_engine_op_fuser"),
            "`moe.single_grouped_weight` needs `memory.use_transformer_engine_op_fuser`",
        )


def fused_experts_have_their_kernel(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine's operation fuser has one kernel for gated experts, which it takes when it is told to.

    Megatron, build: `Fused GroupedMLP is not supported for this configuration.`
    (megatron/core/transformer/moe/experts.py:286-289, 332-399).
    """
    model, extra = recipe.model, recipe.megatron.extra or ()
    if not (recipe.moe.num_experts and recipe.moe.grouped_gemm and recipe.memory.use_transformer_engine_op_fuser):
        return
    gated = model.swiglu or model.quick_geglu
    ranks = expert_tensor_ranks(recipe)
    told = variable("NVTE_CUTEDSL_FUSED_GROUPED_MLP", recipe, target) not in (None, "", "0")
    engine = target.transformer_engine
    older = below(engine, "2.14") and not _one_tensor(recipe)  # else it is said of that
    for refused, field, what, hint in (
        (older, _FUSER, f"of Transformer Engine {engine}", "it is there from 2.14 on"),
        (ranks > 1, "parallel.expert_tensor", f"over {ranks} expert-tensor ranks", "add `expert_tensor: 1`"),
        (
            not gated and not (model.squared_relu and "--use-fused-weighted-squared-relu" in extra),
            "model.swiglu",
            "for this activation",
            "it knows `swiglu` and `quick_geglu`",
        ),
        (
            gated and not told,
            _FUSER,
            "unless NVTE_CUTEDSL_FUSED_GROUPED_MLP is 1",
            "add `runtime: {environment: {NVTE_CUTEDSL_FUSED_GROUPED_MLP: 1}}`",
        ),
    ):
        if refused:
            yield Violation((field, _FUSER) if field != _FUSER else (field,), f"`{_FUSER}` has no kernel {what}", hint)


_FUSER = "memory.use_transformer_engine_op_fuser"


def a_paged_stash_has_a_rank_capacity(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Pages are for what a rank may receive and mostly does not.

    Megatron, config: `moe_paged_stash requires moe_expert_rank_capacity_factor to be set`
    (megatron/core/transformer/transformer_config.py:1908).
    """
    if recipe.moe.num_experts and recipe.moe.paged_stash and recipe.moe.expert_rank_capacity_factor is None:
        yield Violation(
            ("moe.paged_stash", "moe.expert_rank_capacity_factor"),
            "`moe.paged_stash` needs `moe.expert_rank_capacity_factor`",
        )


def a_paged_stash_is_of_fused_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Pages are kept around the fused kernel alone; HybridEP has no rank capacity without it anyway.

    A warning, since training is as without it.

    Megatron, never: unfused experts keep their activations as ever (megatron/core/transformer/moe/experts.py:654).
    """
    moe, memory = recipe.moe, recipe.memory
    paged = moe.num_experts and moe.paged_stash and moe.flex_dispatcher_backend == "ncclep"
    if paged and moe.expert_rank_capacity_factor is not None and not memory.use_transformer_engine_op_fuser:
        yield Violation(
            ("moe.paged_stash", "memory.use_transformer_engine_op_fuser"),
            "`moe.paged_stash` does nothing without `memory.use_transformer_engine_op_fuser`",
            "add that, or unset this with `null`",
            "warning",
        )


def a_paged_stash_keeps_what_is_not_offloaded(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Experts' activations go to pages or to the host.

    Megatron, config: `When moe_paged_stash is enabled, offload_modules must not include ...`
    (megatron/core/transformer/transformer_config.py:1916).
    """
    both = [m for m in recipe.memory.offload_modules or () if m in ("expert_fc1", "moe_act", "fused_group_mlp")]
    if recipe.moe.num_experts and recipe.moe.paged_stash and both:
        yield Violation(
            ("memory.offload_modules", "moe.paged_stash"),
            f"`moe.paged_stash` already keeps what {', '.join(both)} in `memory.offload_modules` would move",
            "take it out of the list",
        )


RULES: tuple[Rule, ...] = (
    one_tensor_of_experts_is_grouped,
    one_tensor_of_experts_needs_te_2_14,
    one_tensor_of_experts_has_a_format,
    one_tensor_of_experts_is_fused,
    fused_experts_have_their_kernel,
    a_paged_stash_has_a_rank_capacity,
    a_paged_stash_is_of_fused_experts,
    a_paged_stash_keeps_what_is_not_offloaded,
)
