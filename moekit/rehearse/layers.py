"""Which layers a small model has: of each kind one, and every change from one kind to the next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from moekit.recipe.patterns import HybridPattern, LayerPattern, PipelineLayout
from moekit.recipe.schema import Recipe

AT_LEAST = 2
"""Layers of a model."""


def shortest[T](kinds: Sequence[T]) -> list[T]:
    """The beginning of a row, runs of one kind taken as one, that has every kind and every change of kind."""
    turns = [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]
    changes, kept = set(pairwise(turns)), turns[:1]
    for kind in turns[1:]:
        if set(pairwise(kept)) >= changes:
            break
        kept.append(kind)
    return kept


def cut(recipe: Recipe, stages: int, chunks: int) -> dict[str, Any]:
    """The shortest model with every kind of layer, for so many pipeline stages of so many virtual ones each."""
    if recipe.model.hybrid_layer_pattern is not None:
        return _cut_stack(recipe, recipe.model.hybrid_layer_pattern, stages)
    model = recipe.model
    if not model.num_layers:
        return {}
    kinds = _filled(shortest(kinds_of(recipe, model.num_layers)), stages * chunks)
    changes = of_kinds(recipe, kinds)
    if recipe.parallel.pipeline_model_layout is not None:
        changes["parallel.pipeline_model_layout"] = _layout(len(kinds), stages, model.mtp_num_layers or 0)
    return changes


def of_kinds(recipe: Recipe, kinds: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """So many layers, each of its kind."""
    moe, model = recipe.moe, recipe.model
    changes: dict[str, Any] = {"model.num_layers": len(kinds)}
    experts, windows = [expert for expert, _ in kinds], [window for _, window in kinds]
    if moe.layer_freq and list(moe.layer_freq.is_moe(len(kinds))) != experts:
        changes["moe.layer_freq"] = _pattern(experts)
    if model.window_attn_skip_freq and _windows(model.window_attn_skip_freq, len(kinds)) != windows:
        changes["model.window_attn_skip_freq"] = _pattern(windows)
    return changes


def _cut_stack(recipe: Recipe, pattern: HybridPattern, stages: int) -> dict[str, Any]:
    letters = "".join(_filled(shortest(pattern.layers), stages))
    half = len(letters) // stages
    text = "|".join(letters[start : start + half] for start in range(0, len(letters), half))
    depths = "".join(f"/{depth}" for depth in pattern.depths)
    changes: dict[str, Any] = {"model.hybrid_layer_pattern": HybridPattern.parse(text + depths)}
    if recipe.model.num_layers:
        changes["model.num_layers"] = len(letters)
    return changes


def _filled[T](kinds: list[T], stages: int) -> list[T]:
    """The last kind again, until every stage has as many layers, and there are enough."""
    count = max(AT_LEAST, len(kinds))
    return kinds + kinds[-1:] * (-(-count // stages) * stages - len(kinds))


def kinds_of(recipe: Recipe, count: int) -> list[tuple[bool, bool]]:
    """For each layer, whether it has experts and whether its attention has a window."""
    moe, model = recipe.moe, recipe.model
    experts = [bool(moe.num_experts)] * count if moe.layer_freq is None else list(moe.layer_freq.is_moe(count))
    skipped = model.window_attn_skip_freq
    windows = [False] * count if skipped is None else _windows(skipped, count)
    return list(zip(experts, windows, strict=False))


def _windows(skipped: LayerPattern, count: int) -> list[bool]:
    """Which layers have the window (megatron/core/transformer/utils.py:503)."""
    if skipped.period is None:
        return [layer == 1 for layer in skipped.layers]
    return [layer % skipped.period != 0 for layer in range(1, count + 1)]


def _pattern(layers: Sequence[bool]) -> LayerPattern:
    return LayerPattern.parse(f"[{','.join('1' if layer else '0' for layer in layers)}]")


def _layout(layers: int, stages: int, depths: int) -> PipelineLayout:
    """Equally many layers on each stage."""
    parts = ["t" * (layers // stages)] * stages
    return PipelineLayout.parse(f"E{'|'.join(parts)}{'m' * depths}L")
