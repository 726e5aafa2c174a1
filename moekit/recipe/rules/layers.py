"""Rules on the transformer's sizes and its division over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import sizes


def needed_sizes_are_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron has no default for these: stops with `... argument is None`, at validate.

    Source: megatron/training/arguments.py:675, 1274-1277.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"):
        if getattr(recipe.model, name) is None:
            yield Violation((f"model.{name}",), f"`model.{name}` is missing", "Megatron has no default for it")
    if recipe.parallel.gpus is None:
        yield Violation(
            ("parallel.gpus",), "`parallel.gpus` is missing", "it is the run's world size, one process each"
        )


def heads_divide_the_width(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A bare assert, at validate. Source: megatron/training/arguments.py:1292-1294."""
    width, heads = recipe.model.hidden_size, recipe.model.num_attention_heads
    if width and heads and recipe.model.kv_channels is None and width % heads:
        yield Violation(
            ("model.num_attention_heads", "model.hidden_size"),
            f"{heads} attention heads do not divide model.hidden_size = {width}",
            "change one of them, or give a head's width as `model.kv_channels`",
        )


def query_groups_divide_heads(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A reshape error, at the first step; nothing before it looks. Seen on a CPU."""
    heads, groups = recipe.model.num_attention_heads, recipe.model.num_query_groups
    if heads and groups and heads % groups:
        yield Violation(
            ("model.num_query_groups", "model.num_attention_heads"),
            f"{groups} query groups do not divide model.num_attention_heads = {heads}",
            f"use one of {_divisors(heads)}",
        )


def query_groups_are_switched_on(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without the switch the groups are ignored and a wider model is trained; never noticed.

    Source: megatron/training/argument_utils.py:330-333.
    """
    if recipe.model.num_query_groups and not recipe.model.group_query_attention:
        yield Violation(
            ("model.num_query_groups", "model.group_query_attention"),
            "`model.num_query_groups` does nothing without `model.group_query_attention`",
            "add `group_query_attention: true`",
        )


def positions_cover_the_sequence(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate. Source: megatron/training/arguments.py:1314."""
    length, positions = recipe.model.seq_length, recipe.model.max_position_embeddings
    if length and positions and length > positions:
        yield Violation(
            ("model.max_position_embeddings", "model.seq_length"),
            f"model.max_position_embeddings = {positions} is below model.seq_length = {length}",
            f"use at least {length}",
        )


def one_activation(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A bare assert, at config. Source: megatron/training/argument_utils.py, `core_transformer_config_from_args`."""
    if recipe.model.swiglu and recipe.model.squared_relu:
        yield Violation(
            ("model.squared_relu", "model.swiglu"), "`model.swiglu` and `model.squared_relu` exclude each other"
        )


def ranks_divide_the_world(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate. Source: megatron/training/arguments.py:431."""
    size = sizes(recipe)
    if size and size.world % size.model_ranks:
        yield Violation(
            ("parallel.gpus", "parallel.tensor_model", "parallel.pipeline_model", "parallel.context"),
            f"parallel.gpus = {size.world} cannot be divided into copies of the model over {size.model_ranks} ranks "
            f"(tensor {size.tensor} x pipeline {size.pipeline} x context {size.context})",
            f"use a multiple of {size.model_ranks}",
        )


def nodes_are_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A node's GPUs beyond the recipe's would idle, or torchrun would wait for ranks that never come; never noticed."""
    gpus = recipe.parallel.gpus
    if gpus and recipe.runtime.device != "cpu" and gpus > target.gpus_per_node and gpus % target.gpus_per_node:
        yield Violation(
            ("parallel.gpus",),
            f"parallel.gpus = {gpus} is no whole number of {target.name}'s nodes of {target.gpus_per_node}",
            f"use a multiple of {target.gpus_per_node}",
        )


def stages_share_layers_evenly(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate. Source: megatron/training/arguments.py:964."""
    parallel, layers, stages = recipe.parallel, recipe.model.num_layers, recipe.parallel.pipeline_model
    uneven = (
        parallel.pipeline_model_layout
        or parallel.decoder_first_pipeline_num_layers
        or parallel.decoder_last_pipeline_num_layers
        or parallel.account_for_embedding_in_pipeline_split
        or parallel.account_for_loss_in_pipeline_split
    )
    if layers and stages and not uneven and layers % stages:
        yield Violation(
            ("parallel.pipeline_model", "model.num_layers"),
            f"model.num_layers = {layers} cannot be divided evenly over {stages} pipeline stages",
            "say which stage holds what with `parallel.pipeline_model_layout`",
        )


def layout_fits_the_model(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Asserts when the model is built.

    Source: megatron/core/transformer/pipeline_parallel_layer_layout.py:44, 106-137.
    """
    layout = recipe.parallel.pipeline_model_layout
    if layout is None:
        return
    stages = recipe.parallel.pipeline_model or 1
    where = "parallel.pipeline_model_layout"
    if len(layout.stages) % stages:
        yield Violation(
            (where, "parallel.pipeline_model"),
            f"the layout has {len(layout.stages)} stages, no multiple of parallel.pipeline_model = {stages}",
        )
    elif any("m" in stage for stage in layout.stages[:-stages]):
        yield Violation(
            (where, "parallel.pipeline_model"),
            "the layout has `m` before the last virtual stage of its rank",
            f"put it into one of the last {stages} stages",
        )
    for letter, field in (("t", "num_layers"), ("m", "mtp_num_layers")):
        meant = getattr(recipe.model, field) or 0
        if layout.count(letter) != meant:
            yield Violation(
                (where, f"model.{field}"),
                f"the layout has {layout.count(letter)} `{letter}`, but model.{field} = {meant}",
                "each layer stands in it once",
            )


def context_ranks_cut_sequences(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate. Source: megatron/training/arguments.py:1296-1299."""
    length, ranks = recipe.model.seq_length, recipe.parallel.context or 1
    if length and ranks > 1 and length % (2 * ranks):
        yield Violation(
            ("parallel.context", "model.seq_length"),
            f"model.seq_length = {length} is no multiple of 2 x parallel.context = {2 * ranks}",
        )


def fields_have_what_they_work_with(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each of these does nothing without its companion, and something else is trained; never noticed."""
    for name, needed in COMPANIONS.items():
        if _said(recipe, name) and not _said(recipe, needed):
            yield Violation(
                (name, needed), f"`{name}` does nothing without `{needed}`", "add that, or unset this with `null`"
            )


def _said(recipe: Recipe, name: str) -> bool:
    section, _, field = name.partition(".")
    return getattr(getattr(recipe, section), field) not in (None, False)


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
    "precision.fp8_param_gather": "precision.fp8_format",
    "precision.fp4_recipe": "precision.fp4_format",
    "precision.num_layers_at_start_in_bf16": "precision.first_last_layers_bf16",
    "precision.num_layers_at_end_in_bf16": "precision.first_last_layers_bf16",
    "memory.offload_modules": "memory.fine_grained_activation_offloading",
    "memory.cross_entropy_fusion_impl": "memory.cross_entropy_loss_fusion",
    "optimizer.offload_fraction": "optimizer.cpu_offload",
    "train.manual_gc_interval": "train.manual_gc",
    "profile.step_start": "profile.enabled",
    "profile.step_end": "profile.enabled",
    "profile.ranks": "profile.enabled",
    "profile.use_pytorch_profiler": "profile.enabled",
}
"""Fields and the field that each works with."""


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


RULES: tuple[Rule, ...] = (
    needed_sizes_are_given,
    heads_divide_the_width,
    query_groups_divide_heads,
    query_groups_are_switched_on,
    positions_cover_the_sequence,
    one_activation,
    ranks_divide_the_world,
    nodes_are_whole,
    stages_share_layers_evenly,
    layout_fits_the_model,
    context_ranks_cut_sequences,
    fields_have_what_they_work_with,
)
