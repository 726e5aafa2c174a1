"""Rules on virtual pipeline stages, which interleave."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.pipeline import accounted, counted_layers, end_stages, stages_of, what_is_divided
from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import sizes


def virtual_stages(recipe: Recipe) -> int:
    """Virtual stages of a rank, 1 without interleaving (megatron/training/arguments.py:898-949)."""
    parallel, stages = recipe.parallel, stages_of(recipe)
    if parallel.pipeline_model_layout is not None:
        return len(parallel.pipeline_model_layout.stages) // stages
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    each = parallel.num_layers_per_virtual_pipeline_stage
    return counted_layers(recipe) // stages // each if each else 1


def virtual_stages_are_said_once(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Three ways to say one thing.

    Megatron, validate: `No more than one of the following arguments can be set at the same time`
    (megatron/training/arguments.py:894).
    """
    names = ("pipeline_model_layout", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    given = [f"parallel.{name}" for name in names if getattr(recipe.parallel, name) is not None]
    if len(given) > 1:
        said = " and ".join(f"`{name}`" for name in given)
        yield Violation(
            (*given[1:], given[0]), f"{said} each say the virtual stages", "keep one, unset the rest with `null`"
        )


def interleaving_needs_stages(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Virtual stages go around the ranks of a pipeline.

    Megatron, validate: `When interleaved schedule is used, pipeline-model-parallel size should be greater than 1`
    (megatron/training/arguments.py:968).
    """
    parallel = recipe.parallel
    if stages_of(recipe) > 1 or virtual_stages(recipe) <= 1 or not recipe.model.num_layers:
        return
    names = ("pipeline_model_layout", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    name = next(name for name in names if getattr(parallel, name) is not None)
    yield Violation(
        (f"parallel.{name}", "parallel.pipeline_model"),
        f"`parallel.{name}` makes {virtual_stages(recipe)} virtual stages, and there is one pipeline stage",
        "give `parallel.pipeline_model`, or unset this with `null`",
    )


def layers_of_a_virtual_stage_divide(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A rank's layers are cut into virtual stages of equal size.

    Megatron, validate: `number of layers per pipeline stage must be divisible number of layers per virtual pipeline
    stage` (megatron/training/arguments.py:938).
    """
    each, stages = recipe.parallel.num_layers_per_virtual_pipeline_stage, stages_of(recipe)
    parallel, layers = recipe.parallel, counted_layers(recipe)
    said = parallel.pipeline_model_layout or parallel.num_virtual_stages_per_pipeline_rank or end_stages(recipe)
    if each and recipe.model.num_layers and not said and not layers % stages and layers // stages % each:
        yield Violation(
            ("parallel.num_layers_per_virtual_pipeline_stage", "model.num_layers", "parallel.pipeline_model"),
            f"a stage's {layers // stages} layers cannot be cut into virtual stages of {each}",
            f"use a divisor of {layers // stages}",
        )


def uneven_stages_count_virtual_stages(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Where stages are uneven, a virtual stage has no common size.

    Megatron, validate: `please use --num-virtual-stages-per-pipeline-rank` (megatron/training/arguments.py:921).
    """
    parallel, ends = recipe.parallel, end_stages(recipe)
    others = parallel.pipeline_model_layout or parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage and ends and not others:
        yield Violation(
            ("parallel.num_layers_per_virtual_pipeline_stage", *ends),
            "`parallel.num_layers_per_virtual_pipeline_stage` does not go with uneven stages",
            "use `num_virtual_stages_per_pipeline_rank`",
        )


def virtual_stages_divide_layers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """So many virtual stages of a rank have equally many layers, and every rank as many.

    Megatron, build: `num_layers_per_pipeline_rank 4 should be divisible by vp_size 3`
    (megatron/core/transformer/transformer_block.py:150, 169).
    """
    number, stages, layers = (
        recipe.parallel.num_virtual_stages_per_pipeline_rank,
        stages_of(recipe),
        recipe.model.num_layers,
    )
    if not number or not layers or stages == 1 or recipe.parallel.pipeline_model_layout:
        return
    if not end_stages(recipe) and not accounted(recipe) and layers % (stages * number):
        yield Violation(
            ("parallel.num_virtual_stages_per_pipeline_rank", "parallel.pipeline_model", "model.num_layers"),
            f"model.num_layers = {layers} cannot be divided evenly over {stages} stages x {number} virtual stages",
            "say which virtual stage holds what with `parallel.pipeline_model_layout`",
        )


def accounted_layers_divide_into_virtual_stages(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The same, with the embedding and the loss counted as layers.

    Megatron, config: `must be divisible by virtual_pipeline_model_parallel_size`
    (megatron/core/transformer/transformer_config.py:2090, 2103).
    """
    number, stages = recipe.parallel.num_virtual_stages_per_pipeline_rank, stages_of(recipe)
    accounts, layers = accounted(recipe), counted_layers(recipe)
    if not number or not accounts or not recipe.model.num_layers or recipe.parallel.pipeline_model_layout:
        return
    if not end_stages(recipe) and (stages > 1 or number == 1) and layers % (stages * number):
        yield Violation(
            ("parallel.num_virtual_stages_per_pipeline_rank", *accounts, "model.num_layers"),
            f"{what_is_divided(recipe)} cannot be divided evenly over {stages} stages x {number} virtual stages",
            "say which virtual stage holds what with `parallel.pipeline_model_layout`",
        )


def uneven_stages_divide_into_virtual_stages(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each rank has the same number of virtual stages, each of them equally many of its layers.

    Megatron, config: `must be divisible by virtual pipeline parallel degree`
    (megatron/core/transformer/transformer_config.py:2006-2058).
    """
    number, ends, layers = (
        recipe.parallel.num_virtual_stages_per_pipeline_rank or 1,
        end_stages(recipe),
        recipe.model.num_layers,
    )
    if number == 1 or not ends or not layers or recipe.parallel.pipeline_model_layout or accounted(recipe):
        return
    rest, stages = layers - sum(ends.values()), stages_of(recipe) - len(ends)
    held = dict(ends)
    if stages > 0 and rest > 0 and not rest % stages:
        held["parallel.pipeline_model"] = rest // stages
    for name, several in held.items():
        if several % number:
            yield Violation(
                (name, "parallel.num_virtual_stages_per_pipeline_rank"),
                f"a stage's {several} layers cannot be divided evenly over {number} virtual stages",
                f"a stage holds a multiple of {number}",
            )


def interleaving_has_its_micro_batches(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Interleaved stages take micro batches in groups, one for each stage.

    Megatron, first step: `The number of contiguous micro-batches in a virtual pipeline stage should range in [PP=2 ,
    M=1]`, or `The remainder of M` (megatron/core/pipeline_parallel/schedules.py:1141, 1153).
    """
    size, stages = sizes(recipe), stages_of(recipe)
    if size is None or stages == 1 or virtual_stages(recipe) <= 1 or size.world % size.model_ranks:
        return
    together = size.micro_batch_seqs * size.data
    grouped = "--microbatch-group-size-per-virtual-pipeline-stage" in (recipe.megatron.extra or ())
    if size.global_batch_seqs % together == 0 and size.accumulation_steps % stages and not grouped:
        yield Violation(
            ("train.global_batch_size", "parallel.pipeline_model", "train.micro_batch_size"),
            f"{size.accumulation_steps} micro batches a step are no multiple of {stages} interleaved pipeline stages",
            f"use a multiple of {together * stages} sequences",
        )


RULES: tuple[Rule, ...] = (
    virtual_stages_are_said_once,
    interleaving_needs_stages,
    layers_of_a_virtual_stage_divide,
    uneven_stages_count_virtual_stages,
    virtual_stages_divide_layers,
    accounted_layers_divide_into_virtual_stages,
    uneven_stages_divide_into_virtual_stages,
    interleaving_has_its_micro_batches,
)
