"""Fields that do nothing alone."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def fields_have_what_they_work_with(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each of these fields works on what its companion switches on, and says nothing alone.

    Megatron, never: what is trained is not what the recipe seems to say (seen on a CPU: two steps are the same bits).
    """
    for name, needed in COMPANIONS.items():
        if _said(recipe, name) and not _said(recipe, needed):
            yield Violation(
                (name, needed), f"`{name}` does nothing without `{needed}`", "add that, or unset this with `null`"
            )


COMPANIONS = {
    "model.q_lora_rank": "model.multi_latent_attention",
    "model.kv_lora_rank": "model.multi_latent_attention",
    "model.qk_head_dim": "model.multi_latent_attention",
    "model.qk_pos_emb_head_dim": "model.multi_latent_attention",
    "model.v_head_dim": "model.multi_latent_attention",
    "model.mtp_loss_scaling_factor": "model.mtp_num_layers",
    "model.rope_scaling_factor": "model.use_rope_scaling",
    "moe.shared_expert_gate": "moe.shared_expert_intermediate_size",
    "moe.shared_expert_overlap": "moe.shared_expert_intermediate_size",
    "moe.upcycling_granularity": "moe.use_upcycling",
    "balance.bias_update_rate": "balance.enable_expert_bias",
    "precision.fp8_recipe": "precision.fp8_format",
    "precision.fp4_recipe": "precision.fp4_format",
    "precision.num_layers_at_start_in_bf16": "precision.first_last_layers_bf16",
    "precision.num_layers_at_end_in_bf16": "precision.first_last_layers_bf16",
    "memory.offload_modules": "memory.fine_grained_activation_offloading",
    "memory.cross_entropy_fusion_impl": "memory.cross_entropy_loss_fusion",
    "optimizer.offload_fraction": "optimizer.cpu_offload",
    "train.manual_gc_interval": "train.manual_gc",
}
"""Fields and the field that each works with."""


def _said(recipe: Recipe, name: str) -> bool:
    section, _, field = name.partition(".")
    return getattr(getattr(recipe, section), field) not in (None, False)


RULES: tuple[Rule, ...] = (fields_have_what_they_work_with,)
