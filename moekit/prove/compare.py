"""Two runs step by step: which of their steps belong together, and what must hold between them. Pure functions.

Each proof is a few checks over pairs of steps. A check measures one number at every pair, and holds where none is
further from zero than its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from moekit.watch.metrics import LOSS

Metrics = Mapping[str, float]

BALANCE_LOSS = "load_balancing_loss"
GRAD_NORM = "grad-norm"
ZEROS = "num-zeros"
LEARNING_RATE = "learning-rate"

ONE_EXPERT_STEPS = 15
ONE_EXPERT_LOSS = 0.00087
"""Nats: the furthest apart that two such runs were in 15 steps (handbook 2.5)."""
ONE_EXPERT_ZEROS = 17
"""The most zeros that the dense run's gradient had there, so what chance may add or take (handbook 2.5)."""
SLICES_LOSS = {"fp32": 1e-5, "bf16": 1e-3}
"""Nats at the first step, by the format of the weights: scaled by a cube root, each is rounded once more."""
DETERMINISTIC_STEPS = 12


@dataclass(frozen=True)
class Pair:
    """Two steps that belong together: the same data, weights that should be as good as the same."""

    step: int
    """Counted from the checkpoint, or the beginning, that both have in common."""
    first_step: int
    """The first run's own number of it."""
    second_step: int
    first: Metrics
    second: Metrics


@dataclass(frozen=True)
class Check:
    """Something that must hold at every pair of steps."""

    what: str
    """What is measured, in words."""
    bound: float
    """How far from zero it may be."""
    largest: float
    """The furthest that it was; NaN where any was."""
    parts_at: int | None
    """The first pair's step where it does not hold; None where it holds everywhere."""
    parts_by: float | None
    """What was measured there."""

    @property
    def holds(self) -> bool:
        """Whether it holds at every pair."""
        return self.parts_at is None


def align(first: Mapping[int, Metrics], second: Mapping[int, Metrics], first_start: int = 0) -> list[Pair]:
    """Pairs of the steps that both runs have: the first run counts on from `first_start`, the second from 0."""
    numbers = [step for step in sorted(second) if step + first_start in first]
    return [Pair(n, n + first_start, n, first[n + first_start], second[n]) for n in numbers]


def balance_loss(metrics: Metrics) -> float | None:
    """The load-balancing loss over all layers, before its coefficient; None where none is logged."""
    found = [v for name, v in metrics.items() if name.endswith(BALANCE_LOSS) and not name.startswith("moe/")]
    return found[0] if found else None


def check(what: str, pairs: list[Pair], measured: Callable[[Pair], float], bound: float) -> Check:
    """Measure at every pair. A number that is none holds nowhere."""
    values = [(pair.step, measured(pair)) for pair in pairs]
    parts_at, parts_by = next(((step, v) for step, v in values if not abs(v) <= bound), (None, None))
    numbers = [abs(value) for _, value in values]
    largest = math.nan if any(map(math.isnan, numbers)) else max(numbers, default=math.nan)
    return Check(what, bound, largest, parts_at, parts_by)


def difference(name: str) -> Callable[[Pair], float]:
    """How much more of a metric the second run has."""
    return lambda pair: pair.second.get(name, math.nan) - pair.first.get(name, math.nan)


def one_expert(pairs: list[Pair], router_weights: int) -> list[Check]:
    """An MoE of one expert (second) against its dense model (first): the same losses, and a router without gradient.

    `router_weights`: MoE layers x hidden size. With one expert its probability is 1 whatever they are.
    """

    def off_balance(pair: Pair) -> float:
        found = balance_loss(pair.second)
        return math.nan if found is None else found - 1

    zeros = difference(ZEROS)
    return [
        check("LM loss, MoE less dense", pairs, difference(LOSS), ONE_EXPERT_LOSS),
        check("load-balancing loss less 1", pairs, off_balance, 0.0),
        check(
            f"zero gradients, MoE less dense, less the router's {router_weights:,}",
            pairs,
            lambda pair: zeros(pair) - router_weights,
            ONE_EXPERT_ZEROS,
        ),
    ]


def slices(pairs: list[Pair], weights: str) -> list[Check]:
    """Slices of a dense model (second) against it (first), before anything was trained: the first step alone."""
    return [check("LM loss of the first step, MoE less dense", pairs[:1], difference(LOSS), SLICES_LOSS[weights])]


def same(pairs: list[Pair]) -> list[Check]:
    """Two runs of one recipe: every number that both log, to the last bit."""
    return [check(what, pairs, measured, 0.0) for what, measured in _numbers(pairs)]


def _numbers(pairs: list[Pair]) -> Iterator[tuple[str, Callable[[Pair], float]]]:
    yield "LM loss", difference(LOSS)
    if any(balance_loss(side) is not None for pair in pairs for side in (pair.first, pair.second)):
        yield "load-balancing loss", _balance_difference
    yield "gradient norm", difference(GRAD_NORM)
    yield "zero gradients", difference(ZEROS)


def _balance_difference(pair: Pair) -> float:
    first, second = balance_loss(pair.first), balance_loss(pair.second)
    return math.nan if first is None or second is None else second - first
