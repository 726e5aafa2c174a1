"""The weights that experts' outputs are multiplied with, made again from the logits beside a routing trace (A.1).

The tracer's hook computes the logits anew and keeps them as bfloat16 (`logits.py`), so everything here is
approximate: close experts may tie, and a gate of eight bits is read to about a hundredth. The score function, the
scaling factor and pre-softmax are the run's own; the expert bias decides who is chosen and is in no weight
(megatron/core/transformer/moe/moe_utils.py:847, `topk_routing_with_score_function`). Groups and hash tables decide who
is chosen too, and quantile balancing does: the trace has the choice.

With w the weights of a token and q = w / sum(w). All values are of single tokens; a layer's are their means.
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

Values = NDArray[np.float64]

FLAT_RATIO = 1.05
FLAT_SHARE = 1.25
SHARP_SHARE = 0.95
MOST_TOKENS = 0.5
"""The handbook has no numbers, so these are moekit's: a token's gate is flat where Max1/Max2 is at most `FLAT_RATIO`
and max(q) at most `FLAT_SHARE` / top-k, too sharp where max(q) is at least `SHARP_SHARE`; a layer is where that is so
of `MOST_TOKENS` of its tokens or more."""

FLAT = "flat gate, as new ones are: averages its top-k experts (HB 614, 3568)"
SHARP = "too sharp: one expert has nearly all the weight (HB 590, 594)"
NAMES = ("largest", "share", "entropy", "ratio", "rms", "output_rms", "mass")


class Score(NamedTuple):
    """How a run makes weights of logits."""

    function: str
    """`softmax`, `sigmoid` or `sqrtsoftplus`."""
    all_experts: bool = False
    """Softmax over all experts and not over the chosen ones (`--moe-router-pre-softmax`)."""
    renormalized: bool = True
    """Whether the chosen scores of another function are made to add up to 1, where there are several."""
    scale: float = 1.0


def score_of(args: Mapping[str, Any]) -> Score:
    """From Megatron's arguments.

    Raises:
        MoekitError: the run routes by something else than its logits, or by a score function that is not known.
    """
    for name in ("moe_router_force_load_balancing", "moe_router_force_biased"):
        if args.get(name) not in (None, False):
            raise error(f"weights cannot be made again: `--{name.replace('_', '-')}` routes by other logits")
    balancing = args.get("moe_router_load_balancing_type")
    if balancing == "sinkhorn" or balancing == ["sinkhorn"]:  # scores of all experts, neither scaled nor renormalized
        return Score("softmax", all_experts=True) if args.get("moe_router_topk") != 1 else Score("sigmoid")
    function = str(args.get("moe_router_score_function") or "softmax")
    if function not in ("softmax", "sigmoid", "sqrtsoftplus"):
        raise error(f"weights cannot be made again: the score function `{function}` is not known")
    scale = float(args.get("moe_router_topk_scaling_factor") or 1.0)
    return Score(function, function == "softmax" and bool(args.get("moe_router_pre_softmax")), scale=scale)


def scores(logits: NDArray[Any], function: str) -> Values:
    """Scores before anything is divided; of softmax, probabilities among those given. `# (token, expert)` both"""
    wide = logits.astype(np.float64)
    if function == "softmax":
        powers = np.exp(wide - wide.max(axis=1, keepdims=True))
        found: Values = powers / powers.sum(axis=1, keepdims=True)
        return found
    with np.errstate(over="ignore"):
        found = 1 / (1 + np.exp(-wide)) if function == "sigmoid" else np.sqrt(np.logaddexp(0, wide))
    return found


def taken(values: NDArray[Any], experts: NDArray[Any]) -> NDArray[Any]:
    """The chosen experts' values. `# (token, expert), (token, choice) -> (token, choice)`"""
    return np.take_along_axis(values, experts.astype(np.intp), axis=1)


def weights(logits: NDArray[Any], experts: NDArray[Any], score: Score) -> Values:
    """The weights of the chosen experts. `# (token, expert), (token, choice) -> (token, choice)`"""
    if score.all_experts:
        found: Values = taken(scores(logits, score.function), experts)
    else:
        found = scores(taken(logits, experts), score.function)
    if score.function != "softmax" and score.renormalized and experts.shape[1] > 1:
        found = found / (found.sum(axis=1, keepdims=True) + 1e-20)
    return found * score.scale


def token_values(found: Values, score: Score) -> dict[str, Values]:
    """Each token's values `# (token,)` by name, of weights `# (token, choice)`; NaN where one is undefined.

    largest: max(w). share: max(q), to compare runs of different scale. entropy: -sum(q log q), 0 to log(k). ratio:
    Max1/Max2, undefined at top-1, infinite where the second is 0. rms: sqrt(sum(q q)), the mixture's RMS over one
    expert's if experts are as large and uncorrelated. output_rms: the same of w. mass: the chosen experts' probability
    before scaling, of softmax over all experts alone.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        total = found.sum(axis=1, keepdims=True)
        q = found / total
        ordered = np.sort(found, axis=1)
        nothing = np.full(len(found), np.nan)
        return {
            "largest": ordered[:, -1],
            "share": q.max(axis=1),
            "entropy": -np.where(q > 0, q * np.log(q), q).sum(axis=1) + 0.0,  # of q = 0 the limit, 0, NaN of NaN
            "ratio": ordered[:, -1] / ordered[:, -2] if found.shape[1] > 1 else nothing,
            "rms": np.sqrt((q * q).sum(axis=1)),
            "output_rms": np.sqrt((found * found).sum(axis=1)),
            "mass": total[:, 0] / score.scale if score.all_experts else nothing,
        }


class Spread(NamedTuple):
    """Of one value over the tokens of a layer where it is defined and finite; NaN where it is of none."""

    mean: float
    """The geometric one of Max1/Max2, which a few tokens would decide otherwise."""
    least: float
    most: float
    tokens: int


@dataclass
class LayerWeights:
    """One layer's tokens, added up."""

    tokens: int = 0
    not_finite: int = 0
    """Left out: their logits hold NaN or infinity."""
    flat: int = 0
    sharp: int = 0
    topk: int = 0
    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    _totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    _least: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, float("inf")))
    _most: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, float("-inf")))

    def add(self, values: Mapping[str, Values], topk: int) -> None:
        """Take in the tokens of a call."""
        self.topk = max(self.topk, topk)
        self.tokens += len(values["share"])
        if topk > 1:
            flat = (values["ratio"] <= FLAT_RATIO) & (values["share"] <= FLAT_SHARE / topk)
            self.flat += int(flat.sum())
            self.sharp += int((values["share"] >= SHARP_SHARE).sum())
        for name, each in values.items():
            if len(finite := each[np.isfinite(each)]):
                self._counts[name] += len(finite)
                self._totals[name] += float((np.log(finite) if name == "ratio" else finite).sum())
                self._least[name] = min(self._least[name], float(finite.min()))
                self._most[name] = max(self._most[name], float(finite.max()))

    def merge(self, other: LayerWeights) -> None:
        """Take in what another process has added up."""
        self.topk = max(self.topk, other.topk)
        for name in ("tokens", "not_finite", "flat", "sharp"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in NAMES:
            self._counts[name] += other._counts[name]
            self._totals[name] += other._totals[name]
            self._least[name] = min(self._least[name], other._least[name])
            self._most[name] = max(self._most[name], other._most[name])

    def spread(self, name: str) -> Spread:
        """Of one of `NAMES`."""
        if not (count := self._counts[name]):
            return Spread(*(float("nan"),) * 3, 0)
        mean = self._totals[name] / count
        return Spread(float(np.exp(mean)) if name == "ratio" else mean, self._least[name], self._most[name], count)

    @property
    def verdict(self) -> str:
        """`FLAT`, `SHARP`, or empty: neither, or top-1, where the one weight says nothing of the gate."""
        if self.topk < 2 or not self.tokens:
            return ""
        if self.flat >= MOST_TOKENS * self.tokens:
            return FLAT
        return SHARP if self.sharp >= MOST_TOKENS * self.tokens else ""

    def as_json(self) -> dict[str, Any]:
        """All of it; what is undefined is null."""
        spreads = {name: self.spread(name) for name in NAMES}
        return {
            **{name: spread._asdict() if spread.tokens else None for name, spread in spreads.items()},
            **{"tokens": self.tokens, "tokens_not_finite": self.not_finite},
            **{"flat_tokens": self.flat, "sharp_tokens": self.sharp, "verdict": self.verdict},
        }


@dataclass
class Weights:
    """Of a trace."""

    score: Score
    approximate: str
    """Why the weights are no more than approximate."""
    layers: dict[Layer, LayerWeights] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    """Lines that were passed over, by reason."""


def weights_of(folder: Path, grid: Grid, workers: int | None = None) -> Weights:
    """The weights of all calls in a trace's folder (`attempts/N/routing`), by layer.

    Raises:
        MoekitError: there is no logit in it, or no weight can be made of them (`score_of`).
    """
    score = score_of(grid.args)
    found = Weights(score, approximate(grid.args))
    found.layers = by_layer(folder, grid, partial(_of_tokens, score=score), found.skipped, workers)
    return found


def approximate(args: Mapping[str, Any]) -> str:
    """Why what is made of a trace's logits is no more than approximate."""
    jitter = ", without the input's jitter" if args.get("moe_input_jitter_eps") else ""
    return "logits computed anew by the trace's hook and kept as bf16" + jitter


def _of_tokens(logits: NDArray[Any], experts: NDArray[Any], score: Score) -> LayerWeights:
    found = LayerWeights()
    found.add(token_values(weights(logits, experts, score), score), experts.shape[1])
    return found
