"""Many layouts of one model as arrays, one row a layout, so that every formula is written once.

`moekit plan RECIPE` has one row, `--search` thousands. A formula takes rows `# (candidate,)` and stages
`# (candidate, stage)`; a stage is a pipeline rank with all its virtual stages, and stages that a row does not have
are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    """`alltoall`, `allgather`, `deepep` or `hybridep`: the flex dispatcher by its backend."""
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
