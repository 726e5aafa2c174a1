"""What diagnostic steps wrote (`attempts/N/diagnostics/rankR.jsonl`, `job/samples.py`), all ranks together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moekit.problems import MoekitError
from moekit.watch.experts.norms import LayerNorms, merge, part
from moekit.watch.metrics import attempts
from moekit.watch.rankfile import Tail, parse

MEASURES = ("norms", "flips", "dropped", "shared_over_routed", "zeros", "bias")


@dataclass
class LayerSample:
    """One layer at one step, over the ranks that wrote of it; what was not measured, or not by all, is None."""

    norms: LayerNorms | None = None
    flips: float | None = None
    """The part of the sampled tokens that fp32 gives to another set of experts."""
    dropped: float | None = None
    """The part of the assignments that the capacity drops."""
    shared_over_routed: float | None = None
    """Mean over tokens of the norm of the shared experts' output over that of the routed ones'."""
    zero_routed: int = 0
    """Tokens left out of that, whose routed part is zero."""
    zeros: list[float | None] = field(default_factory=list)
    """The part of each expert's weight gradients that is exactly zero, by expert; empty where it is not known."""
    bias_spread: float | None = None
    """The largest expert bias less the smallest."""
    refused: dict[str, str] = field(default_factory=dict)
    """Measures that were not taken, with the reason."""


@dataclass
class Diagnostics:
    """All diagnostic steps of a run."""

    steps: dict[int, dict[str, LayerSample]] = field(default_factory=dict)
    """By step and layer: `layer_3` from 0 in the whole model, `mtp_layer_0`."""
    skipped: int = 0
    """Lines that are no records."""


def read(run_dir: Path, num_experts: int) -> Diagnostics:
    """All steps; where attempts repeat one, what the later attempt wrote counts."""
    found = Diagnostics()
    records: dict[int, list[dict[str, Any]]] = {}
    for attempt in attempts(run_dir):
        own: dict[int, list[dict[str, Any]]] = {}
        for path in sorted((run_dir / "attempts" / str(attempt) / "diagnostics").glob("rank*.jsonl")):
            for line in Tail(path).lines():
                record = parse(line, "step")
                if record is None or not _is_record(record, num_experts):
                    found.skipped += 1
                else:
                    own.setdefault(record["step"], []).append(record)
        records |= own
    for step, of_step in sorted(records.items()):
        layers: dict[str, list[dict[str, Any]]] = {}
        for record in of_step:
            layers.setdefault(_name(record), []).append(record)
        names = sorted(layers, key=lambda name: (name.startswith("mtp"), int(name.rpartition("_")[2])))
        found.steps[step] = {name: _together(layers[name], num_experts) for name in names}
    return found


def _is_record(record: dict[str, Any], num_experts: int) -> bool:
    experts, layer = record.get("experts"), record.get("layer")
    return (
        record.get("block") in ("decoder", "mtp")
        and type(layer) is int
        and layer >= 0
        and isinstance(experts, list)
        and all(type(expert) is int and 0 <= expert < num_experts for expert in experts)
        and len(set(experts)) == len(experts)
        and all(isinstance(record.get(name, {}), dict) for name in MEASURES)
        and all(_is_measure(record[name], len(experts)) for name in MEASURES if name in record)
    )


def _is_measure(measure: dict[str, Any], experts: int) -> bool:
    """Whether all of it is numbers, lists of a number for each expert, or the reason why there are none."""
    return all(
        isinstance(value, str)
        if key == "refused"
        else len(value) == experts and all(_is_number(one) for one in value)
        if isinstance(value, list)
        else value is None or _is_number(value)
        for key, value in measure.items()
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _name(record: dict[str, Any]) -> str:
    return f"{'mtp_' if record['block'] == 'mtp' else ''}layer_{record['layer']}"


def _together(records: list[dict[str, Any]], num_experts: int) -> LayerSample:
    """What the ranks' records of a layer say together; every measure is of sums, so none is a mean of means."""
    sample = LayerSample()
    for name in MEASURES:
        for record in records:
            if reason := record.get(name, {}).get("refused"):
                sample.refused.setdefault(name, reason)
    sample.flips = _share(records, "flips", "flipped", "tokens")
    sample.dropped = _share(records, "dropped", "dropped", "assignments")
    shared = _of(records, "shared_over_routed", ("tokens", "zero_routed", "sum"))
    sample.zero_routed = int(sum(one["zero_routed"] for one in shared))
    compared = sum(one["tokens"] for one in shared) - sample.zero_routed
    sample.shared_over_routed = sum(one["sum"] for one in shared) / compared if compared > 0 else None
    biases = _of(records, "bias", ("smallest", "largest"))
    sample.bias_spread = biases[0]["largest"] - biases[0]["smallest"] if biases else None
    missing = set(range(num_experts)) - {expert for record in records for expert in record["experts"]}
    if missing:
        sample.refused["norms"] = sample.refused["zeros"] = f"{len(missing)} of {num_experts} experts are not recorded"
        return sample
    if "norms" not in sample.refused:
        sample.norms = _norms(records, num_experts, sample)
    if "zeros" not in sample.refused:
        sample.zeros = _zeros(records, num_experts)
    return sample


def _of(records: Iterable[dict[str, Any]], name: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The measure of those ranks that have all its `keys`."""
    return [record[name] for record in records if all(_is_number(record.get(name, {}).get(key)) for key in keys)]


def _share(records: list[dict[str, Any]], name: str, part_key: str, whole_key: str) -> float | None:
    measures = _of(records, name, (part_key, whole_key))
    whole = sum(one[whole_key] for one in measures)
    return sum(one[part_key] for one in measures) / whole if whole > 0 else None


def _norms(records: list[dict[str, Any]], num_experts: int, sample: LayerSample) -> LayerNorms | None:
    parts = []
    for record in records:
        norms = record.get("norms", {})
        if not isinstance(norms.get("rows"), list) or not isinstance(norms.get("sum_l2"), list):
            sample.refused["norms"] = "a rank did not measure it"
            return None
        try:
            width = int(norms.get("width") or 0)
            parts.append(part(record["experts"], norms["rows"], norms["sum_l2"], width, num_experts))
        except MoekitError as refused:
            sample.refused["norms"] = refused.problems[0].what
            return None
    try:
        return merge(parts)
    except MoekitError as refused:
        sample.refused["norms"] = refused.problems[0].what
        return None


def _zeros(records: list[dict[str, Any]], num_experts: int) -> list[float | None]:
    zeros, elements = [0.0] * num_experts, [0.0] * num_experts
    for record in records:
        for into, key in ((zeros, "zeros"), (elements, "elements")):
            for expert, value in zip(record["experts"], record.get("zeros", {}).get(key) or [], strict=False):
                into[expert] += value
    if not any(elements):
        return []
    return [part / whole if whole > 0 else None for part, whole in zip(zeros, elements, strict=True)]


def as_json(sample: LayerSample) -> dict[str, Any]:
    """A layer's sample as an object."""
    found: dict[str, Any] = {
        "fp32_flips": sample.flips,
        "dropped": sample.dropped,
        "shared_over_routed": finite(sample.shared_over_routed),
        "zero_routed": sample.zero_routed,
        "zero_wgrads": sample.zeros,
        "bias_spread": finite(sample.bias_spread),
        "refused": sample.refused,
    }
    return found if sample.norms is None else {"norms": norms_as_json(sample.norms), **found}


def norms_as_json(norms: LayerNorms) -> dict[str, Any]:
    """A layer's norms as an object; what is not defined is null."""
    high, low = norms.extremes or (None, None)
    return {
        "rows": norms.rows.tolist(),
        "mean": [finite(mean) for mean in norms.mean.tolist()],
        "width": norms.width,
        "median": finite(norms.median),
        "max_over_median": finite(high),
        "min_over_median": finite(low),
        "empty": norms.empty,
        "not_finite": norms.not_finite,
    }


def finite(value: float | None) -> float | None:
    """`value`, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None
