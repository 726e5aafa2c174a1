"""What a run of a recipe takes on a cluster: memory of each GPU, and time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moekit.cluster.profile import Cluster
from moekit.plan.candidates import Candidates, of_run
from moekit.plan.given import Given
from moekit.plan.memory.model import Memory, memory
from moekit.plan.plan import Plan
from moekit.plan.run import Facts, facts_of
from moekit.plan.time.hardware import Hardware, hardware
from moekit.plan.time.step import Budget, StepTime, budget, step_time

CAPACITY_GIB = {"a100": 79.3, "h100": 79.1, "h200": 139.8, "b200": 178.4, "gb200": 184, "b300": 267, "gb300": 277}


@dataclass(frozen=True)
class Estimate:
    """One recipe on one cluster."""

    cluster: Cluster
    hardware: Hardware
    facts: Facts
    rows: Candidates
    """The recipe's layout, one row."""
    busiest: float
    """Rows of the busiest expert-parallel rank over the mean."""
    memory: Memory
    capacity_bytes: float
    """What one GPU has."""
    time: StepTime
    run: Budget | None
    """None where the recipe does not say how many steps it has."""

    @property
    def time_mark(self) -> str:
        """`calibrated` where this cluster's kind was measured, else `assumed`."""
        assumed = any(what.startswith("assumed") for name, what in self.hardware.notes if name != "attention")
        return "assumed" if assumed else "calibrated"

    @property
    def certainties(self) -> dict[str, str]:
        """How sure each number is."""
        return {
            "memory.static": "exact but for buffers",
            "memory.activations": "modelled",
            "memory.moment": "modelled",
            "memory.outside": "assumed",
            "step": self.time_mark,
            "run": self.time_mark,
        }

    @property
    def imbalance_text(self) -> str:
        """How even the experts' ranks are taken to be."""
        return "" if self.busiest == 1 else f", the busiest expert rank at {self.busiest:.2f} of the mean"


def unmodelled(given: Given) -> str | None:
    """Why memory and time of a recipe cannot be told; None where they can."""
    recipe = given.loaded.recipe
    if recipe.runtime.device == "cpu":
        return "memory and time are modelled on GPUs, and `runtime.device` is cpu"
    if given("seq_length") is None:
        return "memory and time are not modelled: `model.seq_length` is not set"
    needed = {"parallel.gpus": recipe.parallel.gpus, "train.micro_batch_size": recipe.train.micro_batch_size}
    missing = next((name for name, value in needed.items() if value is None), None)
    return missing and f"memory and time are not modelled: `{missing}` is not set"


def estimate_of(given: Given, plan: Plan, cluster: Cluster, busiest: float = 1.0) -> Estimate:
    """Work out a recipe that `unmodelled` says nothing of.

    Raises:
        MoekitError: nothing is known of the cluster's GPU, or its measured bandwidths cannot be read.
    """
    measured = Path(cluster.shared_root) / "preflight" / f"{cluster.name}.json"
    on = hardware(cluster.gpu, cluster.fabric, cluster.gpus_per_node, measured)
    facts, rows = facts_of(given), of_run(given, plan.shape, plan.layout)
    held = memory(plan.shape, facts, rows, busiest)
    time = step_time(plan.shape, facts, rows, on, busiest)
    run = budget(float(time.seconds[0]), plan.steps, rows.world, cluster.price_per_gpu_hour) if plan.steps else None
    return Estimate(cluster, on, facts, rows, busiest, held, CAPACITY_GIB[cluster.gpu] * 2.0**30, time, run)
