"""What a run of a recipe takes on a cluster: memory of each GPU, and time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moekit.cluster.profile import Cluster
from moekit.plan.candidates import Candidates, of_run
from moekit.plan.given import Given
from moekit.plan.load import Load
from moekit.plan.memory.model import Memory, memory
from moekit.plan.memory.verdict import CAPACITY_GIB, GIB, Verdict, verdict
from moekit.plan.plan import Plan
from moekit.plan.run import Facts, facts_of
from moekit.plan.time.hardware import Hardware, hardware
from moekit.plan.time.step import Budget, StepTime, budget, step_time
from moekit.recipe.rules import violations


@dataclass(frozen=True)
class Estimate:
    """One recipe on one cluster."""

    cluster: Cluster
    refused: str | None
    """The first thing that `moekit check` says against the recipe on this cluster."""
    hardware: Hardware
    facts: Facts
    rows: Candidates
    """The recipe's layout, one row."""
    load: Load
    busiest: float
    """Rows of the busiest expert-parallel rank over the mean, the most there can be."""
    least_busiest: float
    memory: Memory
    verdict: Verdict
    time: StepTime
    least_time: StepTime
    """With `least_busiest`: the same as `time` where nothing is left open."""
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
    def grounds(self) -> list[tuple[str, str]]:
        """How sure each thing is that memory and time rest on, and what it is."""
        found = []
        for name, what in self.hardware.notes:
            mark, _, why = what.partition(": ")
            found.append((mark, f"{name}: {why}" if why else name))
        found.append(("modelled", "activations, buffers and logits: how Megatron and Transformer Engine are written"))
        outside = [f"{name} {size.max() / GIB:.1f} GiB" for name, size in self.memory.outside.items()]
        found.append(("assumed", f"what torch does not count: {', '.join(outside)}"))
        if not self.load.text and self.rows.expert[0] > 1:
            found.append(
                ("assumed", "experts' ranks get as much as each other (`--rank-imbalance`, `--maxvio`, `--counts`)")
            )
        return found

    @property
    def imbalance_text(self) -> str:
        """How even the experts' ranks are taken to be."""
        if not self.load.text:
            return ", experts' ranks taken to be even" if self.rows.expert[0] > 1 else ""
        return f", the busiest expert rank at {self.busiest:.2f} times the mean, {self.load.text}"


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


def estimate_of(given: Given, plan: Plan, cluster: Cluster, load: Load) -> Estimate:
    """Work out a recipe that `unmodelled` says nothing of.

    Raises:
        MoekitError: nothing is known of the cluster's GPU, or its measured bandwidths cannot be read.
    """
    measured = Path(cluster.shared_root) / "preflight" / f"{cluster.name}.json"
    on = hardware(cluster.gpu, cluster.fabric, cluster.gpus_per_node, measured)
    facts, rows = facts_of(given), of_run(given, plan.shape, plan.layout)
    _whole(given, rows)
    recipe = given.loaded.recipe
    refused = next((one.what for one in violations(recipe, cluster) if one.level == "error"), None)
    most, least = load.most(rows), load.least(rows)
    held = memory(plan.shape, facts, rows, most)
    time = step_time(plan.shape, facts, rows, on, most)
    return Estimate(
        cluster=cluster,
        refused=refused,
        hardware=on,
        facts=facts,
        rows=rows,
        load=load,
        busiest=float(most[0]),
        least_busiest=float(least[0]),
        memory=held,
        verdict=verdict(held, CAPACITY_GIB[cluster.gpu] * GIB),
        time=time,
        least_time=time if (least == most).all() else step_time(plan.shape, facts, rows, on, least),
        run=budget(float(time.seconds[0]), plan.steps, rows.world, cluster.price_per_gpu_hour) if plan.steps else None,
    )


def _whole(given: Given, rows: Candidates) -> None:
    """Refuse a batch that ranks cannot share."""
    ranks, micro = int(rows.data[0]), int(rows.micro_batch[0])
    if rows.global_batch % (ranks * micro):
        what = (
            f"train.global_batch_size = {rows.global_batch} is no multiple of {ranks * micro}: micro batches of {micro}"
        )
        raise given.refused("train.global_batch_size", f"{what} on {ranks} data-parallel ranks", "change one of them")
