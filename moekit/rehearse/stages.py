"""Which layers a small model has on the pipeline stages of its whole world: of each kind that a stage has, one."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

from moekit.recipe.patterns import HybridPattern, PipelineLayout
from moekit.recipe.schema import Recipe
from moekit.rehearse.layers import cut, kinds_of, of_kinds, shortest


def in_place(recipe: Recipe) -> dict[str, Any]:
    """Fewer layers, the pipeline as it is: every virtual stage has the shortest row with the kinds that it had."""
    pattern, layout = recipe.model.hybrid_layer_pattern, recipe.parallel.pipeline_model_layout
    if layout is not None:
        return _placed(recipe, layout)
    if (recipe.parallel.pipeline_model or 1) == 1:
        return cut(recipe, stages=1, chunks=1)
    if pattern is not None:
        return _marked(recipe, pattern)
    return _shared_out(recipe)


def _placed(recipe: Recipe, layout: PipelineLayout) -> dict[str, Any]:
    """A layout says how many layers a stage has."""
    rows = _rows(recipe, [stage.count("t") for stage in layout.stages])
    stages = [re.sub("t+", "t" * len(row), stage) for stage, row in zip(layout.stages, rows, strict=True)]
    changes = of_kinds(recipe, [kind for row in rows for kind in row])
    return {**changes, "parallel.pipeline_model_layout": PipelineLayout.parse("|".join(stages))}


def _marked(recipe: Recipe, pattern: HybridPattern) -> dict[str, Any]:
    """A hybrid stack marks its stages; one that does not, is shared out evenly and stays."""
    if len(pattern.stages) == 1:
        return {}
    rows = ["".join(shortest(stage)) for stage in pattern.stages]
    text = "/".join(["|".join(rows), *pattern.depths])
    changes: dict[str, Any] = {"model.hybrid_layer_pattern": HybridPattern.parse(text)}
    return {**changes, "model.num_layers": len("".join(rows))} if recipe.model.num_layers else changes


def _shared_out(recipe: Recipe) -> dict[str, Any]:
    """Megatron shares the layers out evenly; the first and the last stage may be told how many they have."""
    parallel, sizes = recipe.parallel, _shares(recipe)
    if not sizes:
        return {}
    rows = _rows(recipe, sizes)
    told, counted = _told(recipe, len(rows)), _counted(recipe, len(rows))
    free = [index for index, size in enumerate(told) if size is None]
    even = max((len(rows[index]) + counted[index] for index in free), default=0)
    for index in free:
        rows[index] += rows[index][-1:] * (even - counted[index] - len(rows[index]))
    changes = of_kinds(recipe, [kind for row in rows for kind in row])
    if parallel.num_layers_per_virtual_pipeline_stage:
        changes["parallel.num_layers_per_virtual_pipeline_stage"] = even
    if told[0]:
        changes["parallel.decoder_first_pipeline_num_layers"] = len(rows[0])
    if told[-1]:
        changes["parallel.decoder_last_pipeline_num_layers"] = len(rows[-1])
    return changes


def _rows(recipe: Recipe, sizes: list[int]) -> list[list[tuple[bool, bool]]]:
    """The kinds of layers of each virtual stage, cut short."""
    kinds = iter(kinds_of(recipe, recipe.model.num_layers or sum(sizes)))
    return [shortest(list(islice(kinds, size))) for size in sizes]


def _shares(recipe: Recipe) -> list[int]:
    """How many layers each virtual stage has; none where they do not come out even."""
    parallel, count = recipe.parallel, recipe.model.num_layers or 0
    stages, each = parallel.pipeline_model or 1, parallel.num_layers_per_virtual_pipeline_stage
    number = stages * (parallel.num_virtual_stages_per_pipeline_rank or (count // (stages * each) if each else 1))
    told, counted = _told(recipe, number), _counted(recipe, number)
    free = told.count(None)
    even = (count + sum(counted) - sum(filter(None, told))) // free if free else 0
    sizes = [size or even - more for size, more in zip(told, counted, strict=True)]
    return sizes if sizes and sum(sizes) == count and min(sizes) >= 0 else []


def _told(recipe: Recipe, number: int) -> list[int | None]:
    """For each of so many virtual stages the layers that the recipe gives it, None for its even share."""
    told: list[int | None] = [None] * number
    if told:
        told[0] = recipe.parallel.decoder_first_pipeline_num_layers
        told[-1] = recipe.parallel.decoder_last_pipeline_num_layers or (told[0] if number == 1 else None)
    return told


def _counted(recipe: Recipe, number: int) -> list[int]:
    """For each of so many virtual stages, what counts as a layer besides its layers."""
    counted = [0] * number
    if counted:
        counted[0] += bool(recipe.parallel.account_for_embedding_in_pipeline_split)
        counted[-1] += bool(recipe.parallel.account_for_loss_in_pipeline_split)
    return counted
