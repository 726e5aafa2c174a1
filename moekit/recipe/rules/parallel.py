"""Rules on the world and how the model is divided over it."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import sizes


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


RULES: tuple[Rule, ...] = (
    ranks_divide_the_world,
    nodes_are_whole,
    stages_share_layers_evenly,
    layout_fits_the_model,
    context_ranks_cut_sequences,
)
