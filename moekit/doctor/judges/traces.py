"""Symptoms that traces show: of the profiler, of the router, and peaks of memory in a log. Pure."""

from __future__ import annotations

from moekit.doctor.evidence import Evidence
from moekit.doctor.judges.said import Said
from moekit.watch.health import WARM_UP_STEPS

_HALF = 0.35
"""Of a step: all-to-all that the handbook calls nearly half."""
_LARGE = 0.10
"""Of a step: what is worth a lever (profile/levers.py)."""
_NOT_HIDDEN = 0.8
"""Of all-to-all: nothing computes meanwhile."""
_EVERY = 0.9
"""Of the nodes of an expert parallel group: reached by the mean token."""
_FREE = 0.5
"""Of a GPU's memory: room enough that whole layers need not be recomputed."""
_PARTIAL_MASS = 0.9
"""Probability of the chosen experts, from which the rest is small."""
_DROPPED = 0.01
"""Of all tokens; a capacity is to drop next to none."""


def all_to_all_half(run: Evidence) -> Said:
    """One node, and all-to-all is nearly half of the profiled steps."""
    found = run.traces.exchange
    if found is None or run.picture.facts.multi_node or found.exposed < _HALF:
        return None
    return f"all-to-all is exposed for {found.exposed:.0%} of the profiled steps, on one node", "sure"


def all_to_all_exposed(run: Evidence) -> Said:
    """A large share of the step is all-to-all that nothing hides."""
    found = run.traces.exchange
    if found is None or found.exposed < _LARGE or found.exposed < _NOT_HIDDEN * found.runs:
        return None
    return f"all-to-all runs for {found.runs:.0%} of the profiled steps and is exposed for {found.exposed:.0%}", "sure"


def still_slow(run: Evidence) -> Said:
    """Nothing but computing is large in the profile, and its matrices are not in FP8."""
    found = run.traces.exchange
    if found is None or max(found.exposed, found.permute, found.other, found.idle) >= _LARGE:
        return None
    if run.recipe.precision.fp8_format or run.recipe.precision.fp4_format:
        return None
    computes = f"products of matrices take {found.gemm:.0%} of the profiled steps in bf16"
    return f"{computes}; all-to-all, copies, other communication and idling less than a tenth each", "possible"


def every_node(run: Evidence) -> Said:
    """A token's copies go to nearly all nodes of its expert parallel group."""
    found = run.traces.reach
    if (
        found is None
        or found.nodes < 2
        or found.mean < _EVERY * min(found.nodes, run.recipe.router.topk or found.nodes)
    ):
        return None
    exposed = run.traces.exchange.exposed if run.traces.exchange else 0.0
    said = f"a token reaches {found.mean:.1f} of the {found.nodes} nodes of its expert parallel group"
    if exposed >= _LARGE:
        return f"{said}, and all-to-all is exposed for {exposed:.0%} of the profiled steps", "sure"
    return said, "possible"


def flat_gate(run: Evidence) -> Said:
    """The weights of a routing trace are all alike, as those of a new router are too."""
    gates = run.traces.gates if run.picture.step >= WARM_UP_STEPS else ()
    flat = [one.layer for one in gates if one.flat]
    if not flat:
        return None
    return f"the weights of {len(flat)} of {len(gates)} traced layers are flat, first {flat[0]}", "sure"


def pre_softmax_worse(run: Evidence) -> Said:
    """Softmax before the choice leaves weights that add up to less than 1, as a trace shows."""
    masses = [one.mass for one in run.traces.gates if one.mass == one.mass]
    scaled = run.recipe.router.topk_scaling_factor
    if not run.recipe.router.pre_softmax or scaled or not masses or min(masses) > _PARTIAL_MASS:
        return None
    mean = sum(masses) / len(masses)
    said = (
        f"the chosen experts' weights add up to {mean:.2f} in the trace; whether the loss is higher, a run without says"
    )
    return said, "possible"


def capacity_worse(run: Evidence) -> Said:
    """Tokens are dropped: counts are of what capacity left, so that their mean is below that of what was asked.

    The busiest expert has at most factor * asked mean, and (1 + MaxVio) * kept mean.
    """
    factor = run.recipe.moe.expert_capacity_factor
    vio = run.picture.latest.get("router/max_vio_micro", run.picture.latest.get("router/max_vio", 0.0))
    if not factor or factor < 0 or run.recipe.moe.pad_expert_input_to_capacity:
        return None
    dropped = 1 - factor / (1 + vio)
    if dropped < _DROPPED:
        return None
    said = f"MaxVio is {vio:.2f} behind a capacity factor of {factor:g}"
    return f"{said}: at least {dropped:.0%} of the tokens' choices are dropped", "likely"


def full_recompute(run: Evidence) -> Said:
    """Whole layers are recomputed, and much of the GPU's memory is free."""
    peak, whole = run.traces.peak_gib, run.traces.gpu_gib
    if run.recipe.memory.recompute_granularity != "full" or not peak or not whole or peak > _FREE * whole:
        return None
    said = f"whole layers are recomputed, and at most {peak:.0f} of {whole:.0f} GiB were allocated"
    return f"{said} by the ranks that say it, those of data parallel rank 0", "likely"
