"""Fields that do nothing alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moekit.problems import Level
from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def fields_have_what_they_work_with(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each of these fields works on what its companion switches on, and says nothing alone.

    Megatron, never: what is trained is not what the recipe seems to say (seen on a CPU: three steps are the same bits).
    """
    yield from _alone(recipe, COMPANIONS)


def fields_have_the_value_they_work_with(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each of these fields works on one value of its companion, and says nothing beside another.

    Megatron, never: what is trained is not what the recipe seems to say (seen on a CPU: three steps are the same bits).
    """
    for name, (needed, value) in VALUES.items():
        if _said(recipe, name) and _value(recipe, needed) != value:
            shown = value[0] if isinstance(value, tuple) else value
            yield Violation(
                (name, needed),
                f"`{name}` does nothing without `{needed}: {shown}`",
                "set that, or unset this with `null`",
            )


def newer_fields_have_what_they_work_with(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The same of fields that only the handbook's commit has.

    A warning, since what that commit does with them alone is not seen here.

    Megatron, never: the handbook's pages show them inside what the companion switches on (handbook 3.4, 3.5).
    """
    yield from _alone(recipe, NEWER, "warning")


COMPANIONS = {
    "model.q_lora_rank": "model.multi_latent_attention",
    "model.kv_lora_rank": "model.multi_latent_attention",
    "model.qk_head_dim": "model.multi_latent_attention",
    "model.qk_pos_emb_head_dim": "model.multi_latent_attention",
    "model.v_head_dim": "model.multi_latent_attention",
    "model.mtp_loss_scaling_factor": "model.mtp_num_layers",
    "model.rope_scaling_factor": "model.use_rope_scaling",
    "moe.token_drop_policy": "moe.expert_capacity_factor",
    "moe.shared_expert_gate": "moe.shared_expert_intermediate_size",
    "moe.shared_expert_overlap": "moe.shared_expert_intermediate_size",
    "moe.use_grouped_gemm_for_shared_expert": "moe.shared_expert_intermediate_size",
    "moe.upcycling_granularity": "moe.use_upcycling",
    "router.num_groups": "router.group_topk",
    "balance.bias_update_rate": "balance.enable_expert_bias",
    "parallel.account_for_embedding_in_pipeline_split": "parallel.pipeline_model",
    "parallel.account_for_loss_in_pipeline_split": "parallel.pipeline_model",
    "precision.fp8_recipe": "precision.fp8_format",
    "precision.fp4_recipe": "precision.fp4_format",
    "precision.num_layers_at_start_in_bf16": "precision.first_last_layers_bf16",
    "precision.num_layers_at_end_in_bf16": "precision.first_last_layers_bf16",
    "memory.cross_entropy_fusion_impl": "memory.cross_entropy_loss_fusion",
    "optimizer.offload_fraction": "optimizer.cpu_offload",
    "train.manual_gc_interval": "train.manual_gc",
}
"""Fields and the field that each works with; one pipeline stage is none."""

VALUES = {
    "moe.deepep_num_sms": ("moe.dispatcher", "flex"),
    "moe.hybridep_num_sms": ("moe.dispatcher", "flex"),
    "balance.quantile_balancing_ema": ("balance.type", ("quantile_balancing",)),
    "data.null_tokenizer_eod_id": ("data.tokenizer_type", "NullTokenizer"),
}
"""Fields, the field that each works with, and its value."""

NEWER = {
    "moe.use_norm_before_up_proj": "moe.latent_size",
    "moe.shortcut_parallel": "moe.shortcut_connection",
    "moe.shortcut_post_norm": "moe.shortcut_connection",
}
"""As `COMPANIONS`, of fields that Megatron 0.19.2 does not have."""


def _alone(recipe: Recipe, companions: Mapping[str, str], level: Level = "error") -> Iterator[Violation]:
    for name, needed in companions.items():
        if _said(recipe, name) and not _said(recipe, needed):
            shown = "`parallel.pipeline_model` above 1" if needed == "parallel.pipeline_model" else f"`{needed}`"
            yield Violation(
                (name, needed), f"`{name}` does nothing without {shown}", "add that, or unset this with `null`", level
            )


def _value(recipe: Recipe, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(getattr(recipe, section), field)


def _said(recipe: Recipe, name: str) -> bool:
    value, pattern = _value(recipe, name), recipe.model.hybrid_layer_pattern
    if name == "model.mtp_num_layers" and pattern is not None and pattern.depths:
        return True
    return value > 1 if name == "parallel.pipeline_model" and value else value not in (None, False)


RULES: tuple[Rule, ...] = (
    fields_have_what_they_work_with,
    fields_have_the_value_they_work_with,
    newer_fields_have_what_they_work_with,
)
