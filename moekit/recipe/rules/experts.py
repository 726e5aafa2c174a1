"""Rules on the experts: how many, in which layers, how tokens reach them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from moekit.recipe.rules.violation import Rule, Target, Violation, listed
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import sizes


def dense_models_say_nothing_of_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Most such fields are ignored and a dense model is trained; never noticed, but for the experts' width at config.

    Source: megatron/core/transformer/transformer_config.py:1552.
    """
    if recipe.moe.num_experts is not None:
        return
    for section in ("moe", "router", "balance"):
        values = getattr(recipe, section)
        for field in fields(values):
            if getattr(values, field.name) not in (None, False):
                name = f"{section}.{field.name}"
                yield Violation((name,), f"`{name}` has no meaning without `moe.num_experts`", "unset it with `null`")
    if (recipe.parallel.expert_model or 1) > 1:
        yield Violation(
            ("parallel.expert_model",),
            f"parallel.expert_model = {recipe.parallel.expert_model}, but there are no experts (`moe.num_experts`)",
        )


def experts_divide_over_ranks(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate. Source: megatron/training/arguments.py:1603."""
    experts, ranks = recipe.moe.num_experts, recipe.parallel.expert_model
    if experts and ranks and experts % ranks:
        yield Violation(
            ("parallel.expert_model", "moe.num_experts"),
            f"{experts} experts cannot be split over parallel.expert_model = {ranks} ranks",
            f"use one of {listed([d for d in range(1, experts + 1) if experts % d == 0])}",
        )


def expert_ranks_divide_the_world(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops when groups are made, with the GPUs held. Source: megatron/core/parallel_state.py:883."""
    size = sizes(recipe)
    if size and recipe.moe.num_experts and size.world % size.expert_ranks:
        yield Violation(
            ("parallel.expert_model", "parallel.gpus"),
            f"parallel.gpus = {size.world} cannot be divided into copies of the experts over {size.expert_ranks} ranks "
            f"(expert {size.expert} x expert-tensor {size.expert_tensor} x pipeline {size.pipeline})",
            "`parallel.expert_tensor: 1` keeps experts whole; unset, it is the tensor-parallel size",
        )


def pattern_has_every_layer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`Invalid length of moe_layer_pattern`, when the model is built.

    Source: megatron/core/models/gpt/gpt_layer_specs.py:653.
    """
    pattern, layers = recipe.moe.layer_freq, recipe.model.num_layers
    if pattern and pattern.layers and layers and len(pattern.layers) != layers:
        yield Violation(
            ("moe.layer_freq", "model.num_layers"),
            f"`moe.layer_freq` has {len(pattern.layers)} layers, but model.num_layers = {layers}",
            "it has one 0 (dense) or 1 (MoE) for each layer",
        )


def tensor_parallel_experts_need_sequence(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A ValueError that reads like a warning, at the first step (megatron/core/transformer/moe/moe_layer.py:629)."""
    if recipe.moe.num_experts and (recipe.parallel.tensor_model or 1) > 1 and not recipe.parallel.sequence:
        yield Violation(
            ("parallel.tensor_model", "parallel.sequence"),
            f"an MoE with parallel.tensor_model = {recipe.parallel.tensor_model} needs `parallel.sequence`",
            "add `sequence: true` to `parallel`",
        )


def padding_needs_a_capacity(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at config. Source: megatron/core/transformer/transformer_config.py:1689."""
    if recipe.moe.pad_expert_input_to_capacity and recipe.moe.expert_capacity_factor is None:
        yield Violation(
            ("moe.pad_expert_input_to_capacity",),
            "`moe.pad_expert_input_to_capacity` needs `moe.expert_capacity_factor`",
        )


def upcycling_begins_from_a_run(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Experts then begin at random and the dense training is lost; never noticed. Source: handbook 3.6.

    Without `--save` Megatron stops at validate (megatron/training/arguments.py:1783). With other widths than the dense
    run's the load fails when the model is built. And for two reasons of 0.19.2 and of the handbook's commit it always
    fails there (megatron/training/training.py:2040-2050 and 2159-2180; handbook 2.5).
    """
    moe, model = recipe.moe, recipe.model
    if not moe.use_upcycling:
        return
    if not recipe.checkpoint.from_run:
        yield Violation(
            ("moe.use_upcycling", "checkpoint.from_run"),
            "`moe.use_upcycling` needs `checkpoint.from_run`, the dense run whose layers become experts",
        )
    if not recipe.checkpoint.save:
        yield Violation(
            ("moe.use_upcycling", "checkpoint.save"),
            "`moe.use_upcycling` needs `checkpoint.save`: the converted model is saved at once",
        )
    if moe.ffn_hidden_size and model.ffn_hidden_size and moe.ffn_hidden_size != model.ffn_hidden_size:
        granularity = moe.upcycling_granularity or 1
        yield Violation(
            ("model.ffn_hidden_size", "moe.ffn_hidden_size", "moe.upcycling_granularity"),
            f"while upcycling, model.ffn_hidden_size = {model.ffn_hidden_size} must be an expert's width: Megatron "
            f"takes the dense layers to be {granularity} times as wide",
            f"use {moe.ffn_hidden_size}, for dense layers of {moe.ffn_hidden_size * granularity}",
        )
    yield Violation(
        ("moe.use_upcycling",),
        f"Megatron {recipe.megatron.version} fails while it upcycles: it hands its loader a wrong argument name, and "
        "builds the dense model from the MoE's configuration",
        "launch it with a checkout that has both mended (handbook 2.5, 3.6)",
        "warning",
    )


RULES: tuple[Rule, ...] = (
    dense_models_say_nothing_of_experts,
    experts_divide_over_ranks,
    expert_ranks_divide_the_world,
    pattern_has_every_layer,
    tensor_parallel_experts_need_sequence,
    padding_needs_a_capacity,
    upcycling_begins_from_a_run,
)
