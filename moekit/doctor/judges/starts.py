"""Symptoms of runs that do not start. Pure."""

from __future__ import annotations

from moekit.doctor.evidence import Evidence
from moekit.doctor.judges.said import Said


def upcycling_errors(run: Evidence) -> Said:
    """One of the two faults of upcycling is in the log."""
    if run.hit("upcycling_argument"):
        return "Megatron's loader was called with `model`", "sure"
    if run.recipe.moe.use_upcycling and run.hit("checkpoint_keys"):
        return "keys are missing while a dense checkpoint is converted", "likely"
    return None


def overlap_assert(run: Evidence) -> Said:
    """Megatron's refusal is in the log."""
    return ("Megatron says so in the log", "sure") if run.hit("overlap_recompute") else None
