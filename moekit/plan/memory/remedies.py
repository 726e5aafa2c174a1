"""What makes a recipe need less memory: single changes that the rules of `check` accept, worked out by the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moekit.plan.candidates import of_run
from moekit.plan.given import Given
from moekit.plan.layout import layout_of
from moekit.plan.memory.model import memory
from moekit.plan.memory.verdict import Fit, fit_of
from moekit.plan.resolve import resolve_given
from moekit.plan.run import facts_of
from moekit.problems import MoekitError
from moekit.recipe.load import Loaded
from moekit.recipe.rules import violations
from moekit.recipe.rules.violation import Target
from moekit.recipe.schema import Recipe
from moekit.rehearse.edit import changed

_PER_MICRO_BATCH = ("aux_loss", "quantile_balancing")
"""Methods that even out the tokens of one micro batch (handbook 3.3)."""
_FITS: tuple[Fit, ...] = ("fits", "tight", "does not fit")
_NOTICED = 0.005
"""Of the GPU's memory: a change that saves less is no remedy."""


@dataclass(frozen=True)
class Remedy:
    """One change, and what is needed with it."""

    what: str
    """Such as `recompute moe_act`."""
    changes: dict[str, Any]
    """New values by dotted name, None to unset."""
    changes_training: bool
    """The model learns otherwise: a micro batch is what its balancing method evens out."""
    needed_bytes: float
    """Of the fullest stage."""
    saved_bytes: float
    fit: Fit


def remedies(loaded: Loaded, target: Target, capacity_bytes: float, busiest: float = 1.0,
             vocabulary: int | None = None) -> list[Remedy]:  # fmt: skip
    """Changes that save memory, those that make the recipe fit first and the cheapest of each first.

    What is cheap stands first in `_proposed`. Capacity, group limits and number formats are never touched.
    """
    own = _needed(loaded, busiest, vocabulary)
    found = []
    for what, changes in _proposed(loaded.recipe):
        new = replace(loaded, recipe=changed(loaded.recipe, changes))
        if any(violation.level == "error" for violation in violations(new.recipe, target)):
            continue
        try:
            needed = _needed(new, busiest, vocabulary)
        except MoekitError:  # a layout that the model cannot be cut into
            continue
        if own - needed < _NOTICED * capacity_bytes:
            continue
        turned = "train.micro_batch_size" in changes and _balances_micro_batches(loaded.recipe)
        found.append(Remedy(what, changes, turned, needed, own - needed, fit_of(needed, capacity_bytes)))
    return sorted(found, key=lambda one: (_FITS.index(one.fit), one.changes_training))


def _needed(loaded: Loaded, busiest: float, vocabulary: int | None) -> float:
    given = Given.of(loaded)
    shape = resolve_given(given, vocabulary)
    rows = of_run(given, shape, layout_of(given, shape))
    return float(memory(shape, facts_of(given), rows, busiest).fullest[0])


def _balances_micro_batches(recipe: Recipe) -> bool:
    return bool(recipe.moe.num_experts) and any(method in _PER_MICRO_BATCH for method in recipe.balance.type or ())


def _proposed(recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """By what they cost: recomputation of a module, offload, a layout, then whole layers and the host's optimizer."""
    memory = recipe.memory
    if memory.recompute_granularity != "full":
        own = memory.recompute_modules or () if memory.recompute_granularity == "selective" else ()
        for module in ("moe_act", "layernorm", "mla_up_proj", "shared_experts", "mlp", "moe", "core_attn"):
            if module not in own:
                yield f"recompute {module}", _selective((*own, module))
    micro = recipe.train.micro_batch_size or 1
    if micro > 1 and micro % 2 == 0:
        yield f"micro batch {micro // 2}", {"train.micro_batch_size": micro // 2}
    if memory.recompute_granularity != "full":
        modules = ("attn_norm", "expert_fc1", "moe_act") if recipe.moe.num_experts else ("attn_norm", "core_attn")
        offload = {"memory.fine_grained_activation_offloading": True, "memory.offload_modules": modules}
        yield f"offload {', '.join(modules)}", offload
    parallel = recipe.parallel
    if recipe.moe.num_experts:
        expert = 2 * (parallel.expert_model or 1)
        yield f"expert parallel {expert}", {"parallel.expert_model": expert}
    pipeline = 2 * (parallel.pipeline_model or 1)
    if parallel.pipeline_model_layout is None:
        yield f"pipeline parallel {pipeline}", {"parallel.pipeline_model": pipeline}
    tensor = 2 * (parallel.tensor_model or 1)
    sequence = {"parallel.sequence": True} if recipe.moe.num_experts else {}
    expert_tensor = {"parallel.expert_tensor": parallel.expert_tensor or 1} if recipe.moe.num_experts else {}
    yield f"tensor parallel {tensor}", {"parallel.tensor_model": tensor, **sequence, **expert_tensor}
    if memory.recompute_granularity != "full":
        full = {"granularity": "full", "method": "uniform", "num_layers": 1, "modules": None}
        yield "full recomputation", {f"memory.recompute_{name}": to for name, to in full.items()}
    if not recipe.optimizer.cpu_offload:
        yield "optimizer on the host", {"optimizer.cpu_offload": True, "optimizer.use_precision_aware_optimizer": True}


def _selective(modules: tuple[str, ...]) -> dict[str, Any]:
    return {
        "memory.recompute_granularity": "selective",
        "memory.recompute_modules": modules,
        "memory.recompute_method": None,
        "memory.recompute_num_layers": None,
    }
