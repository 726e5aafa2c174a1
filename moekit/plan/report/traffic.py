"""Bytes of the expert exchange as text: the recipe's own, and what a limit of groups would save."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.plan.estimate import Estimate
from moekit.plan.report.table import table
from moekit.plan.shape import Shape
from moekit.plan.time.communication import ELEMENT, exchange_bytes
from moekit.plan.traffic import traffic


def explained_traffic(shape: Shape, estimate: Estimate | None) -> Iterator[str]:
    """What a layer's tokens send, on this layout and on 2 to 8 nodes (handbook 3.7)."""
    if shape.experts is None:
        yield "the model has no experts: nothing is exchanged"
        return
    if estimate is not None:
        yield from _own_lines(shape, estimate)
    limit = estimate.facts.group_topk if estimate and estimate.facts.groups > 1 else None
    yield "bytes a token sends to other nodes in one layer, forward; a combine brings as many back   modelled"
    rows = [("nodes", "copy", "alltoall", "flex", "flex, limited", "to groups", "saved")]
    for one in traffic(shape, ELEMENT, limit):
        sizes = (f"{one.alltoall:,.0f}", f"{one.flex:,.0f}", f"{one.flex_limited:,.0f}")
        rows.append((str(one.nodes), f"{one.copy:,}", *sizes, f"{one.limit} of {one.nodes}", f"{one.saved:.0%}"))
    yield from table(rows, left=0)
    yield "  as if scores said nothing: experts even, groups as many as nodes; a limit changes what the model learns,"
    yield "  and with the all-to-all dispatcher it sends as much as without"


def _own_lines(shape: Shape, estimate: Estimate) -> Iterator[str]:
    assert shape.experts
    inside, across = exchange_bytes(shape, estimate.facts, estimate.rows, estimate.hardware, shape.experts)
    word, experts = estimate.rows.dispatcher[0], int(estimate.rows.expert[0])
    yield f"a GPU's tokens of one micro batch to one layer's experts, {word} over {experts} ranks   modelled"
    yield f"  {inside[0] / 1e6:,.1f} MB inside an NVLink domain of {estimate.hardware.domain}"
    yield f"  {across[0] / 1e6:,.1f} MB across them"
    yield ""
