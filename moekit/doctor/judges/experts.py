"""Symptoms of uneven, dead and collapsed experts. Pure."""

from __future__ import annotations

from statistics import median

from moekit.doctor.evidence import Evidence
from moekit.doctor.judges.said import UNEVEN, WINDOW, Said
from moekit.watch.health import NORM_HIGH, NORM_LOW, WARM_UP_STEPS
from moekit.watch.metrics import LOSS

_BIAS_STEPS = 1000
"""An expert bias moves by its rate at each step; by then it has moved by 1 at the rate of 1e-3."""
_FIRST_LAYERS = 3
_BF16_COUNTS = 256
"""bf16 has 8 bits of mantissa: beyond it a count does not grow by 1."""


def bias_stays_uneven(run: Evidence) -> Said:
    """After many steps with an expert bias the global batch is still uneven."""
    vio = run.picture.latest.get("router/max_vio", 0.0)
    if not run.recipe.balance.enable_expert_bias or run.picture.counted_step < _BIAS_STEPS or vio <= UNEVEN:
        return None
    return f"MaxVio of the global batch is {vio:.2f} at step {run.picture.counted_step:,}, with an expert bias", "sure"


def first_layers_uneven(run: Evidence) -> Said:
    """The first layers are far more uneven than those behind them."""
    layers = [(one.name, one.max_vio_global) for one in run.picture.layers if one.max_vio_global is not None]
    if run.picture.counted_step < WARM_UP_STEPS or len(layers) < 2 * _FIRST_LAYERS:
        return None
    rest = median(vio for _, vio in layers[_FIRST_LAYERS:])
    high = [(name, vio) for name, vio in layers[:_FIRST_LAYERS] if vio > max(UNEVEN, 2 * rest)]
    if not high:
        return None
    name, vio = max(high, key=lambda one: one[1])
    return f"MaxVio of {name.replace('_', ' ')} is {vio:.2f}, of the layers behind {rest:.2f}", "sure"


def collapse(run: Evidence) -> Said:
    """The loss stands still while experts are dead or their norms leave their layer's."""
    norms = [alert for alert in run.alerts if alert.key.startswith((NORM_HIGH, NORM_LOW))]
    dead = [alert for alert in run.alerts if alert.key == "dead_expert"]
    losses = run.values(LOSS)
    if not (norms or dead) or len(losses) < 4 * WINDOW:
        return None
    before, now = median(losses[-2 * WINDOW : -WINDOW]), median(losses[-WINDOW:])
    if now < before - 0.005:
        return None
    return f"the loss does not fall any more ({before:.3f}, then {now:.3f}); {(norms or dead)[0].title}", "likely"


def dead_with_aux(run: Evidence) -> Said:
    """Experts are dead though a balancing loss acts."""
    alert = next((alert for alert in run.alerts if alert.key == "dead_expert"), None)
    if alert is None or not run.picture.facts.aux_losses:
        return None
    return f"{alert.title}, with a coefficient of {run.recipe.balance.aux_loss_coeff}", "sure"


def global_aux_counter(run: Evidence) -> Said:
    """A step has more micro batches than a counter in bf16 can count."""
    found = run.sizes
    if found is None or "global_aux_loss" not in str(run.recipe.balance.type) or not run.recipe.moe.num_experts:
        return None
    count = found.global_batch_seqs // (found.micro_batch_seqs * found.data)
    if count <= _BF16_COUNTS:
        return None
    return f"{count} micro batches to a step, counted in bf16, which stops at {_BF16_COUNTS}", "sure"


def first_layers_collapse(run: Evidence) -> Said:
    """Dead experts are in the first layers alone."""
    dead = {one.layer for one in run.picture.dead}
    first = [one.name for one in run.picture.layers[:_FIRST_LAYERS]]
    if "dead_expert" not in run.began or not dead or not dead <= set(first) or len(run.picture.layers) <= len(first):
        return None
    return f"experts are dead in {', '.join(sorted(dead)).replace('_', ' ')} alone", "likely"


def muon_layers_collapse(run: Evidence) -> Said:
    """With Muon experts are dead in several layers."""
    dead = {one.layer for one in run.picture.dead}
    if run.recipe.optimizer.name != "muon" or "dead_expert" not in run.began or len(dead) < 2:
        return None
    return f"with Muon experts are dead in {len(dead)} layers", "likely"
