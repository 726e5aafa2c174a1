"""How far a trainer and the engine that wrote its rollouts disagree, token by token (handbook 4, on routing in RL).

A file has what both gave the same tokens, under the names of Megatron's RL loop (megatron/rl/rl_utils.py:508): natural
logarithms of probabilities, `old_logprobs` of the trainer and `inference_logprobs` of the engine, `mask` where not all
tokens count; and what experts both chose, `routing_indices` of the engine, as Megatron's engine returns them, and
`trainer_indices` `# (token, layer, choice)`. It is either JSON Lines, a sequence a line, or numpy's `.npz` with all.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moekit.problems import error
from moekit.watch.router.loads import differing

RATIOS = (1.1, 2.0, 10.0)
"""moekit's thresholds: tokens are counted whose probabilities are so many times apart, either way."""
NAMES = ("old_logprobs", "inference_logprobs", "mask", "routing_indices", "trainer_indices")
NOT_JSON = "not JSON"
FOREIGN = "neither log probabilities nor choices of both"
CONTRADICTION = "both sides are not as long"
_LONGEST_BYTES = 1 << 27
_WHOLE_BYTES = 1 << 32
_POSITIVE = 1e-3
"""What rounding may make of the logarithm of 1."""

Values = NDArray[np.float64]


class _Unfit(Exception):
    """A sequence that cannot be used, with the reason."""


@dataclass
class Mismatch:
    """All tokens of a file, added up; what no token says is NaN."""

    sequences: int = 0
    """Lines, or files."""
    tokens: int = 0
    masked: int = 0
    not_finite: int = 0
    """Tokens without a finite log probability on a side; they are left out."""
    difference: float = 0.0
    """Sum of the absolute differences of probabilities; below, the least and the most."""
    differences: tuple[float, float] = (math.inf, -math.inf)
    ratio: float = 0.0
    """Sum of the trainer's probability over the engine's; below, the least and the most."""
    ratios: tuple[float, float] = (math.inf, -math.inf)
    surprise: float = 0.0
    """Sum of log(engine / trainer), whose mean over tokens that the engine drew is the KL divergence, with noise."""
    divergence: float = 0.0
    """Sum of ratio - 1 - log(ratio): of the same mean, with less noise, and never below 0."""
    beyond: list[int] = field(default_factory=lambda: [0] * len(RATIOS))
    """Tokens beyond each of `RATIOS`."""
    choices: int = 0
    """Of the router: one a token and layer."""
    other_choices: int = 0
    """Whose set of experts is another."""
    routed: int = 0
    """Tokens whose choices are there on both sides."""
    touched: int = 0
    """Those with another set of experts in any layer."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Lines that were passed over, by reason."""

    def add_probabilities(self, old: Values, inference: Values, mask: NDArray[np.bool_]) -> None:
        """Take in tokens `# (token,)`: log probabilities of trainer and engine, and which count."""
        there = np.isfinite(old) & np.isfinite(inference)
        self.masked += int((~mask).sum())
        self.not_finite += int((mask & ~there).sum())
        old, inference = old[mask & there], inference[mask & there]
        if not len(old):
            return
        apart = old - inference
        with np.errstate(over="ignore"):
            ratio = np.exp(apart)
        difference = np.abs(np.exp(old) - np.exp(inference))
        self.tokens += len(old)
        self.difference += float(difference.sum())
        self.differences = _wider(self.differences, difference)
        self.ratio += float(ratio.sum())
        self.ratios = _wider(self.ratios, ratio)
        self.surprise -= float(apart.sum())
        self.divergence += float((ratio - 1 - apart).sum())
        self.beyond = [n + int((np.abs(apart) > math.log(r)).sum()) for n, r in zip(self.beyond, RATIOS, strict=True)]

    def add_choices(self, engine: NDArray[np.int64], trainer: NDArray[np.int64]) -> None:
        """Take in choices `# (token, layer, choice)` of both; rows below 0 are no tokens."""
        there = (engine >= 0).all(axis=(1, 2)) & (trainer >= 0).all(axis=(1, 2))
        differ = differing(engine[there], trainer[there])
        self.routed += len(differ)
        self.choices += differ.size
        self.other_choices += int(differ.sum())
        self.touched += int(differ.any(axis=-1).sum())

    @property
    def numbers(self) -> dict[str, float]:
        """By Megatron's names where it has some."""
        return {
            "mean_inf_train_prob_abs_diff": _part(self.difference, self.tokens),
            **dict(zip(("min_inf_train_prob_abs_diff", "max_inf_train_prob_abs_diff"), self.differences, strict=True)),
            "mean_piold_to_inf_prob": _part(self.ratio, self.tokens),
            **dict(zip(("min_piold_to_inf_prob", "max_piold_to_inf_prob"), self.ratios, strict=True)),
            **{"kl": _part(self.divergence, self.tokens), "kl_plain": _part(self.surprise, self.tokens)},
            "other_choices": _part(self.other_choices, self.choices),
            "tokens_with_other_choices": _part(self.touched, self.routed),
        }

    def as_json(self) -> dict[str, Any]:
        """All of it, by Megatron's names where it has some; what is not defined is null."""
        counts = {name: getattr(self, name) for name in ("sequences", "tokens", "masked", "not_finite", "routed")}
        beyond = {f"{ratio:g}": count for ratio, count in zip(RATIOS, self.beyond, strict=True)}
        finite = {name: value if math.isfinite(value) else None for name, value in self.numbers.items()}
        return {**counts, **finite, "tokens_beyond_ratio": beyond, "skipped": dict(self.skipped)}


def _part(part: float, whole: int) -> float:
    return part / whole if whole else math.nan


def _wider(ends: tuple[float, float], values: Values) -> tuple[float, float]:
    return min(ends[0], float(values.min())), max(ends[1], float(values.max()))


def lines(found: Mismatch, name: str) -> Iterator[str]:
    """The report, a line at a time."""
    of = found.numbers
    shown = {name: "-" if math.isnan(value) else f"{value:.3g}" for name, value in of.items()}
    yield f"{name}: {found.sequences:,} sequences"
    if found.tokens:
        yield f"probability of {found.tokens:,} tokens, trainer's against engine's"
        most = shown["max_inf_train_prob_abs_diff"]
        yield f"  difference       mean {shown['mean_inf_train_prob_abs_diff']}, most {most}"
        ends = f"least {shown['min_piold_to_inf_prob']}, most {shown['max_piold_to_inf_prob']}"
        yield f"  trainer/engine   mean {shown['mean_piold_to_inf_prob']}, {ends}"
        yield f"  KL divergence    {shown['kl']} of the engine from the trainer; plain mean {shown['kl_plain']}"
        shares = (f"{n / found.tokens:.2%} beyond {r:g}" for r, n in zip(RATIOS, found.beyond, strict=True))
        yield f"  times apart      {', '.join(shares)}"
    if found.routed:
        yield f"choices of {found.routed:,} tokens, {found.choices // found.routed} layers each"
        yield f"  {of['other_choices']:.1%} of choices, one a token and layer, are of other experts"
        yield f"  {of['tokens_with_other_choices']:.1%} of tokens have other experts in at least one layer"
    if found.masked:
        yield f"  {found.masked:,} tokens are masked, and left out"
    if found.not_finite:
        yield f"  {found.not_finite:,} tokens have no finite log probability on a side, and are left out"
    for reason, times in sorted(found.skipped.items()):
        yield f"  {times:,} lines were passed over: {reason}"


def read(path: Path) -> Mismatch:
    """All of a file, line by line where it has lines.

    Raises:
        MoekitError: it cannot be read, or there is nothing in it that both sides say.
    """
    found = Mismatch()
    try:
        for sequence in _arrays(path) if zipfile.is_zipfile(path) else _lines(path, found.skipped):
            try:
                _take_in(found, sequence)
            except _Unfit as reason:
                found.skipped[str(reason)] += 1
    except OSError as failure:
        raise error(f"cannot read `{path}`: {str(failure.strerror or failure).lower()}") from None
    if not found.tokens and not found.routed:
        why = ", ".join(f"{times} times {reason}" for reason, times in found.skipped.items()) or "it is empty"
        raise error(
            f"nothing in `{path}` is of both trainer and engine: {why}",
            "it needs `old_logprobs` and `inference_logprobs` of the same tokens, or the choices of both",
        )
    return found


def _lines(path: Path, skipped: Counter[str]) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_BYTES):
            try:
                record = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError):
                skipped[NOT_JSON] += 1
                continue
            if isinstance(record, dict):
                yield record
            elif line.strip():
                skipped[FOREIGN] += 1


def _arrays(path: Path) -> Iterator[Mapping[str, Any]]:
    """The arrays of an `.npz`; nothing that is pickled in one is run."""
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > _WHOLE_BYTES:
            raise error(f"`{path}` has more than 4 GiB of arrays", "write JSON Lines, which are read one by one")
    try:
        with np.load(path, allow_pickle=False) as file:
            yield {name: file[name] for name in NAMES if name in file.files}
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError, NotImplementedError, MemoryError) as failure:
        raise error(f"`{path}` cannot be read as arrays: {type(failure).__name__.lower()}") from None


def _take_in(found: Mismatch, sequence: Mapping[str, Any]) -> None:
    """Raises `_Unfit` where the sequence is not what it should be."""
    probabilities = [sequence.get(name) for name in ("old_logprobs", "inference_logprobs")]
    indices = [sequence.get(name) for name in ("routing_indices", "trainer_indices")]
    if any((a is None) != (b is None) for a, b in (probabilities, indices)) or (
        probabilities[0] is None and indices[0] is None
    ):
        raise _Unfit(FOREIGN)
    routed = None if indices[0] is None else _choices(*indices)
    if probabilities[0] is not None:
        old, inference = (_numbers(side, "fiu").astype(np.float64).ravel() for side in probabilities)
        mask = sequence.get("mask")
        counted = np.ones(len(old), np.bool_) if mask is None else _numbers(mask, "fiub").ravel() != 0
        if not len(old) == len(inference) == len(counted):
            raise _Unfit(CONTRADICTION)
        if (old > _POSITIVE).any() or (inference > _POSITIVE).any():
            raise _Unfit("log probabilities above 0")
        found.add_probabilities(old, inference, counted)
    if routed is not None:
        found.add_choices(*routed)
    found.sequences += 1


def _choices(engine: Any, trainer: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of both sides `# (token, layer, choice)`; more axes ahead of these are of tokens too."""
    one, other = _numbers(engine, "iu"), _numbers(trainer, "iu")
    if one.ndim < 3 or one.shape != other.shape or not one.size:
        raise _Unfit(CONTRADICTION)
    flat = (-1, *one.shape[-2:])
    return one.astype(np.int64).reshape(flat), other.astype(np.int64).reshape(flat)


def _numbers(value: Any, kinds: str) -> NDArray[Any]:
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError):  # ragged, or larger than any number
        raise _Unfit(FOREIGN) from None
    if found.dtype.kind not in kinds or not found.ndim:
        raise _Unfit(FOREIGN)
    return found
