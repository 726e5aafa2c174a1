"""Many layouts of one model as arrays, one row a layout, so that every formula is written once.

`moekit plan RECIPE` has one row, `--search` thousands. A formula takes rows `# (candidate,)` and stages
`# (candidate, stage)`; a stage is a pipeline rank with all its virtual stages, and stages that a row does not have
are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moekit.plan.given import Given
from moekit.plan.layout import Layout, Stage
from moekit.plan.run import dispatcher_of
from moekit.plan.shape import Shape

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Words = NDArray[np.str_]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Layouts of one model on `world` GPUs. What every candidate has alike is read from the recipe, not from here."""

    world: int
    global_batch: int
    """Sequences of a step."""
    tensor: Ints
    """`# (candidate,)`, as all up to the stages."""
    pipeline: Ints
    virtual: Ints
    """Virtual stages of one rank, 1 without interleaving."""
    context: Ints
    expert: Ints
    expert_tensor: Ints
    micro_batch: Ints
    """Sequences."""
    sequence_parallel: Flags
    dispatcher: Words
    """`alltoall`, `allgather`, `deepep`, `hybridep` or `ncclep`: the flex dispatcher by its backend."""
    overlap_expert: Flags
    """`--overlap-moe-expert-parallel-comm`."""
    recompute: Words
    """`none`, `selective` or `full`."""
    recompute_method: Words
    """Of full recomputation: `uniform` or `block`."""
    recompute_layers: Ints
    """Of full recomputation: layers in a chunk, or layers recomputed in each virtual stage."""
    recomputed: dict[str, Flags]
    """Of selective recomputation, by module as Megatron names it."""
    offloaded: dict[str, Flags]
    """Modules whose inputs wait in main memory, as Megatron names them."""

    parts: dict[str, Ints]
    """Parts by letter (`moekit.plan.shape`), prediction depths apart. `# (candidate, stage)`, as all below."""
    layers: Ints
    """Layers, prediction depths apart."""
    embedding: Flags
    output: Flags
    """The output layer and the loss."""
    depths: Flags
    """The prediction depths, all of them."""

    @property
    def number(self) -> int:
        """Candidates."""
        return len(self.tensor)

    @property
    def exists(self) -> Flags:
        """Which stages there are. `# (candidate, stage)`"""
        exists: Flags = np.arange(self.layers.shape[1]) < self.pipeline[:, None]
        return exists

    @property
    def data(self) -> Ints:
        """Data-parallel ranks."""
        return self.world // (self.tensor * self.context * self.pipeline)

    @property
    def expert_data(self) -> Ints:
        """Ranks that hold the same experts."""
        return self.world // (self.expert * self.expert_tensor * self.pipeline)

    @property
    def micro_batches(self) -> Ints:
        """Of a step, on each data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.data)


RECOMPUTED = ("core_attn", "gdn_norm_out", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Modules that selective recomputation knows (core/transformer/transformer_config.py:1768)."""
OFFLOADED = (
    "attn_norm",
    "attn_proj",
    "core_attn",
    "expert_fc1",
    "fused_group_mlp",
    "mlp_norm",
    "moe_act",
    "qkv_linear",
)
"""Modules that activation offload knows (core/transformer/transformer_config.py:1853)."""
PARTS = "*+GM-E"
"""Parts of a layer by letter (`moekit.plan.shape`)."""


def of_run(given: Given, shape: Shape, layout: Layout) -> Candidates:
    """The recipe's own layout as one row.

    Raises:
        MoekitError: the recipe does not say its world or its batch.
    """
    world = layout.world or given.needed("world_size", "parallel.gpus")
    micro = given.needed("micro_batch_size", "train.micro_batch_size")
    data = world // (layout.tensor * layout.context * layout.pipeline)
    granularity = given("recompute_granularity") or ("selective" if given("recompute_activations") else "none")
    modules = set(given("recompute_modules") or ["core_attn"]) if granularity == "selective" else set()
    if given("moe_layer_recompute"):
        granularity, modules = "selective", modules | {"moe"}
    offloaded = set(given("offload_modules") or []) if given("fine_grained_activation_offloading") else set()
    ranks = [_rank_counts(stages) for stages in layout.stages]

    def of_stages(key: str) -> Ints:
        return np.array([[rank[key] for rank in ranks]], dtype=np.int64)

    return Candidates(
        world=world,
        global_batch=int(given("global_batch_size") or micro * data),
        tensor=_row(layout.tensor),
        pipeline=_row(layout.pipeline),
        virtual=_row(layout.virtual),
        context=_row(layout.context),
        expert=_row(layout.expert),
        expert_tensor=_row(layout.expert_tensor),
        micro_batch=_row(micro),
        sequence_parallel=np.array([bool(given("sequence_parallel")) and layout.tensor > 1]),
        dispatcher=np.array([dispatcher_of(given)]),
        overlap_expert=np.array([bool(given("overlap_moe_expert_parallel_comm"))]),
        recompute=np.array([granularity]),
        recompute_method=np.array([given("recompute_method") or "uniform"]),
        recompute_layers=_row(1 if given("recompute_num_layers") is None else given("recompute_num_layers")),
        recomputed={name: np.array([name in modules]) for name in RECOMPUTED},
        offloaded={name: np.array([name in offloaded]) for name in OFFLOADED},
        parts={letter: of_stages(letter) for letter in PARTS},
        layers=of_stages("layers"),
        embedding=of_stages("embedding") > 0,
        output=of_stages("output") > 0,
        depths=of_stages("depths") > 0,
    )


def _row(value: int) -> Ints:
    return np.array([value], dtype=np.int64)


def _rank_counts(stages: tuple[Stage, ...]) -> dict[str, int]:
    """Of one pipeline rank, all its virtual stages together."""
    letters = "".join(layer for stage in stages for layer in stage.layers)
    return {
        **{letter: letters.count(letter) for letter in PARTS},
        "layers": sum(len(stage.layers) for stage in stages),
        "embedding": sum(stage.embedding for stage in stages),
        "output": sum(stage.output for stage in stages),
        "depths": sum(stage.depths for stage in stages),
    }
