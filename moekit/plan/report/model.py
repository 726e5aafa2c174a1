"""A model as text for a terminal: parameters, operations, serving, upcycling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from moekit.plan.layout import Stage
from moekit.plan.parameters import depth_weights, layer_weights
from moekit.plan.plan import Plan
from moekit.plan.report.table import table
from moekit.plan.serving import H800, least_activated_share
from moekit.plan.shape import Shape
from moekit.plan.upcycling import Choice


def certainties(plan: Plan) -> dict[str, str]:
    """By number: what an assumption touches is assumed, the rest exact."""
    layers = "assumed" if plan.model_is_assumed else "exact"
    touched = "assumed" if plan.vocabulary_is_assumed else layers
    return {
        "total": touched,
        "experts": "exact",
        "active": touched,
        "active_without_input": touched,
        "active_without_embeddings": layers,
        "prediction": layers,
        "flops_per_token": touched,
    }


def bound(shape: Shape) -> float:
    """Step-3's least share of activated experts at this width and depth, on H800."""
    return least_activated_share(shape.hidden, _blocks(shape))


def _blocks(shape: Shape) -> int:
    """Layers as a transformer counts them: of a hybrid stack, those with experts or a dense network."""
    return len(shape.layers) if shape.stack == "gpt" else shape.part_count("E") + shape.part_count("-")


def model_lines(plan: Plan) -> Iterator[str]:
    """The model, its parameters and operations."""
    yield f"{plan.name}: {_model(plan.shape)}"
    yield ""
    yield from _parameter_lines(plan)
    yield ""
    yield from _gpu_lines(plan)
    yield ""
    yield from _flop_lines(plan)
    if plan.shape.experts:
        yield from _serving_lines(plan.shape)


def note_lines(plan: Plan) -> Iterator[str]:
    """What the recipe does not say, and who does."""
    yield "not said by the recipe"
    yield from (f"  {note.certainty:8} {note.name} = {note.value}: {note.why}" for note in plan.notes)


def _model(shape: Shape) -> str:
    layers, of = len(shape.layers), shape.experts
    experts = f", {of.number} experts, top-{of.topk}, in {shape.part_count('E')} of them" if of else ""
    depths = f", {shape.depths} prediction depth{'s' * (shape.depths > 1)}" if shape.depths else ""
    return f"{layers} layers of width {shape.hidden:,}{experts}{depths}; {shape.vocabulary:,} token ids"


def _parameter_lines(plan: Plan) -> Iterator[str]:
    counted, sure = plan.parameters, certainties(plan)
    rows = [("total", counted.total, sure["total"])]
    if plan.shape.experts:
        rows += [("of routed experts", counted.experts, sure["experts"]), ("active", counted.active, sure["active"])]
    rows += [
        ("active less input embedding", counted.active_without_input, sure["active_without_input"]),
        ("active less embedding and output", counted.active_without_embeddings, sure["active_without_embeddings"]),
    ]
    if counted.prediction:
        rows.append(("prediction depths add", counted.prediction, sure["prediction"]))
    if biases := counted.router_biases + counted.prediction_router_biases:
        rows.append(("router biases (buffers) add", biases, "exact"))
    yield "parameters"
    yield from (f"  {name:34}{count:>20,}  {certainty}" for name, count, certainty in rows)


def _gpu_lines(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    virtual = f" x {layout.virtual} virtual" if layout.virtual > 1 else ""
    degrees = (
        f"tensor {layout.tensor}, pipeline {layout.pipeline}{virtual}, context {layout.context}, "
        f"expert {layout.expert}, expert tensor {layout.expert_tensor}"
    )
    yield f"parameters on each GPU, {certainties(plan)['total']}: {degrees}"
    rows = [("stage", "layers", "all", "routed experts", "other")]
    for gpu, stages in zip(plan.gpus, layout.stages, strict=True):
        numbers = (f"{gpu.total:,}", f"{gpu.experts:,}", f"{gpu.dense:,}")
        rows.append((str(gpu.pipeline_rank), "; ".join(map(_held_text, stages)), *numbers))
    yield from table(rows, left=2)


def _held_text(stage: Stage) -> str:
    parts = ["embedding"] if stage.embedding else []
    if stage.layers:
        last = stage.first_layer + len(stage.layers) - 1
        parts.append(f"{stage.first_layer}-{last}" if last > stage.first_layer else str(last))
    parts += ["prediction"] if stage.depths else []
    parts += ["output"] if stage.output else []
    return " ".join(parts) or "nothing"


def _flop_lines(plan: Plan) -> Iterator[str]:
    yield "floating-point operations, forward and backward"
    if plan.flops_per_token is None:
        yield "  none: `model.seq_length` is not set"
        return
    sure = certainties(plan)["flops_per_token"]
    for one in plan.conventions:
        yield f"  {one.per_token / 1e9:>10,.2f} G a token  {sure:8}{one.name}: {one.who}"
    if plan.tokens_per_step:
        step = plan.flops_per_token * plan.tokens_per_step
        whole = f"; {step * plan.steps:.4g} in {plan.steps:,} steps" if plan.steps else ""
        yield f"  {step / 1e12:>10,.1f} T a step   {sure:8}{plan.tokens_per_step:,} tokens, by Megatron's count{whole}"


def _serving_lines(shape: Shape) -> Iterator[str]:
    assert shape.experts
    share, least = shape.experts.activated_share, bound(shape)
    side = "above" if share >= least else "below"
    yield ""
    yield "serving with experts on GPUs of their own (arXiv 2507.19427)"
    yield f"  {share:.3f} of the experts are activated, shared ones counted; {side} {least:.3f}, the least that keeps"
    yield f"  a pool of {H800.name} busy at this width and depth"


def explained_parameters(plan: Plan) -> Iterator[str]:
    """Where each parameter is: by kind of layer and by module."""
    shape = plan.shape
    rows = [("layers", "module", "in one", "in all")]
    for layer, group in groupby(sorted(enumerate(shape.layers), key=lambda one: one[1]), key=lambda one: one[1]):
        places = [place for place, _ in group]
        name = f"{_ranges(places)} `{layer}`"
        for module, count in by_module(layer_weights(shape, layer)).items():
            rows.append((name, module, f"{count:,}", f"{count * len(places):,}"))
            name = ""
    words = shape.rows * shape.hidden
    rows.append(("", "embedding", f"{words:,}", f"{words:,}" + (", the output's as well" if shape.tied else "")))
    if shape.positions:
        rows.append(("", "positions", f"{shape.positions * shape.hidden:,}", f"{shape.positions * shape.hidden:,}"))
    if not shape.tied:
        rows.append(("", "output", f"{words:,}", f"{words:,}"))
    norm = shape.hidden * shape.norm_weights
    rows.append(("", "last norm", f"{norm:,}", f"{norm:,}"))
    rows.append(("", "total", "", f"{plan.parameters.total:,}"))
    if shape.depths:
        for module, count in by_module(depth_weights(shape)).items():
            rows.append(("prediction depth", module, f"{count:,}", f"{count * shape.depth_copies:,}"))
    yield from table(rows, left=2)


def explained_flops(plan: Plan) -> Iterator[str]:
    """What a token's operations are for, as Megatron counts them."""
    whole = plan.flops_per_token or 1.0
    rows = [("for", "M a token", "share")]
    rows += [(name, f"{count / 1e6:,.2f}", f"{count / whole:.1%}") for name, count in plan.flops.items()]
    rows.append(("all", f"{whole / 1e6:,.2f}", "100.0%"))
    yield from table(rows, left=1)


def upcycling_lines(found: Sequence[Choice], dense_width: int, dense_total: int) -> Iterator[str]:
    """The table of `moekit.plan.upcycling.choices`."""
    yield f"experts from a dense model of {dense_total:,} parameters, feed-forward width {dense_width:,}"
    yield "  router.topk = granularity: a token meets the dense layer's width again"
    rows = [("granularity", "experts", "top-k", "width", "total", "x dense", "active", "G a token", "activated")]
    for one in found:
        flops = "" if one.flops_per_token is None else f"{one.flops_per_token / 1e9:,.2f}"
        counts = (f"{one.total:,}", f"{one.total / dense_total:.2f}", f"{one.active:,}", flops)
        sizes = (str(one.granularity), str(one.experts), str(one.topk), f"{one.expert_width:,}")
        rows.append((*sizes, *counts, f"{one.activated_share:.3f}"))
    yield from table(rows, left=0)


def by_module(weights: Sequence[Any]) -> dict[str, int]:
    """Weights added up."""
    found: dict[str, int] = {}
    for weight in weights:
        found[weight.module] = found.get(weight.module, 0) + weight.count
    return found


def _ranges(places: Sequence[int]) -> str:
    """`0-2, 5` of 0, 1, 2, 5."""
    runs = groupby(enumerate(places), key=lambda one: one[1] - one[0])
    texts = []
    for _, run in runs:
        members = [place for _, place in run]
        texts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(texts) if len(texts) <= 4 else f"{len(places)} layers"
