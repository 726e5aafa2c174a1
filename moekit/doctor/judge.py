"""Which of the symptoms (A.2) a run shows, by what it left; pure. A symptom without evidence is none.

Each function of `judges/` is named by a symptom's `test` in `symptoms.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moekit.doctor.evidence import Evidence
from moekit.doctor.judges import experts, loss, memory, speed, starts, traces
from moekit.doctor.judges.said import Said
from moekit.doctor.symptoms import Symptom, symptoms

TESTS: dict[str, Callable[[Evidence], Said]] = {
    test.__name__: test
    for test in (
        *(speed.throughput_falls, speed.aux_one_gpu_slow, speed.socket),
        *(speed.uneven_micro_batches, speed.quantile_micro_uneven),
        *(memory.mtp_memory, memory.one_rank_oom, memory.peak_fine_oom),
        *(loss.nan_unannounced, loss.exit_16_twice, loss.muon_diverges, loss.muon_spikes, loss.z_loss_before_spike),
        *(loss.expert_norm_before_spike, loss.latent_blows_up, loss.jump_before_nan),
        *(experts.bias_stays_uneven, experts.first_layers_uneven, experts.collapse, experts.dead_with_aux),
        *(experts.global_aux_counter, experts.first_layers_collapse, experts.muon_layers_collapse),
        *(starts.upcycling_errors, starts.overlap_assert),
        *(traces.all_to_all_half, traces.all_to_all_exposed, traces.still_slow, traces.every_node, traces.flat_gate),
        *(traces.pre_softmax_worse, traces.capacity_worse, traces.full_recompute),
    )
}
"""By the `test` of a symptom."""


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
