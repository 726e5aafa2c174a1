"""What a search varies, and the values it tries. A layout is a row of places in these lists, one for each knob."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moekit.plan.given import Given
from moekit.plan.layout import Layout
from moekit.plan.run import dispatcher_of
from moekit.plan.search.cuts import Cut, cuts
from moekit.plan.shape import Latent, Shape
from moekit.problems import error
from moekit.recipe.rules.violation import Target
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import sizes

Points = NDArray[np.int64]
"""Places in a grid's lists. `# (candidate, knob)`"""

KNOBS = (
    "tensor",
    "pipeline",
    "context",
    "expert",
    "expert_tensor",
    "micro_batch",
    "recompute",
    "offload",
    "dispatcher",
    "overlap",
)
"""The columns of `Points`; `pipeline` is stages and virtual stages together."""

RANKS = KNOBS.index("recompute")
"""The knobs before this one say ranks and micro batches, those from it on what is recomputed, moved and sent."""

MOST_CONTEXT = 16
MOST_MICRO_BATCH = 16


@dataclass(frozen=True, slots=True)
class Recompute:
    """What is computed again, as `memory` says it."""

    granularity: str | None = None
    modules: tuple[str, ...] = ()
    """Of `selective`."""
    method: str | None = None
    layers: int | None = None
    own: bool = False

    @property
    def said(self) -> tuple[str, ...]:
        """Modules computed again by name: the core of attention where none is listed."""
        return (self.modules or ("core_attn",)) if self.granularity == "selective" else ()


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values of each knob, the recipe's own among them."""

    world: int
    global_batch: int
    tensor: tuple[int, ...]
    cuts: tuple[Cut, ...]
    context: tuple[int, ...]
    expert: tuple[int, ...]
    expert_tensor: tuple[int, ...]
    micro_batch: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    offload: tuple[tuple[str, ...], ...]
    dispatcher: tuple[str, ...]
    overlap: tuple[bool, ...]
    sequence: bool
    """Whether a dense model's activations are split over tensor-parallel ranks; an MoE's always are."""
    own: tuple[int, ...]
    """The recipe's own layout."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many values each knob has."""
        lists = (self.tensor, self.cuts, self.context, self.expert, self.expert_tensor, self.micro_batch)
        return tuple(map(len, (*lists, self.recompute, self.offload, self.dispatcher, self.overlap)))

    def values(self, points: Points, knob: str) -> NDArray[np.int64]:
        """A knob's numbers for each point. `# (candidate,)`"""
        values: NDArray[np.int64] = np.asarray(getattr(self, knob))[points[:, KNOBS.index(knob)]]
        return values


def grid_of(given: Given, shape: Shape, layout: Layout, target: Target) -> Grid:
    """The values a search tries for a recipe.

    Raises:
        MoekitError: the recipe does not say its world, batch and sequence length.
    """
    recipe = given.loaded.recipe
    run = sizes(recipe)
    if run is None:
        needed = "`parallel.gpus`, `train.micro_batch_size`, `train.global_batch_size` and `model.seq_length`"
        raise error("layouts can only be searched of a whole run", f"set {needed}", given.loaded.source.shown)
    node = min(target.gpus_per_node, run.world)
    experts, dispatcher = shape.experts, dispatcher_of(given)
    hybrid = shape.stack == "hybrid" and "|" in str(recipe.model.hybrid_layer_pattern)
    own_recompute, own_offload = _own_recompute(recipe), _own_offload(recipe)
    lists: dict[str, tuple[Any, ...]] = {
        "tensor": _with(layout.tensor, _powers(node)),
        "cuts": cuts(shape, layout, run.world, fixed=hybrid),
        "context": _with(layout.context, _powers(min(MOST_CONTEXT, run.world))),
        "expert": _with(layout.expert, _divisors(experts.number, run.world) if experts else ()),
        "expert_tensor": _with(layout.expert_tensor, _powers(node) if experts else ()),
        "micro_batch": _with(run.micro_batch_seqs, _powers(min(MOST_MICRO_BATCH, run.global_batch_seqs))),
        "recompute": _recomputes(recipe, shape, own_recompute),
        "offload": _with(own_offload, _offloads(recipe, shape)),
        "dispatcher": _with(dispatcher, ("alltoall", "deepep", "hybridep") if experts and dispatcher in _SENT else ()),
        "overlap": _with(bool(recipe.overlap.moe_expert_parallel_comm), (False, True) if experts else ()),
    }
    own = (
        lists["tensor"].index(layout.tensor),
        0,
        lists["context"].index(layout.context),
        lists["expert"].index(layout.expert),
        lists["expert_tensor"].index(layout.expert_tensor),
        lists["micro_batch"].index(run.micro_batch_seqs),
        next(place for place, one in enumerate(lists["recompute"]) if one.own),
        lists["offload"].index(own_offload),
        lists["dispatcher"].index(dispatcher),
        lists["overlap"].index(bool(recipe.overlap.moe_expert_parallel_comm)),
    )
    return Grid(
        world=run.world,
        global_batch=run.global_batch_seqs,
        sequence=bool(recipe.parallel.sequence),
        own=own,
        **lists,
    )


_SENT = ("alltoall", "allgather", "deepep", "hybridep")
"""Dispatchers that another may take the place of: NCCL EP's capacity is never touched."""


def _with[T](own: T, others: Iterable[T]) -> tuple[T, ...]:
    """The values in order, the recipe's own in front of them where it is none of them."""
    values = tuple(others)
    return values if own in values else (own, *values)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(most.bit_length()) if 2**power <= most)


def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, min(number, most) + 1) if number % size == 0)


def _own_recompute(recipe: Recipe) -> Recompute:
    memory = recipe.memory
    return Recompute(
        memory.recompute_granularity,
        (memory.recompute_modules or ()) if memory.recompute_granularity == "selective" else (),
        memory.recompute_method,
        memory.recompute_num_layers,
        own=True,
    )


def _recomputes(recipe: Recipe, shape: Shape, own: Recompute) -> tuple[Recompute, ...]:
    """From none to all, the recipe's own at its place or before `full`."""
    cheap = ["layernorm"]
    if shape.experts and recipe.moe.grouped_gemm:
        cheap.append("moe_act")
    selections = [tuple(cheap)]
    latent = ["mla_up_proj"] if isinstance(shape.attention, Latent) else []
    if latent:
        selections.append((*latent, *cheap))
    feed_forward = ["mlp"] if shape.dense else []
    if shape.experts and shape.experts.shared_width and not recipe.moe.shared_expert_overlap:
        feed_forward.append("shared_experts")
    if feed_forward:
        selections.append((*latent, *feed_forward, *cheap))
    if shape.experts:
        selections.append(("moe", "layernorm"))
    found = [Recompute(), *(Recompute("selective", modules) for modules in selections)]
    found.append(Recompute("full", (), "uniform", 1))
    for place, one in enumerate(found):
        if (one.granularity, {*one.modules}, one.method, one.layers) == (
            own.granularity,
            {*own.modules},
            own.method,
            own.layers,
        ):
            return (*found[:place], own, *found[place + 1 :])
    return (*found[:-1], own, found[-1])


def _own_offload(recipe: Recipe) -> tuple[str, ...]:
    return (recipe.memory.offload_modules or ()) if recipe.memory.fine_grained_activation_offloading else ()


def _offloads(recipe: Recipe, shape: Shape) -> tuple[tuple[str, ...], ...]:
    if recipe.model.transformer_impl not in (None, "transformer_engine"):
        return ((),)
    attention = ("core_attn", "attn_proj")
    if not shape.experts:
        return (), attention
    return (), ("expert_fc1",), ("attn_norm", "mlp_norm", "expert_fc1"), (*attention, "expert_fc1")
