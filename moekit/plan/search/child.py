"""A point of a grid as what a recipe must say differently, and as a small child recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from moekit.plan.search.grid import KNOBS, Grid
from moekit.recipe.patterns import PipelineLayout
from moekit.recipe.rules.violation import Target, below, is_blackwell, variable
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import exchange_ranks
from moekit.recipe.values import plain
from moekit.rehearse.edit import changed, value

PIPELINE = (
    "pipeline_model_layout",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of `parallel` that say how layers are cut."""
_CONNECTIONS, _OFFLOAD_V1 = "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1"
_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
"""How many of an expert group's ranks NVLink joins, as HybridEP is told."""


def changes_of(grid: Grid, recipe: Recipe, target: Target, point: tuple[int, ...]) -> dict[str, Any]:
    """What of the recipe changes, by dotted name and None to unset: the knobs, and what Megatron wants with them."""
    said = dict(_said(grid, recipe, point))
    new = changed(recipe, said)
    if environment := _environment(new, target):
        said["runtime.environment"] = {**(recipe.runtime.environment or {}), **environment}
    return {
        name: to for name, to in said.items() if to != value(recipe, name) and not _is_same(to, value(recipe, name))
    }


def child_of(grid: Grid, recipe: Recipe, target: Target, point: tuple[int, ...]) -> Recipe:
    """The recipe with that layout."""
    return changed(recipe, changes_of(grid, recipe, target, point))


def _is_same(to: Any, own: Any) -> bool:
    """Whether nothing is changed; of a switch, false and nothing say one thing."""
    return to == own or (to is None and own is False)


def _said(grid: Grid, recipe: Recipe, point: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    at = dict(zip(KNOBS, point, strict=True))
    moved = {knob for knob, place, own in zip(KNOBS, point, grid.own, strict=True) if place != own}
    if "tensor" in moved:
        yield from _tensor(recipe, grid.tensor[at["tensor"]])
    if "pipeline" in moved:
        yield from _cut(grid, at["pipeline"])
    for knob, name in (("context", "parallel.context"), ("expert", "parallel.expert_model")):
        if knob in moved:
            yield name, getattr(grid, knob)[at[knob]]
    if recipe.moe.num_experts and moved & {"tensor", "expert_tensor"}:
        yield "parallel.expert_tensor", grid.expert_tensor[at["expert_tensor"]]
    if "micro_batch" in moved:
        yield "train.micro_batch_size", grid.micro_batch[at["micro_batch"]]
    if "recompute" in moved:
        yield from _recompute(grid, at["recompute"])
    if "offload" in moved:
        yield from _offload(grid.offload[at["offload"]])
    if "dispatcher" in moved:
        yield from _dispatcher(recipe, grid.dispatcher[at["dispatcher"]])
    if "overlap" in moved:
        yield from _overlap(recipe, grid.overlap[at["overlap"]])


def _tensor(recipe: Recipe, ranks: int) -> Iterator[tuple[str, Any]]:
    yield "parallel.tensor_model", ranks
    if ranks > 1 and recipe.moe.num_experts:
        yield "parallel.sequence", True
    if ranks == 1 and recipe.overlap.tp_comm_overlap:
        yield "overlap.tp_comm_overlap", None


def _cut(grid: Grid, place: int) -> Iterator[tuple[str, Any]]:
    cut = grid.cuts[place]
    yield "parallel.pipeline_model", cut.pipeline
    for name in PIPELINE:
        yield f"parallel.{name}", None
    if cut.layout is not None:
        yield "parallel.pipeline_model_layout", PipelineLayout.parse(cut.layout)
    elif cut.virtual > 1:
        yield "parallel.num_virtual_stages_per_pipeline_rank", cut.virtual


def _recompute(grid: Grid, place: int) -> Iterator[tuple[str, Any]]:
    new = grid.recompute[place]
    yield "memory.recompute_granularity", new.granularity
    yield "memory.recompute_modules", new.modules or None
    yield "memory.recompute_method", new.method
    yield "memory.recompute_num_layers", new.layers


def _offload(modules: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    yield "memory.fine_grained_activation_offloading", True if modules else None
    yield "memory.offload_modules", modules or None
    if not modules:
        for name in ("min_offloaded_tensor_size", "activation_offload_fraction", "delta_offload_bytes_across_pp_ranks"):
            yield f"memory.{name}", None


def _dispatcher(recipe: Recipe, word: str) -> Iterator[tuple[str, Any]]:
    is_flex = word in ("deepep", "hybridep")
    yield "moe.dispatcher", "flex" if is_flex else word
    yield "moe.flex_dispatcher_backend", word if is_flex else None
    yield "moe.enable_deepep", None
    for library in ("deepep", "hybridep"):
        if word != library:
            yield f"moe.{library}_num_sms", None


def _overlap(recipe: Recipe, on: bool) -> Iterator[tuple[str, Any]]:
    yield "overlap.moe_expert_parallel_comm", on or None
    if on and recipe.moe.shared_expert_overlap:
        yield "moe.shared_expert_overlap", None
    if not on:
        yield "overlap.delay_wgrad_compute", None


def _environment(recipe: Recipe, target: Target) -> dict[str, str]:
    """Variables that the layout wants and that recipe and profile say otherwise; what neither says, a launch sets."""
    wanted = {}
    connections, parallel = variable(_CONNECTIONS, recipe, target), recipe.parallel
    overlaps = bool(recipe.overlap.moe_expert_parallel_comm)
    split = (parallel.tensor_model or 1) > 1 or (parallel.context or 1) > 1
    free = is_blackwell(target) or parallel.use_megatron_fsdp
    if connections is not None and not free:
        if overlaps and connections == "1":
            wanted[_CONNECTIONS] = "32"
        elif split and not overlaps and connections != "1":
            wanted[_CONNECTIONS] = "1"
    version = target.transformer_engine
    old = version is None or below(version, "2.10")
    if recipe.memory.fine_grained_activation_offloading and not old and variable(_OFFLOAD_V1, recipe, target) != "1":
        wanted[_OFFLOAD_V1] = "1"
    told, moe = variable(_DOMAIN, recipe, target), recipe.moe
    if told is not None and (moe.dispatcher, moe.flex_dispatcher_backend) == ("flex", "hybridep"):
        ranks, most = exchange_ranks(recipe), variable("NVLINK_DOMAIN_SIZE", recipe, target) or told
        together = max(size for size in range(1, ranks + 1) if ranks % size == 0 and size <= int(most))
        if str(together) != told:
            wanted[_DOMAIN] = str(together)
    return wanted


def as_yaml(base: str, schema_line: str, summary: str, changes: Mapping[str, Any], own: Recipe) -> str:
    """The child recipe as text: `base`, a summary, and the changed fields by section."""
    lines = [schema_line, f"base: {json.dumps(base)}", f"summary: {json.dumps(summary)}"]
    sections: dict[str, list[str]] = {}
    for name, to in changes.items():
        section, _, field = name.partition(".")
        if name == "runtime.environment":
            new = {key: one for key, one in to.items() if (own.runtime.environment or {}).get(key) != one}
            sections.setdefault(section, []).append(f"  environment: {json.dumps(new)}")
        else:
            sections.setdefault(section, []).append(f"  {field}: {json.dumps(plain(to))}")
    for section, fields in sections.items():
        lines += ["", f"{section}:", *fields]
    return "\n".join(lines) + "\n"
