"""The ways to cut a model's layers into pipeline stages that a search walks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from moekit.plan.layout import Layout
from moekit.plan.shape import Shape

MOST_STAGES = 64
"""Pipeline stages beyond which no search goes."""
UNEVEN_VIRTUAL = (1, 2, 4)
"""Virtual stages of a rank where layers do not divide."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Layers over virtual stages, in the order that a token meets them."""

    pipeline: int
    virtual: int
    pieces: tuple[int, ...]
    """Layers of each virtual stage. `# (virtual stage x pipeline rank)`"""
    layout: str | None = None
    """`parallel.pipeline_model_layout`; None: equal parts need none."""
    own: bool = False
    """As the recipe says, in whichever way it says so."""


def cuts(shape: Shape, layout: Layout, world: int, fixed: bool) -> tuple[Cut, ...]:
    """The recipe's own cut, then others by stages and virtual stages.

    `fixed`: only the own one, for a hybrid stack whose pattern says its stages and what else no number cuts.
    """
    own = _own(layout)
    if fixed:
        return (own,)
    found = [own]
    for pipeline in range(1, min(MOST_STAGES, world, len(shape.layers)) + 1):
        if world % pipeline:
            continue
        for virtual in _virtuals(len(shape.layers), pipeline, shape.stack):
            if (pipeline, virtual) != (own.pipeline, own.virtual):
                found += _cut(shape, pipeline, virtual)
    return tuple(found)


def _own(layout: Layout) -> Cut:
    pieces = tuple(len(layout.stages[p][v].layers) for v in range(layout.virtual) for p in range(layout.pipeline))
    return Cut(layout.pipeline, layout.virtual, pieces, own=True)


def _virtuals(layers: int, pipeline: int, stack: str) -> Iterator[int]:
    yield 1
    if pipeline == 1 or stack == "hybrid":
        return
    for virtual in range(2, layers // pipeline + 1):
        if layers % (pipeline * virtual) == 0 or virtual in UNEVEN_VIRTUAL:
            yield virtual


def _cut(shape: Shape, pipeline: int, virtual: int) -> Iterator[Cut]:
    layers, stages = len(shape.layers), pipeline * virtual
    if layers % stages == 0:
        yield Cut(pipeline, virtual, (layers // stages,) * stages)
    elif shape.stack != "hybrid" and (pieces := uneven(layers, stages, shape.depths)):
        yield Cut(pipeline, virtual, pieces, layout_text(pieces, shape.depths))


def uneven(layers: int, stages: int, depths: int) -> tuple[int, ...]:
    """Parts that differ by a layer: the last ones less, which have the loss and the prediction depths, then the first,
    which has the embedding, then those from the end; empty where a stage would have none."""
    pieces = [-(-layers // stages)] * stages
    less = [*[stages - 1] * (1 + min(depths, 1)), 0, *range(stages - 2, 0, -1)]
    missing = sum(pieces) - layers
    for place in less:
        if missing and pieces[place] > 1:
            pieces[place] -= 1
            missing -= 1
    return () if missing else tuple(pieces)


def layout_text(pieces: tuple[int, ...], depths: int) -> str:
    """`pieces` as `parallel.pipeline_model_layout`: `Et|(tt|)*30mL` of 1, thirty 2 and none."""
    first, *middle, last = pieces
    text = f"E{'t' * first}|"
    for size, run in groupby(middle):
        times = len(list(run))
        text += f"({'t' * size}|)*{times}" if times > 1 else f"{'t' * size}|"
    return f"{text}{'t' * last}{'m' * depths}L"
