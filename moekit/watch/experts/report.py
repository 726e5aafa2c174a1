"""`moekit experts`: what a run's files say of its experts, as a table, as an object, as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moekit.problems import MoekitError, error
from moekit.watch.experts import bias, diagnostics, dumps
from moekit.watch.experts.bias import Biases
from moekit.watch.experts.diagnostics import Diagnostics, LayerSample
from moekit.watch.experts.dumps import Dump
from moekit.watch.experts.norms import LayerNorms
from moekit.watch.metrics import MetricsReader
from moekit.watch.svg import Panel

_BLOCKS = "▁▂▃▄▅▆▇█"
_LAYERS_DRAWN = 6
"""Lines of a panel: the layers that are farthest off at the end."""


@dataclass(frozen=True)
class Report:
    """A run's experts."""

    name: str
    weights: str
    """Where the routing weights are applied."""
    dump: Dump | None
    """None where there is none, or `no_dump` says why it is not read."""
    no_dump: str
    diagnostics: Diagnostics
    biases: Biases
    """Of the checkpoints that are there; empty without an expert bias."""
    skipped_checkpoints: list[str]

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        steps = self.diagnostics.steps
        found: dict[str, Any] = {"run": self.name, "routing_weights": self.weights, "dump": None}
        if self.dump is not None:
            found["dump"] = {
                "iteration": self.dump.iteration,
                "layers": {name: diagnostics.norms_as_json(norms) for name, norms in self.dump.norms.items()},
                "latent_rms": {
                    name: {key: diagnostics.finite(rms.value) for key, rms in of.items()}
                    for name, of in self.dump.latent.items()
                },
                "refused": self.dump.refused,
                "skipped": self.dump.skipped,
            }
        by_step = {
            str(step): {name: diagnostics.as_json(one) for name, one in layers.items()}
            for step, layers in steps.items()
        }
        found["expert_bias_spread"] = {
            str(step): {name: diagnostics.finite(bias.spread(values)) for name, values in layers.items()}
            for step, layers in self.biases.items()
        }
        found["skipped_checkpoints"] = self.skipped_checkpoints
        return {**found, "no_dump": self.no_dump, "steps": by_step, "skipped_lines": self.diagnostics.skipped}


def report(run_dir: Path, iteration: int | None = None) -> Report:
    """Read a run's newest activation dump, or that of `iteration`, and all its diagnostic steps.

    Raises:
        MoekitError: the run has no experts, or has written neither; or there is no dump of `iteration`.
    """
    reader = MetricsReader(run_dir)
    reader.poll()
    args = reader.config
    there = dumps.iterations(run_dir)
    if iteration is not None and iteration not in there:
        known = ", ".join(map(str, there[-5:])) or "none"
        raise error(f"there is no activation dump of iteration {iteration}", f"the newest are: {known}")
    if args and not args.get("num_experts"):
        raise error(f"`{run_dir.name}` is dense: it has no experts")
    steps = diagnostics.read(run_dir, int(args.get("num_experts") or 0))
    if not args:
        raise error(f"`{run_dir.name}` has not logged Megatron's arguments yet, which say how its experts are laid out")
    biased = bool(args.get("moe_router_enable_expert_bias"))
    biases, skipped = bias.read(run_dir / "checkpoints", int(args["num_experts"])) if biased else ({}, [])
    if not there and not steps.steps and not biases:
        raise error(
            f"`{run_dir.name}` has written nothing of its experts",
            "`monitor.diagnose_interval` and `monitor.activations_interval` of the recipe ask for it",
        )
    dump, no_dump = None, "" if there else "the run has no activation dumps"
    if there:
        try:
            dump = dumps.read(run_dir, iteration if iteration is not None else there[-1], dumps.Shape.of(args))
        except MoekitError as refused:
            no_dump = f"activation dumps are not read: {refused.problems[0].what}"
    return Report(run_dir.name, dumps.weights_in(args), dump, no_dump, steps, biases, skipped)


def lines(report: Report, width: int) -> Iterator[str]:
    """The report as text, in about `width` columns."""
    yield f"experts of {report.name}"
    yield f"  {report.weights}"
    if report.dump is not None:
        yield ""
        yield f"  activation dump of iteration {report.dump.iteration}: the last micro batch of one replica"
        yield from _norm_rows(report.dump.norms, width)
        yield from _latent_rows(report.dump)
        yield from (f"  {name}: no norms, {reason}" for name, reason in report.dump.refused.items())
        yield from (f"  skipped: {reason}" for reason in report.dump.skipped)
    elif report.no_dump:
        yield f"  {report.no_dump}"
    if report.diagnostics.steps:
        step = max(report.diagnostics.steps)
        layers = report.diagnostics.steps[step]
        yield ""
        yield f"  diagnostic step {step}, of {len(report.diagnostics.steps)}: the first micro batch of all ranks"
        yield from _norm_rows({name: one.norms for name, one in layers.items() if one.norms is not None}, width)
        yield from _sample_rows(layers)
    yield from _bias_rows(report.biases)
    yield from (f"  skipped: {reason}" for reason in report.skipped_checkpoints)
    if report.diagnostics.skipped:
        yield f"  {report.diagnostics.skipped} lines of diagnostics could not be read"


def _norm_rows(layers: Mapping[str, LayerNorms], width: int) -> Iterator[str]:
    """A row a layer: norms over the median, and a block an expert."""
    if not layers:
        return
    longest = max(12, *map(len, layers))
    head = f"  {'output norms':<{longest}} {'median':>9}  {'largest':>16}  {'smallest':>16} {'empty':>6}  "
    yield f"{head}▁ an eighth of the median or less, ▄ it, █ 8 times it"
    for name, norms in layers.items():
        row = f"  {name:<{longest}} {_figure(norms.median):>9}  "
        ratios = norms.over_median
        if ratios is None:
            why = f"not finite: experts {norms.not_finite[:8]}" if norms.not_finite else "the median is zero"
            yield f"{row}{why if len(norms.empty) < len(norms.rows) else 'no expert received anything'}"
            continue
        ends = [
            f"{_figure(ratios[at]):>6} expert {at:<3}" for at in (int(np.nanargmax(ratios)), int(np.nanargmin(ratios)))
        ]
        yield f"{row}{ends[0]:>16}  {ends[1]:>16} {len(norms.empty):>6}  {strip(ratios, max(8, width - len(head)))}"


def strip(ratios: NDArray[np.float64], width: int) -> str:
    """A block for each expert's norm over the median, `·` where it received nothing.

    Three octaves each way; of neighbours that share a block, the one that is farthest off shows.
    """
    together = -(-len(ratios) // width)
    groups = [ratios[i : i + together] for i in range(0, len(ratios), together)]
    return "".join(_block(group[np.isfinite(group)]) for group in groups)


def _block(ratios: NDArray[np.float64]) -> str:
    if not len(ratios):
        return "·"
    octaves = np.log2(np.maximum(ratios, 2.0**-60))
    farthest = float(octaves[np.argmax(np.abs(octaves))])
    return _BLOCKS[min(7, max(0, round(3 + farthest * (4 if farthest > 0 else 3) / 3)))]


def _latent_rows(dump: Dump) -> Iterator[str]:
    """The RMS around the latent projections; it compares across widths (handbook 3.4)."""
    for name, of in dump.latent.items():
        yield f"  {name}: RMS " + ", ".join(f"{key} {_figure(rms.value)}" for key, rms in of.items())


def _bias_rows(biases: Biases) -> Iterator[str]:
    """A row a checkpoint: the layer whose expert biases are farthest apart."""
    if not biases:
        return
    yield ""
    yield "  expert bias in the checkpoints: the largest less the smallest of a layer"
    for step, layers in biases.items():
        spreads = {name: bias.spread(values) for name, values in layers.items()}
        widest = max(spreads, key=lambda name: spreads[name])
        median = float(np.median(list(spreads.values())))
        yield f"  step {step:>9,}: {_figure(spreads[widest])} in {widest}, median of the layers {_figure(median)}"


def _sample_rows(layers: Mapping[str, LayerSample]) -> Iterator[str]:
    """A row a layer of all else that was measured; `-` where it was not. Reasons come once, below."""
    longest = max(12, *map(len, layers))
    names = ("fp32 flips", "dropped", "shared/routed", "zero gradients", "bias spread")
    yield f"  {'':<{longest}} " + "  ".join(f"{name:>14}" for name in names)
    for name, one in layers.items():
        known = [share for share in one.zeros if share is not None]
        zeros = f"{max(known):.2%}, {one.zeros.index(max(known))}" if known else "-"
        cells = (_share(one.flips), _share(one.dropped), _figure(one.shared_over_routed), zeros)
        row = [*cells, _figure(one.bias_spread)]
        yield f"  {name:<{longest}} " + "  ".join(f"{cell:>14}" for cell in row)
    reasons = {(measure, why) for one in layers.values() for measure, why in one.refused.items()}
    yield from (f"  {measure.replace('_', ' ')}: not measured, {why}" for measure, why in sorted(reasons))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def panels(report: Report) -> list[Panel]:
    """Curves over the diagnostic steps, of the layers that are farthest off at the end."""
    steps = report.diagnostics.steps

    def of(get: Any, biggest: bool = True) -> dict[str, list[tuple[float, float]]]:
        curves: dict[str, list[tuple[float, float]]] = {}
        for step, layers in steps.items():
            for name, sample in layers.items():
                if (value := get(sample)) is not None:
                    curves.setdefault(name.replace("_", " "), []).append((float(step), float(value)))
        worst = sorted(curves, key=lambda name: curves[name][-1][1], reverse=biggest)[:_LAYERS_DRAWN]
        return {name: curves[name] for name in worst}

    def extreme(which: int) -> Any:
        return lambda one: one.norms.extremes[which] if one.norms and one.norms.extremes else None

    return [
        Panel("largest expert output norm over the median", of(extreme(0))),
        Panel("smallest expert output norm over the median", of(extreme(1), biggest=False)),
        Panel("tokens that fp32 routes otherwise, a part", of(lambda one: one.flips)),
        Panel("dropped assignments, a part", of(lambda one: one.dropped)),
        Panel("shared over routed, mean of the ratio of norms", of(lambda one: one.shared_over_routed)),
        Panel("zeros in the expert with most, a part", of(lambda one: max((z or 0 for z in one.zeros), default=None))),
        Panel("largest less smallest expert bias", of(lambda one: one.bias_spread)),
    ]
