"""What one layer's forward dispatch sends between nodes, by dispatcher and by a limit of groups (handbook 3.7).

As if the router's scores said nothing: each token's experts are any, its groups too, and it lives on any node. The
all-to-all dispatcher sends a copy for each expert elsewhere, the flex dispatcher one for each other node; groups are as
many as nodes. What a run's router does is in its routing trace: `moekit router --trace` counts the same there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

from moekit.plan.shape import Experts, Shape

NODES = range(2, 9)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one token of one layer, in bytes to other nodes; a combine brings as many back."""

    nodes: int
    limit: int
    """Nodes that a token may reach, of `nodes` groups."""
    copy: int
    """Bytes of one copy of a token."""
    alltoall: float
    """The same with the limit and without: it moves copies to fewer nodes, and sends as many."""
    flex: float
    flex_limited: float

    @property
    def saved(self) -> float:
        """Share of the flex dispatcher's bytes that the limit saves."""
        return 1 - self.flex_limited / self.flex


def traffic(shape: Shape, value_bytes: int, limit: int | None = None) -> Iterator[Traffic]:
    """For each number of nodes from 2 to 8 that shares the experts evenly.

    `value_bytes`: of one value on its way. `limit`: groups that a token may reach; None is half of them.
    """
    of = shape.experts
    if of is None:
        return
    copy = (of.latent or shape.hidden) * value_bytes
    for nodes in NODES:
        if of.number % nodes:
            continue
        most = min(limit or nodes // 2, nodes)
        if of.number // nodes * most < of.topk:
            continue
        away = (nodes - 1) / nodes * copy
        yield Traffic(
            nodes,
            most,
            copy,
            alltoall=of.topk * away,
            flex=reached(of, nodes, nodes) * away,
            flex_limited=reached(of, nodes, most) * away,
        )


def reached(of: Experts, nodes: int, limit: int) -> float:
    """Nodes that hold some of a token's experts on average, where these are any of `limit` nodes'."""
    each = of.number // nodes
    pool = each * limit
    return limit * (1 - comb(pool - each, of.topk) / comb(pool, of.topk))
