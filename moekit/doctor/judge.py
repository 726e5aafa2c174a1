"""Which of the symptoms (A.2) a run shows, by what it left; pure. A symptom without evidence is none.

Each function is named by a symptom's `test` in `symptoms.yaml`, and gives a sentence with the numbers, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from moekit.doctor.evidence import Evidence
from moekit.doctor.symptoms import Symptom, symptoms
from moekit.watch.health import NORM_HIGH, NORM_LOW, WARM_UP_STEPS
from moekit.watch.metrics import LOSS

_WINDOW = 20
"""Logged steps of a median."""
_SLOWER = 0.15
"""A part; a run's speed varies by some hundredths."""
_UNEVEN = 1.0
"""MaxVio from which the busiest expert has twice its share, as in `Thresholds.max_vio`."""
_EVEN = 0.3
"""MaxVio that a balancer comes to in all of the handbook's runs that it calls even."""
_BIAS_STEPS = 1000
"""An expert bias moves by its rate at each step; by then it has moved by 1 at the rate of 1e-3."""
_MUON_FIRST_STEPS = 100
_FIRST_LAYERS = 3
_BF16_COUNTS = 256
"""bf16 has 8 bits of mantissa: beyond it a count does not grow by 1."""


@dataclass(frozen=True)
class Shown:
    """A symptom that a run shows."""

    symptom: Symptom
    sentence: str
    """What shows it, with its numbers."""
    sure: str
    """`sure`, `likely` or `possible`."""


def shown(evidence: Evidence) -> list[Shown]:
    """The symptoms that the evidence shows, in the index's order."""
    found = []
    for symptom in symptoms().values():
        if symptom.test and (said := TESTS[symptom.test](evidence)):
            found.append(Shown(symptom, said[0], said[1]))
    return found


Said = tuple[str, str] | None
"""A sentence, and how sure."""


def _throughput_falls(run: Evidence) -> Said:
    speeds = run.values("throughput")[1:]
    if run.recipe.runtime.device == "cpu" or len(speeds) < 3 * _WINDOW:
        return None
    medians = [median(speeds[at : at + _WINDOW]) for at in range(0, len(speeds) - _WINDOW + 1, _WINDOW)]
    best, now = max(medians), median(speeds[-_WINDOW:])
    if now > best * (1 - _SLOWER):
        return None
    return f"{now:.1f} TFLOP/s now, {best:.1f} at its best: {1 - now / best:.0%} less", "sure"


def _aux_one_gpu_slow(run: Evidence) -> Said:
    alert = next((alert for alert in run.alerts if alert.key == "aux_blind"), None)
    return (f"{alert.title}, at step {alert.step:,}", "sure") if alert else None


def _bias_stays_uneven(run: Evidence) -> Said:
    vio = run.picture.latest.get("router/max_vio", 0.0)
    if not run.recipe.balance.enable_expert_bias or run.picture.counted_step < _BIAS_STEPS or vio <= _UNEVEN:
        return None
    return f"MaxVio of the global batch is {vio:.2f} at step {run.picture.counted_step:,}, with an expert bias", "sure"


def _first_layers_uneven(run: Evidence) -> Said:
    layers = [(one.name, one.max_vio_global) for one in run.picture.layers if one.max_vio_global is not None]
    if run.picture.counted_step < WARM_UP_STEPS or len(layers) < 2 * _FIRST_LAYERS:
        return None
    rest = median(vio for _, vio in layers[_FIRST_LAYERS:])
    high = [(name, vio) for name, vio in layers[:_FIRST_LAYERS] if vio > max(_UNEVEN, 2 * rest)]
    if not high:
        return None
    name, vio = max(high, key=lambda one: one[1])
    return f"MaxVio of {name.replace('_', ' ')} is {vio:.2f}, of the layers behind {rest:.2f}", "sure"


def _mtp_memory(run: Evidence) -> Said:
    stages, mtp = run.recipe.parallel.pipeline_model or 1, run.recipe.model.mtp_num_layers
    ranks = _out_of_memory(run)
    world = run.recipe.parallel.gpus or 0
    if not mtp or stages < 2 or not ranks or not world:
        return None
    last = {rank for rank in ranks if rank >= world - world // stages}
    if last != ranks:
        return None
    return f"rank {_names(ranks)} of the last pipeline stage, which has MTP and the loss, ran out of memory", "likely"


def _socket(run: Evidence) -> Said:
    hits = [log.triage.hits["nccl_socket"] for log in run.logs if "nccl_socket" in log.triage.hits]
    alert = next((alert for alert in run.alerts if alert.key == "socket"), None)
    several = run.picture.facts.multi_node or len({host for hit in hits for host in hit.hosts}) > 1
    if alert:
        return alert.title, "sure"
    return ("NCCL says `Using network Socket`", "sure") if hits and several else None


def _uneven_micro_batches(run: Evidence) -> Said:
    return _gap(run) if run.recipe.balance.type and "global_aux_loss" in str(run.recipe.balance.type) else None


def _quantile_micro_uneven(run: Evidence) -> Said:
    return _gap(run) if "quantile_balancing" in str(run.recipe.balance.type) else None


def _gap(run: Evidence) -> Said:
    whole, micro = (run.picture.latest.get(name) for name in ("router/max_vio", "router/max_vio_micro"))
    if whole is None or micro is None or run.picture.counted_step < WARM_UP_STEPS:
        return None
    if whole > _EVEN or micro <= _UNEVEN:
        return None
    return f"MaxVio is {whole:.2f} over the global batch and {micro:.2f} in micro batches", "sure"


def _one_rank_oom(run: Evidence) -> Said:
    ranks = _out_of_memory(run)
    world = run.recipe.parallel.gpus or 0
    if not ranks or len(ranks) * 2 > max(world, 2):
        return None
    said = f"rank {_names(ranks)} of {world} ran out of GPU memory"
    busiest, expert = run.picture.latest.get("router/busiest_rank"), run.recipe.parallel.expert_model or 1
    if busiest is None or expert < 2:
        return f"{said}; no counts say whether it holds the busiest experts", "possible"
    tensor = run.recipe.parallel.expert_tensor or run.recipe.parallel.tensor_model or 1
    holds = {rank // tensor % expert for rank in ranks}
    times = run.picture.latest.get("router/rank_imbalance")
    load = f" with {times:.2f} times the mean load" if times else ""
    if holds == {int(busiest)}:
        return f"{said}; it holds the experts of the busiest expert parallel rank, {busiest:.0f}{load}", "sure"
    return f"{said}; the busiest expert parallel rank is another, {busiest:.0f}{load}", "likely"


def _peak_fine_oom(run: Evidence) -> Said:
    ranks = _out_of_memory(run)
    data = run.sizes.data if run.sizes else 1
    if not ranks or 0 in ranks or data < 2:
        return None
    return f"rank {_names(ranks)} ran out of memory, and the peak that is logged is of data parallel rank 0", "sure"


def _nan_unannounced(run: Evidence) -> Said:
    if (at := _nan_step(run)) is None or _jumped(run, at):
        return None
    if {"z_loss_rise", "loss_above_best"} & {alert.key for alert in run.alerts if alert.step < at}:
        return None
    flat = [name for name in ("grad-norm", "params-norm", "z_loss_rms_logsumexp") if len(run.values(name, at)) > 1]
    if not flat:
        return "the loss is no number; no other signal was logged before it", "possible"
    return f"the loss is no number at step {at:,}, and {', '.join(flat)} did not move before it", "likely"


def _exit_16_twice(run: Evidence) -> Said:
    again = [start.attempt for start in run.history.starts if start.attempt.ending.kind == "rerun"]
    for one, other in pairwise(again):
        if same := {node for _, node in one.met} & {node for _, node in other.met}:
            numbers = f"{one.number} and {other.number}"
            return f"attempts {numbers} ended with 16, and both met it on {', '.join(sorted(same))}", "sure"
    if run.hit("rerun_same_gpu"):
        return "Megatron says that a step was repeated on the same GPU", "sure"
    return None


def _muon_diverges(run: Evidence) -> Said:
    if run.recipe.optimizer.name != "muon" or (at := _broke(run)) is None or at > _MUON_FIRST_STEPS:
        return None
    scale = run.recipe.optimizer.muon_extra_scale_factor
    return f"with Muon the loss left its course at step {at:,}; its update scale is {scale or 'not said'}", "likely"


def _muon_spikes(run: Evidence) -> Said:
    if run.recipe.optimizer.name != "muon" or (at := _broke(run)) is None or at <= _MUON_FIRST_STEPS:
        return None
    return f"with Muon the loss left its course at step {at:,}", "likely"


def _z_loss_before_spike(run: Evidence) -> Said:
    rise = next((alert for alert in run.alerts if alert.key == "z_loss_rise"), None)
    if rise is None:
        return None
    at = _broke(run)
    if at is not None and rise.step <= at:
        return f"{rise.title}, at step {rise.step:,}; the loss left its course at step {at:,}", "sure"
    return f"{rise.title}, at step {rise.step:,}; no spike so far", "possible"


def _expert_norm_before_spike(run: Evidence) -> Said:
    alert = next((alert for alert in run.alerts if alert.key.startswith(NORM_HIGH)), None)
    if alert is None or run.recipe.moe.latent_size:
        return None
    return f"{alert.title}, at step {alert.step:,}", "sure" if _broke(run) else "likely"


def _latent_blows_up(run: Evidence) -> Said:
    at = _broke(run)
    if not run.recipe.moe.latent_size or at is None or run.recipe.moe.use_norm_before_up_proj:
        return None
    return f"with latent experts the loss left its course at step {at:,}; no norm stands before them", "possible"


def _jump_before_nan(run: Evidence) -> Said:
    if (at := _nan_step(run)) is None or not (jumped := _jumped(run, at)):
        return None
    return f"before the loss was no number at step {at:,}: {jumped}", "sure"


def _collapse(run: Evidence) -> Said:
    norms = [alert for alert in run.alerts if alert.key.startswith((NORM_HIGH, NORM_LOW))]
    dead = [alert for alert in run.alerts if alert.key == "dead_expert"]
    losses = run.values(LOSS)
    if not (norms or dead) or len(losses) < 4 * _WINDOW:
        return None
    before, now = median(losses[-2 * _WINDOW : -_WINDOW]), median(losses[-_WINDOW:])
    if now < before - 0.005:
        return None
    return f"the loss does not fall any more ({before:.3f}, then {now:.3f}); {(norms or dead)[0].title}", "likely"


def _dead_with_aux(run: Evidence) -> Said:
    alert = next((alert for alert in run.alerts if alert.key == "dead_expert"), None)
    if alert is None or not run.picture.facts.aux_losses:
        return None
    return f"{alert.title}, with a coefficient of {run.recipe.balance.aux_loss_coeff}", "sure"


def _global_aux_counter(run: Evidence) -> Said:
    found = run.sizes
    if found is None or "global_aux_loss" not in str(run.recipe.balance.type) or not run.recipe.moe.num_experts:
        return None
    count = found.global_batch_seqs // (found.micro_batch_seqs * found.data)
    if count <= _BF16_COUNTS:
        return None
    return f"{count} micro batches to a step, counted in bf16, which stops at {_BF16_COUNTS}", "sure"


def _first_layers_collapse(run: Evidence) -> Said:
    dead = {one.layer for one in run.picture.dead}
    first = [one.name for one in run.picture.layers[:_FIRST_LAYERS]]
    if "dead_expert" not in run.began or not dead or not dead <= set(first) or len(run.picture.layers) <= len(first):
        return None
    return f"experts are dead in {', '.join(sorted(dead)).replace('_', ' ')} alone", "likely"


def _muon_layers_collapse(run: Evidence) -> Said:
    dead = {one.layer for one in run.picture.dead}
    if run.recipe.optimizer.name != "muon" or "dead_expert" not in run.began or len(dead) < 2:
        return None
    return f"with Muon experts are dead in {len(dead)} layers", "likely"


def _upcycling_errors(run: Evidence) -> Said:
    if run.hit("upcycling_argument"):
        return "Megatron's loader was called with `model`", "sure"
    if run.recipe.moe.use_upcycling and run.hit("checkpoint_keys"):
        return "keys are missing while a dense checkpoint is converted", "likely"
    return None


def _overlap_assert(run: Evidence) -> Said:
    return ("Megatron says so in the log", "sure") if run.hit("overlap_recompute") else None


def _out_of_memory(run: Evidence) -> set[int]:
    """The ranks that the newest attempt with one says were out of GPU memory, or its ending does."""
    for log in run.logs:
        if hit := log.triage.hits.get("gpu_memory"):
            return hit.ranks or _ending_ranks(run, log.attempt)
    return set()


def _ending_ranks(run: Evidence, attempt: int) -> set[int]:
    return {
        rank for start in run.history.starts if start.attempt.number == attempt for rank in start.attempt.ending.ranks
    }


def _nan_step(run: Evidence) -> int | None:
    """The step from which the loss was no number."""
    steps = [alert.step for alert in run.alerts if alert.key == "loss_not_finite"]
    if steps:
        return min(steps)
    return run.picture.step + 1 if run.hit("not_a_number") and run.picture.step else None


def _broke(run: Evidence) -> int | None:
    """The step at which the loss left its course: above its best, or no number."""
    steps = [alert.step for alert in run.alerts if alert.key in ("loss_above_best", "loss_not_finite")]
    return min(steps) if steps else _nan_step(run)


def _jumped(run: Evidence, at: int) -> str:
    """What of gradient norm and balance losses jumped in the last logged steps before one; empty unless both did."""
    norm, said = run.values("grad-norm", at), ""
    for name in run.picture.facts.aux_losses:
        losses = run.values(name, at)
        if min(len(norm), len(losses)) < 2 * _WINDOW:
            continue
        grew = max(norm[-5:]) / (median(norm[-2 * _WINDOW : -5]) or math.inf)
        rose = max(losses[-5:]) / (median(losses[-2 * _WINDOW : -5]) or math.inf)
        if grew > 3 and rose > 1.2:
            said = f"gradient norm {grew:.1f} times its median, {name} {rose:.2f} times"
    return said


def _names(ranks: set[int]) -> str:
    first = ", ".join(map(str, sorted(ranks)[:8]))
    return f"{first} and {len(ranks) - 8} more" if len(ranks) > 8 else first


TESTS: dict[str, Callable[[Evidence], Said]] = {
    test.__name__[1:]: test
    for test in (
        *(_throughput_falls, _aux_one_gpu_slow, _bias_stays_uneven, _first_layers_uneven, _mtp_memory),
        *(_socket, _uneven_micro_batches, _quantile_micro_uneven, _one_rank_oom, _peak_fine_oom, _nan_unannounced),
        *(_exit_16_twice, _muon_diverges, _muon_spikes, _z_loss_before_spike, _expert_norm_before_spike),
        *(_latent_blows_up, _jump_before_nan, _collapse, _dead_with_aux, _global_aux_counter, _first_layers_collapse),
        *(_muon_layers_collapse, _upcycling_errors, _overlap_assert),
    )
}
"""By the `test` of a symptom."""
