"""A plan as values for a script."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moekit.plan.parameters import layer_weights
from moekit.plan.plan import Plan
from moekit.plan.report.model import bound, by_module, certainties

if TYPE_CHECKING:
    from moekit.plan.estimate import Estimate


def as_values(plan: Plan) -> dict[str, Any]:
    """All of a plan, for JSON. A number's certainty is `exact`, or `assumed` where it rests on an assumption."""
    shape, layout = plan.shape, plan.layout
    return {
        "recipe": plan.name,
        "certainty": certainties(plan),
        "shape": {key: value for key, value in asdict(shape).items() if key != "notes"},
        "layout": {key: value for key, value in asdict(layout).items() if key != "stages"},
        "stages": [[asdict(stage) for stage in stages] for stages in layout.stages],
        "parameters": asdict(plan.parameters),
        "parameters_of_a_layer": {layer: by_module(layer_weights(shape, layer)) for layer in sorted(set(shape.layers))},
        "per_gpu": [asdict(gpu) | {"total": gpu.total} for gpu in plan.gpus],
        "flops_per_token": plan.flops_per_token,
        "flops_per_token_by_term": plan.flops,
        "flops_per_token_by_convention": {one.name: one.per_token for one in plan.conventions},
        "tokens_per_step": plan.tokens_per_step,
        "flops_per_step": _times(plan.flops_per_token, plan.tokens_per_step),
        "steps": plan.steps,
        "flops_of_the_budget": _times(_times(plan.flops_per_token, plan.tokens_per_step), plan.steps),
        "activated_share": shape.experts.activated_share if shape.experts else None,
        "least_activated_share_h800": bound(shape) if shape.experts else None,
        "not_said": [asdict(note) for note in plan.notes],
    }


def _times(one: float | None, other: int | None) -> float | None:
    return None if one is None or other is None else one * other


def of_estimate(found: Estimate | str) -> dict[str, Any]:
    """Memory and time; why there are none, where there are none."""
    if isinstance(found, str):
        return {"not_modelled": found}
    memory, time, stages = found.memory, found.time, int(found.rows.pipeline[0])
    return {
        "cluster": found.cluster.name,
        "gpu": found.cluster.gpu,
        "refused_by_check": found.refused,
        "busiest_rank_over_mean": {"most": found.busiest, "least": found.least_busiest},
        "load": found.load.text or None,
        "memory_bytes": {
            "capacity": found.verdict.capacity_bytes,
            "fit": found.verdict.fit,
            "fullest_stage": found.verdict.stage,
            **{name: getattr(memory, name)[0, :stages].tolist() for name in ("allocated", "peak", "needed")},
            "terms": {
                kind: {term: size[0, :stages].tolist() for term, size in getattr(memory, kind).items()}
                for kind in ("static", "step", "activations", "moment", "outside")
            },
        },
        "step": {
            "seconds": float(time.seconds[0]),
            "least_seconds": float(found.least_time.seconds[0]),
            "terms": {term: float(size[0]) for term, size in time.terms.items()},
            "micro_batch_seconds": time.stages[0, :stages].tolist(),
            "exposed_communication_seconds": float(time.exposed[0]),
            "tflops_per_gpu": float(time.tflops_per_gpu[0]),
            "tokens_per_s_per_gpu": float(time.tokens_per_gpu[0]),
            "model_flops_utilization": float(time.model_flops_utilization[0]),
        },
        "run": asdict(found.run) if found.run else None,
        "certainty_of_models": found.certainties,
        "rests_on": [{"certainty": mark, "what": what} for mark, what in found.grounds],
    }
