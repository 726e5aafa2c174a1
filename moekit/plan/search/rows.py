"""Points of a grid as the arrays that memory and time are written on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from moekit.plan.candidates import OFFLOADED, PARTS, RECOMPUTED, Candidates, Flags, Ints
from moekit.plan.layout import Layout
from moekit.plan.search.cuts import Cut
from moekit.plan.search.grid import KNOBS, Grid, Points
from moekit.plan.shape import Shape


def candidates_of(grid: Grid, shape: Shape, layout: Layout, points: Points) -> Candidates:
    """The layouts at `points`; `layout` is the recipe's, which says what is not varied."""
    column = {knob: points[:, place] for place, knob in enumerate(KNOBS)}
    tensor = grid.values(points, "tensor")
    stages = max(grid.cuts[cut].pipeline for cut in np.unique(column["pipeline"]))
    depths_at = next((p for p, rank in enumerate(layout.stages) if any(stage.depths for stage in rank)), None)
    tables = {cut: _Table(shape, grid.cuts[cut], stages, depths_at) for cut in np.unique(column["pipeline"]).tolist()}
    index = np.searchsorted(np.array(sorted(tables)), column["pipeline"])
    ordered = [tables[cut] for cut in sorted(tables)]

    def gathered(name: str) -> Ints:
        values: Ints = np.stack([getattr(table, name) for table in ordered])[index]
        return values

    return Candidates(
        world=grid.world,
        global_batch=grid.global_batch,
        tensor=tensor,
        pipeline=np.array([cut.pipeline for cut in grid.cuts])[column["pipeline"]],
        virtual=np.array([cut.virtual for cut in grid.cuts])[column["pipeline"]],
        context=grid.values(points, "context"),
        expert=grid.values(points, "expert"),
        expert_tensor=grid.values(points, "expert_tensor") if shape.experts else tensor,
        micro_batch=grid.values(points, "micro_batch"),
        sequence_parallel=(tensor > 1) & (bool(shape.experts) | grid.sequence),
        dispatcher=np.array(grid.dispatcher)[column["dispatcher"]],
        overlap_expert=np.array(grid.overlap)[column["overlap"]],
        recompute=np.array([one.granularity or "none" for one in grid.recompute])[column["recompute"]],
        recompute_method=np.array([one.method or "uniform" for one in grid.recompute])[column["recompute"]],
        recompute_layers=np.array([one.layers or 1 for one in grid.recompute])[column["recompute"]],
        recomputed=_flags(RECOMPUTED, [one.said for one in grid.recompute], column["recompute"]),
        offloaded=_flags(OFFLOADED, grid.offload, column["offload"]),
        parts={letter: gathered(f"part_{letter}") for letter in PARTS},
        layers=gathered("layers"),
        embedding=gathered("embedding").astype(bool),
        output=gathered("output").astype(bool),
        depths=gathered("depths").astype(bool),
    )


class _Table:
    """One cut's stages, padded to `stages`; `part_E` and the like by letter. `# (stage,)`"""

    def __init__(self, shape: Shape, cut: Cut, stages: int, own_depths: int | None) -> None:
        held = [Counter[str]() for _ in range(stages)]
        layers = np.zeros(stages, np.int64)
        for piece, (size, end) in enumerate(zip(cut.pieces, accumulate(cut.pieces), strict=True)):
            rank = piece % cut.pipeline
            layers[rank] += size
            held[rank].update("".join(shape.layers[end - size : end]))
        for letter in PARTS:
            setattr(self, f"part_{letter}", np.array([rank[letter] for rank in held]))
        last = cut.pipeline - 1
        self.layers = layers
        self.embedding = _at(0, stages)
        self.output = _at(last, stages)
        self.depths = _at((own_depths if cut.own else last) if shape.depths else None, stages)


def _at(place: int | None, stages: int) -> Flags:
    at: Flags = np.arange(stages) == (-1 if place is None else place)
    return at


def _flags(known: Sequence[str], listed: Sequence[Sequence[str]], column: Ints) -> dict[str, Flags]:
    return {name: np.array([name in one for one in listed])[column] for name in known}
