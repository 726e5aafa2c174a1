"""Symptoms of slow runs that numbers, alerts and logs show. Pure."""

from __future__ import annotations

from statistics import median

from moekit.doctor.evidence import Evidence
from moekit.doctor.judges.said import EVEN, UNEVEN, WINDOW, Said
from moekit.watch.health import WARM_UP_STEPS

_SLOWER = 0.15
"""A part; a run's speed varies by some hundredths."""


def throughput_falls(run: Evidence) -> Said:
    """TFLOP/s are lower now than at their best."""
    speeds = run.values("throughput")[1:]
    if run.recipe.runtime.device == "cpu" or len(speeds) < 3 * WINDOW:
        return None
    medians = [median(speeds[at : at + WINDOW]) for at in range(0, len(speeds) - WINDOW + 1, WINDOW)]
    best, now = max(medians), median(speeds[-WINDOW:])
    if now > best * (1 - _SLOWER):
        return None
    return f"{now:.1f} TFLOP/s now, {best:.1f} at its best: {1 - now / best:.0%} less", "sure"


def aux_one_gpu_slow(run: Evidence) -> Said:
    """The auxiliary loss is near its floor while counts are uneven."""
    alert = next((alert for alert in run.alerts if alert.key == "aux_blind"), None)
    return (f"{alert.title}, at step {alert.step:,}", "sure") if alert else None


def socket(run: Evidence) -> Said:
    """Nodes are on sockets in a run of several."""
    networks = [log.triage.networks for log in run.logs if log.triage.networks.on_sockets]
    alert = next((alert for alert in run.alerts if alert.key == "socket"), None)
    if networks and (run.picture.facts.multi_node or len(networks[0].used) > 1):
        return networks[0].sentence(), "sure"
    return (alert.title, "sure") if alert else None


def uneven_micro_batches(run: Evidence) -> Said:
    """Even over the global batch that is balanced, uneven in micro batches."""
    return _gap(run) if run.recipe.balance.type and "global_aux_loss" in str(run.recipe.balance.type) else None


def quantile_micro_uneven(run: Evidence) -> Said:
    """The same under quantile balancing."""
    return _gap(run) if "quantile_balancing" in str(run.recipe.balance.type) else None


def _gap(run: Evidence) -> Said:
    whole, micro = (run.picture.latest.get(name) for name in ("router/max_vio", "router/max_vio_micro"))
    if whole is None or micro is None or run.picture.counted_step < WARM_UP_STEPS:
        return None
    if whole > EVEN or micro <= UNEVEN:
        return None
    return f"MaxVio is {whole:.2f} over the global batch and {micro:.2f} in micro batches", "sure"
