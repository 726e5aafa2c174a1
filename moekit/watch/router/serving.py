"""The weights of experts where fewer of them are served than were trained, for each denominator (handbook 4).

A smaller k changes who computes, and how much each of those that stay contributes: their scores are divided by those of
the served experts alone, as a router does that renormalizes; of as many as were trained, and a served expert keeps the
weight it was trained with; of more than that; or by nothing. How far these are apart depends on how flat the router is.
Scores are the run's own (`weights.py`); the chosen experts come from the trace, those served are the best of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moekit.problems import error
from moekit.watch.router.grid import Grid, Layer
from moekit.watch.router.logits import by_layer
from moekit.watch.router.weights import Score, Values, approximate, score_of, scores, taken

NAMES = ("weight", "sum", "rms", "largest")
_CHOOSERS = {
    "moe_router_enable_expert_bias": "the expert bias",
    "moe_router_num_groups": "a limit of groups",
    "moe_num_hash_layers": "a table, in hash layers,",
}


class Sizes(NamedTuple):
    """So many of a token's experts."""

    served: int
    trained: int
    experts: int

    @property
    def denominators(self) -> tuple[int, ...]:
        """How many experts' scores to divide by: as many as served, as trained, twice that; 0 is by nothing."""
        wider = 2 * self.trained
        return (self.served, self.trained, *([wider] if wider < self.experts else []), 0)


def trained_by(score: Score, topk: int) -> int:
    """The denominator that Megatron trains with, and serves with, at `topk` experts a token; 0 is by nothing."""
    renormalized = not score.all_experts if score.function == "softmax" else score.renormalized and topk > 1
    return topk if renormalized else 0


@dataclass
class LayerServing:
    """One layer's tokens, added up."""

    sums: NDArray[np.float64]
    """`# (denominator, name)`, in the order of `Sizes.denominators` and `NAMES`."""
    tokens: int = 0
    not_finite: int = 0
    """Left out: without weights, or with another top-k than the run's."""
    mass: float = 0.0
    """Of the trained experts' probability, among all by a softmax: small where the router is flat."""
    kept: float = 0.0
    """Of the served experts' scores over those of the trained ones."""

    def merge(self, other: LayerServing) -> None:
        """Take in what another process has added up."""
        self.sums = self.sums + other.sums
        for name in ("tokens", "not_finite", "mass", "kept"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def means(self) -> NDArray[np.float64]:
        """Over tokens `# (denominator, name)`; NaN where there are none."""
        return self.sums / self.tokens if self.tokens else np.full_like(self.sums, np.nan)


@dataclass
class Serving:
    """Of a trace."""

    sizes: Sizes
    score: Score
    approximate: tuple[str, ...]
    """Why the weights are no more than approximate."""
    layers: dict[Layer, LayerServing] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    """Lines that were passed over, by reason."""

    @property
    def megatron(self) -> int:
        """What Megatron divides by when it serves so many, a denominator."""
        return trained_by(self.score, self.sizes.served)

    def as_json(self) -> dict[str, Any]:
        """All of it; a denominator of 0 is none."""
        layers = {}
        for layer, one in self.layers.items():
            rows = [
                {"divided_by": by, **{name: float(value) for name, value in zip(NAMES, values, strict=True)}}
                for by, values in zip(self.sizes.denominators, one.means, strict=True)
            ]
            count = one.tokens or None
            layers[layer.name] = {
                **{"tokens": one.tokens, "tokens_not_finite": one.not_finite},
                **{"mass": one.mass / count if count else None, "kept": one.kept / count if count else None},
                "denominators": rows if count else [],
            }
        return {
            **{"served": self.sizes.served, "trained": self.sizes.trained, "megatron_divides_by": self.megatron},
            **{"approximate": self.approximate, "layers": layers, "skipped": dict(self.skipped)},
        }


def serving_of(folder: Path, grid: Grid, served: int, workers: int | None = None) -> Serving:
    """The weights of all calls in a trace's folder (`attempts/N/routing`) where `served` experts are taken a token.

    Raises:
        MoekitError: that is no smaller k, there is no logit in the trace, or no weight can be made of them.
    """
    score, trained = score_of(grid.args), int(grid.args.get("moe_router_topk") or 2)
    if not 0 < served < trained:
        raise error(
            f"{served} is no smaller k: the run was trained with {trained} experts a token",
            "of more experts than were trained together no trace says anything" if served > trained else "",
        )
    sizes = Sizes(served, trained, grid.experts.num_experts)
    found = Serving(sizes, score, (approximate(grid.args), *_choosers(grid.args)))
    work = partial(_of_tokens, sizes=sizes, score=score)
    found.layers = by_layer(folder, grid, work, found.skipped, workers)
    return found


def _choosers(args: Mapping[str, Any]) -> list[str]:
    """Why the served are not sure to be the best of those that were chosen."""
    return [f"served are the best by score; {said} decides too" for name, said in _CHOOSERS.items() if args.get(name)]


def _of_tokens(logits: NDArray[Any], experts: NDArray[Any], sizes: Sizes, score: Score) -> LayerServing:
    found = LayerServing(np.zeros((len(sizes.denominators), len(NAMES))), not_finite=len(logits))
    if experts.shape[1] == sizes.trained:
        values, mass, kept = served_values(logits, experts, sizes, score)
        good = np.isfinite(values).all(axis=(0, 1))  # not where all scores are 0
        found.sums = values[..., good].sum(axis=-1)
        found.tokens, found.not_finite = int(good.sum()), int((~good).sum())
        found.mass, found.kept = float(mass[good].sum()), float(kept[good].sum())
    return found


def served_values(
    logits: NDArray[Any], experts: NDArray[Any], sizes: Sizes, score: Score
) -> tuple[NDArray[np.float64], Values, Values]:
    """Each token's values `# (denominator, name, token)` in the order of `Sizes.denominators` and `NAMES`; mass; kept.

    weight: a served expert's weight over that which it was trained with. sum: that of a token's served weights over
    the trained one's, which scales the layer's routed output. rms: the same of sqrt(sum(w w)), for experts that are as
    large and uncorrelated. largest: the largest served weight itself, with the run's scaling. `# (token,)`: mass, the
    chosen experts' probability among all by a softmax; kept, the served experts' scores over those of the chosen.
    """
    each = scores(logits, score.function)
    chosen = -np.sort(-taken(each, experts), axis=1)  # (token, choice), the best first
    served, ranked = chosen[:, : sizes.served], -np.sort(-each, axis=1)

    def divisor(count: int) -> Values:
        """The scores of so many experts: of the chosen ones as far as there are any, beyond that of the best of all."""
        of = chosen if count <= sizes.trained else ranked
        total: Values = of[:, :count].sum(axis=1) if count else np.ones(len(of))
        return total

    with np.errstate(invalid="ignore", divide="ignore"):
        kept = served.sum(axis=1) / chosen.sum(axis=1)
        spread = np.sqrt((served**2).sum(axis=1) / (chosen**2).sum(axis=1))
        trained, rows = divisor(trained_by(score, sizes.trained)), []
        for by in map(divisor, sizes.denominators):
            rows.append([trained / by, kept * trained / by, spread * trained / by, served[:, 0] / by * score.scale])
    mass = taken(each if score.function == "softmax" else scores(logits, "softmax"), experts).sum(axis=1)
    return np.array(rows), mass, kept
