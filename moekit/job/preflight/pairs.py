"""Which nodes make an allocation slow, found by measuring pairs of them. Pure but for `measure`.

Pairs of a round share no node, so they run at the same time; one that comes out slow is measured again alone before it
is believed. A node of a fast pair is good; one that is slow with a good node is bad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

Pair = tuple[str, str]
Measure = Callable[[Sequence[Pair]], Mapping[Pair, Optional[float]]]
"""Pairs without a common node to their bus bandwidths in GB/s, measured at the same time; None where it failed."""

MOST_ROUNDS = 3
"""Of pairs over all nodes: with more, no pair is fast, or none is slow."""


@dataclass
class Found:
    """What came of it."""

    bad: dict[str, str] = field(default_factory=dict)
    """Node to why."""
    tried: list[dict[str, Any]] = field(default_factory=list)
    """Each measurement: `nodes`, `busbw_gb_s`, `slow`, `alone`."""
    said: str = ""
    """What it means, where no node is to blame."""


@dataclass
class _Search:
    measure: Measure
    accepted_gb_s: float
    found: Found = field(default_factory=Found)
    slow: list[Pair] = field(default_factory=list)
    good: dict[str, None] = field(default_factory=dict)
    """Nodes of fast pairs."""

    def run(self, pairs: Sequence[Pair]) -> None:
        """Measure pairs at the same time, and those that come out slow once more, each alone."""
        for pair in self._slow_of(pairs):
            if len(pairs) == 1 or self._slow_of([pair]):
                self.slow.append(pair)
        self.good.update((node, None) for pair in pairs if pair not in self.slow for node in pair)

    def _slow_of(self, pairs: Sequence[Pair]) -> list[Pair]:
        values = self.measure(pairs)
        for pair in pairs:
            slow = self._is_slow(values[pair])
            tried = {"nodes": list(pair), "busbw_gb_s": values[pair], "slow": slow, "alone": len(pairs) == 1}
            self.found.tried.append(tried)
        return [pair for pair in pairs if self._is_slow(values[pair])]

    def _is_slow(self, busbw_gb_s: Optional[float]) -> bool:
        return busbw_gb_s is None or busbw_gb_s < self.accepted_gb_s

    def why(self, pair: Pair) -> str:
        """What a slow pair was measured at, in words."""
        value = next(one["busbw_gb_s"] for one in reversed(self.found.tried) if one["nodes"] == list(pair))
        said = "does not end well" if value is None else f"is {value:.2f} GB/s, below {self.accepted_gb_s:.2f}"
        return f"all-to-all between {pair[0]} and {pair[1]} {said}"


def find_slow(nodes: Sequence[str], measure: Measure, accepted_gb_s: float) -> Found:
    """The slow nodes of an allocation, by pairs that must reach the accepted share of the two-node baseline."""
    search = _Search(measure, accepted_gb_s)
    for pairs in rounds(nodes)[:MOST_ROUNDS]:
        search.run(pairs)
        seen = {node for one in search.found.tried for node in one["nodes"]}
        if search.slow and search.good and seen == set(nodes):
            break
    if not search.slow:
        search.found.said = "no pair of its nodes is slow: it is slow only together"
    elif not search.good and len(nodes) > 2:
        search.found.said = "every pair is slow: the network, its settings or the image, and no single node"
    else:
        _blame(search)
    return search.found


def _blame(search: _Search) -> None:
    """Name the slow node of each slow pair."""
    bad = search.found.bad
    for pair in list(search.slow):
        if not search.good:  # of two nodes alone
            bad.update({node: f"{search.why(pair)}; which of the two it is, two nodes cannot tell" for node in pair})
            continue
        unknown = [node for node in pair if node not in search.good and node not in bad]
        if len(unknown) == 1 and all(node in search.good for node in pair if node not in unknown):
            bad[unknown[0]] = search.why(pair)
        elif unknown:
            for node in unknown:
                with_good = (node, next(iter(search.good)))
                search.run([with_good])
                if with_good in search.slow:
                    bad[node] = search.why(with_good)
        if not any(node in bad for node in pair):  # the way between the two: without one of them the other is of use
            bad[pair[1]] = f"{search.why(pair)}, though each is fast with others"


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """All pairs of nodes, in rounds in which no node is twice; the first is of neighbours.

    One node stays, the others walk around it (a round robin); of an odd number one rests in each round.
    """
    ring: list[Optional[str]] = [*nodes[::2], *reversed(nodes[1::2])]
    if len(ring) % 2:
        ring.append(None)
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        facing = [(ring[at], ring[-1 - at]) for at in range(half)]
        found.append([(one, other) for one, other in facing if one is not None and other is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found
