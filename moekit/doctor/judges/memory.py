"""Symptoms of ranks that are out of memory. Pure."""

from __future__ import annotations

from moekit.doctor.evidence import Evidence
from moekit.doctor.judges.said import Said, names


def mtp_memory(run: Evidence) -> Said:
    """Ranks of the last stage, which has MTP, are out of memory and no others."""
    stages, mtp = run.recipe.parallel.pipeline_model or 1, run.recipe.model.mtp_num_layers
    ranks = out_of_memory(run)
    world = run.recipe.parallel.gpus or 0
    if not mtp or stages < 2 or not ranks or not world:
        return None
    last = {rank for rank in ranks if rank >= world - world // stages}
    if last != ranks:
        return None
    return f"rank {names(ranks)} of the last pipeline stage, which has MTP and the loss, ran out of memory", "likely"


def one_rank_oom(run: Evidence) -> Said:
    """Few ranks are out of memory, and whether they hold the busiest experts."""
    ranks = out_of_memory(run)
    world = run.recipe.parallel.gpus or 0
    if not ranks or len(ranks) * 2 > max(world, 2):
        return None
    said = f"rank {names(ranks)} of {world} ran out of GPU memory"
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


def peak_fine_oom(run: Evidence) -> Said:
    """A rank is out of memory whose peak is not among those that are logged."""
    ranks = out_of_memory(run)
    data = run.sizes.data if run.sizes else 1
    if not ranks or 0 in ranks or data < 2:
        return None
    return f"rank {names(ranks)} ran out of memory, and the peak that is logged is of data parallel rank 0", "sure"


def out_of_memory(run: Evidence) -> set[int]:
    """The ranks that the newest attempt with one says were out of GPU memory, or its ending does."""
    for log in run.logs:
        if hit := log.triage.hits.get("gpu_memory"):
            return hit.ranks or ending_ranks(run, log.attempt)
    return set()


def ending_ranks(run: Evidence, attempt: int) -> set[int]:
    """The ranks that an attempt ended with."""
    return {
        rank for start in run.history.starts if start.attempt.number == attempt for rank in start.attempt.ending.ranks
    }
