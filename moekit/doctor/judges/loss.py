"""Symptoms of runs that blow up. Pure."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from moekit.doctor.evidence import Evidence
from moekit.doctor.judges.said import WINDOW, Said
from moekit.watch.health import NORM_HIGH

_MUON_FIRST_STEPS = 100


def nan_unannounced(run: Evidence) -> Said:
    """The loss is no number, and nothing moved before it."""
    if (at := nan_step(run)) is None or jumped(run, at):
        return None
    if {"z_loss_rise", "loss_above_best"} & {alert.key for alert in run.alerts if alert.step < at}:
        return None
    flat = [name for name in ("grad-norm", "params-norm", "z_loss_rms_logsumexp") if len(run.values(name, at)) > 1]
    if not flat:
        return "the loss is no number; no other signal was logged before it", "possible"
    return f"the loss is no number at step {at:,}, and {', '.join(flat)} did not move before it", "likely"


def exit_16_twice(run: Evidence) -> Said:
    """Two attempts asked for another GPU and met the fault on one node."""
    again = [start.attempt for start in run.history.starts if start.attempt.ending.kind == "rerun"]
    for one, other in pairwise(again):
        if same := {node for _, node in one.met} & {node for _, node in other.met}:
            numbers = f"{one.number} and {other.number}"
            return f"attempts {numbers} ended with 16, and both met it on {', '.join(sorted(same))}", "sure"
    if run.hit("rerun_same_gpu"):
        return "Megatron says that a step was repeated on the same GPU", "sure"
    return None


def muon_diverges(run: Evidence) -> Said:
    """With Muon the loss leaves its course in the first steps."""
    if run.recipe.optimizer.name != "muon" or (at := broke(run)) is None or at > _MUON_FIRST_STEPS:
        return None
    scale = run.recipe.optimizer.muon_extra_scale_factor
    return f"with Muon the loss left its course at step {at:,}; its update scale is {scale or 'not said'}", "likely"


def muon_spikes(run: Evidence) -> Said:
    """With Muon the loss leaves its course later on."""
    if run.recipe.optimizer.name != "muon" or (at := broke(run)) is None or at <= _MUON_FIRST_STEPS:
        return None
    return f"with Muon the loss left its course at step {at:,}", "likely"


def z_loss_before_spike(run: Evidence) -> Said:
    """z-loss rises, and the loss leaves its course after it."""
    rise = next((alert for alert in run.alerts if alert.key == "z_loss_rise"), None)
    if rise is None:
        return None
    at = broke(run)
    if at is not None and rise.step <= at:
        return f"{rise.title}, at step {rise.step:,}; the loss left its course at step {at:,}", "sure"
    return f"{rise.title}, at step {rise.step:,}; no spike so far", "possible"


def expert_norm_before_spike(run: Evidence) -> Said:
    """An expert's norm is far above its layer's."""
    alert = next((alert for alert in run.alerts if alert.key.startswith(NORM_HIGH)), None)
    if alert is None or run.recipe.moe.latent_size:
        return None
    return f"{alert.title}, at step {alert.step:,}", "sure" if broke(run) else "likely"


def latent_blows_up(run: Evidence) -> Said:
    """Latent experts without a norm before them, and the loss leaves its course."""
    at = broke(run)
    if not run.recipe.moe.latent_size or at is None or run.recipe.moe.use_norm_before_up_proj:
        return None
    return f"with latent experts the loss left its course at step {at:,}; no norm stands before them", "possible"


def jump_before_nan(run: Evidence) -> Said:
    """Gradient norm and a balancing loss jump before the loss is no number."""
    if (at := nan_step(run)) is None or not (both := jumped(run, at)):
        return None
    return f"before the loss was no number at step {at:,}: {both}", "sure"


def nan_step(run: Evidence) -> int | None:
    """The step from which the loss was no number."""
    steps = [alert.step for alert in run.alerts if alert.key == "loss_not_finite"]
    if steps:
        return min(steps)
    return run.picture.step + 1 if run.hit("not_a_number") and run.picture.step else None


def broke(run: Evidence) -> int | None:
    """The step at which the loss left its course: above its best, or no number."""
    steps = [alert.step for alert in run.alerts if alert.key in ("loss_above_best", "loss_not_finite")]
    return min(steps) if steps else nan_step(run)


def jumped(run: Evidence, at: int) -> str:
    """What of gradient norm and balance losses jumped in the last logged steps before one; empty unless both did."""
    norm, said = run.values("grad-norm", at), ""
    for name in run.picture.facts.aux_losses:
        losses = run.values(name, at)
        if min(len(norm), len(losses)) < 2 * WINDOW:
            continue
        grew = max(norm[-5:]) / (median(norm[-2 * WINDOW : -5]) or math.inf)
        rose = max(losses[-5:]) / (median(losses[-2 * WINDOW : -5]) or math.inf)
        if grew > 3 and rose > 1.2:
            said = f"gradient norm {grew:.1f} times its median, {name} {rose:.2f} times"
    return said
