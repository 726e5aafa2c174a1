"""What `moekit router` says of every call in the newest routing trace of a run: weights, a smaller k, traffic."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moekit.launch.rundir import RunDir
from moekit.problems import error
from moekit.watch.metrics import attempts
from moekit.watch.router.grid import Grid, Layer, attempt_args
from moekit.watch.router.logits import trace_paths
from moekit.watch.router.serving import Serving, serving_of
from moekit.watch.router.traffic import Traffic, traffic_of
from moekit.watch.router.weights import NAMES, Weights, weights_of

_HEADINGS = ("max(w)", "max(q)", "entropy", "Max1/Max2", "rms(q)", "rms(w)", "mass")
_POLICIES = {"expert": "a copy for each expert", "node": "a copy for each node", "": "a copy for each rank"}


@dataclass(frozen=True)
class TraceReport:
    """Of one attempt's trace; what was not asked for is None."""

    attempt: int
    weights: Weights | None
    traffic: Traffic | None
    serving: Serving | None = None

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        found: dict[str, Any] = {"traced_attempt": self.attempt}
        if self.weights:
            found["weights"] = {
                "score": self.weights.score._asdict(),
                "approximate": self.weights.approximate,
                "layers": {layer.name: one.as_json() for layer, one in self.weights.layers.items()},
                "skipped": dict(self.weights.skipped),
            }
        if self.traffic:
            found["traffic"] = self.traffic.as_json()
        if self.serving:
            found["serving"] = self.serving.as_json()
        return found


def trace_report(
    run: RunDir, *, weights: bool = False, traffic: bool = False, served: int | None = None, only: str | None = None
) -> TraceReport:
    """Read the trace of the newest attempt that has one; `served` is a smaller k, `only` names one layer.

    Raises:
        MoekitError: there is none, or what is asked for cannot be made of it.
    """
    args = attempt_args(run)
    for attempt in reversed(attempts(run.path)):
        folder, grid = run.attempt(attempt).routing, Grid.from_args(args[attempt])
        if any(path.stat().st_size for paths in trace_paths(folder, grid).values() for path in paths):
            break
    else:
        raise error(
            f"run `{run.path.name}` has no routing trace, which weights and traffic are made from",
            "set `monitor.routing_trace` and collect a short one (handbook A.1)",
        )
    found = TraceReport(
        attempt,
        weights_of(folder, grid) if weights else None,
        traffic_of(folder, grid, ranks_per_node(run, grid)) if traffic else None,
        serving_of(folder, grid, served) if served is not None else None,
    )
    for part in (found.weights, found.traffic, found.serving):
        if part and only is not None:
            _keep(part.layers, only)
    return found


def _keep(layers: dict[Layer, Any], only: str) -> None:
    for layer in [layer for layer in layers if layer.name != only]:
        del layers[layer]


def ranks_per_node(run: RunDir, grid: Grid) -> int:
    """Of a run on Slurm what its launch has put down (`retry.json`); a run on this machine is on one node."""
    try:
        said = json.loads((run.path / "retry.json").read_text(encoding="utf-8")).get("ranks_per_node")
    except (OSError, ValueError, AttributeError):
        said = None
    return said if type(said) is int and said > 0 else grid.pipeline * grid.stage_ranks


def lines(report: TraceReport) -> Iterator[str]:
    """The report, a line at a time."""
    if report.weights:
        yield ""
        yield from _weights(report.weights, report.attempt)
    if report.serving:
        yield ""
        yield from _serving(report.serving, report.attempt)
    if report.traffic:
        yield ""
        yield from _traffic(report.traffic, report.attempt)


def _weights(found: Weights, attempt: int) -> Iterator[str]:
    score = found.score
    how = f"{score.function} over {'all' if score.all_experts else 'the chosen'} experts"
    if score.function != "softmax":
        how = f"{score.function} of the chosen experts"
    scaled = f", scaled by {score.scale:g}" if score.scale != 1 else ""
    yield f"weights, from all calls in the trace of attempt {attempt}, without the expert bias:"
    yield f"  {how}{scaled}"
    yield f"  approximate: {found.approximate}"
    yield "  means over tokens (Max1/Max2: geometric); q = w / sum(w), rms(x) = √Σx²"
    rows = [
        (
            layer.name,
            *(_number(one.spread(name).mean) for name in NAMES),
            *(f"{count / one.tokens:.0%}" if one.tokens and one.topk > 1 else "-" for count in (one.flat, one.sharp)),
        )
        for layer, one in found.layers.items()
    ]
    yield from _table(("layer", *_HEADINGS, "flat", "sharp"), rows)
    for layer, one in found.layers.items():
        if one.verdict:
            yield f"  {layer.name}: {one.verdict}"
        if one.not_finite:
            yield f"  {layer.name}: {one.not_finite:,} tokens with logits that are no numbers are left out"
    yield from _skipped(found.skipped)


def _serving(found: Serving, attempt: int) -> Iterator[str]:
    sizes = found.sizes
    names = [f"top {by}" if by else "none" for by in sizes.denominators]
    yield f"served with {sizes.served} of {sizes.trained} experts, from all calls in the trace of attempt {attempt}"
    yield from (f"  approximate: {why}" for why in found.approximate)
    yield "  weight: a served expert's over its trained one; sum: a token's weights over"
    yield "  the trained sum; each by what scores are divided by, means over tokens. mass:"
    yield "  of the trained among all experts; kept: of it, by the served. Megatron itself"
    yield f"  divides by: {names[sizes.denominators.index(found.megatron)]}"
    rows = []
    for layer, one in found.layers.items():
        tokens = one.tokens or math.nan
        values = one.mass / tokens, one.kept / tokens, *one.means.T[:2].ravel()  # weight, then sum
        rows.append((layer.name, *(_number(float(value)) for value in values)))
    blank = [""] * (len(names) - 1)
    head = ("layer", "mass", "kept", *names, *names)
    yield from _table(("", "", "", "weight", *blank, "sum", *blank), [head, *rows])
    for layer, one in found.layers.items():
        if one.not_finite:
            yield f"  {layer.name}: {one.not_finite:,} tokens without weights are left out"
    yield from _skipped(found.skipped)


def _traffic(found: Traffic, attempt: int) -> Iterator[str]:
    ranks = f"{found.gpus_per_node} rank{'s' * (found.gpus_per_node > 1)}"
    yield f"traffic of a forward dispatch, from all calls in the trace of attempt {attempt}"
    yield f"  nodes of {ranks}, copies of {found.copies.size:,} bytes; the run's dispatcher,"
    yield f"  {found.copies.dispatcher}, sends {_POLICIES[found.copies.policy]}"
    yield "  nodes that hold a token's experts, those but its own, bytes it sends there"
    rows = [
        (
            layer.name,
            *(_number(one.mean_nodes), str(one.most_nodes)),
            *(_number(one.mean_remote_nodes), str(one.most_remote_nodes)),
            *(f"{found.remote_bytes(one, policy):,.0f}" for policy in ("expert", "node")),
        )
        for layer, one in found.layers.items()
    ]
    yield from _table(("layer", "nodes", "most", "remote", "most", "B, per expert", "B, per node"), rows)
    yield from _skipped(found.skipped)


def _skipped(skipped: Counter[str]) -> Iterator[str]:
    for reason, times in sorted(skipped.items()):
        yield f"  {times:,} records were passed over: {reason}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}" if value >= 100 else f"{value:.2f}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        first, *others = (
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join([first, *others])}".rstrip()
