"""How long a step takes, for many layouts at once: every stage's micro batch, the pipeline, and what follows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moekit.plan.candidates import Candidates, Floats
from moekit.plan.flops import per_token
from moekit.plan.run import Facts
from moekit.plan.shape import Shape
from moekit.plan.time import parts
from moekit.plan.time.bench import (
    ACROSS,
    ATTENTION,
    CONTEXT,
    DENSE,
    GROUPED,
    INSIDE,
    LAUNCHES,
    MEMORY,
    TENSOR,
    Bench,
    Work,
)
from moekit.plan.time.communication import hop
from moekit.plan.time.hardware import Hardware
from moekit.plan.time.launches import of_step
from moekit.plan.time.offload import offloaded
from moekit.plan.time.recompute import recomputed
from moekit.plan.time.weights import Held, gathered, held, optimized, reduced

BUSY = (DENSE, GROUPED, ATTENTION, MEMORY)
"""What keeps the GPU's processors busy."""
TERMS = (
    *BUSY, "recompute", "offload", TENSOR, CONTEXT, INSIDE, ACROSS, "hidden exchange",
    "host", "weights on the way", "pipeline bubble", "pipeline transfers", "gradient reduction", "weight gathering",
    "optimizer", "fixed",
)  # fmt: skip
"""A step's terms, which sum to its seconds; `hidden exchange` is what runs behind computation, and is negative."""


@dataclass(frozen=True)
class StepTime:
    """Steps of many layouts."""

    seconds: Floats
    """Of a step: `# (candidate,)`, as all that follows."""
    terms: dict[str, Floats]
    """Seconds by what they are for, of the slowest stage; they sum to `seconds` (`TERMS`)."""
    stages: Floats
    """Seconds of one micro batch, forward and backward: `# (candidate, stage)`."""
    exchange: Floats
    """Seconds of the expert exchange, hidden or not."""
    exposed: Floats
    """Seconds of all communication that nothing hides."""
    tokens_per_gpu: Floats
    """A second."""
    tflops_per_gpu: Floats
    """As Megatron's log counts them."""
    model_flops_utilization: Floats
    """Of the GPU's dense bf16 peak, whatever the format, as published figures have it."""


@dataclass(frozen=True)
class Budget:
    """What all steps of a run take."""

    hours: float
    gpu_hours: float
    cost: float | None
    """None: no price was given."""


def budget(seconds: float, steps: int, world: int, price_per_gpu_hour: float | None = None) -> Budget:
    """What `steps` steps take, evaluations and restarts apart."""
    hours = seconds * steps / 3600
    return Budget(hours, hours * world, None if price_per_gpu_hour is None else hours * world * price_per_gpu_hour)


def step_time(
    shape: Shape, facts: Facts, candidates: Candidates, hardware: Hardware, imbalance: float | Floats = 1.0
) -> StepTime:
    """Seconds of a step.

    Args:
        shape: The model.
        facts: What its layouts have alike.
        candidates: The layouts.
        hardware: The cluster.
        imbalance: Rows of the busiest expert rank over the mean, at least 1; one for all, or `# (candidate,)`.
    """
    busiest = np.broadcast_to(np.asarray(imbalance, dtype=np.float64), (candidates.number,))
    bench = Bench(shape, facts, candidates, hardware, busiest)
    forward, backward = _stage_work(bench)
    again, host_again = recomputed(bench, forward)
    weights = held(shape, candidates)
    per_batch = {term: forward[term] + backward[term] for term in forward}
    launches = per_batch.pop(LAUNCHES) + host_again
    per_batch["recompute"] = again
    busy = sum((per_batch[term] for term in (*BUSY, "recompute")), start=np.zeros(again.shape))
    per_batch["offload"], launched = offloaded(bench, per_batch, busy)
    per_batch["hidden exchange"] = -_hidden(bench, per_batch, busy)
    per_batch["weights on the way"] = _sharded_weights(bench, weights, busy)
    gpu = sum(per_batch.values(), start=np.zeros(again.shape))
    host = (launches + launched) * hardware.constants.launch_us * 1e-6
    stages = np.where(candidates.exists, (gpu**_BLEND + host**_BLEND) ** (1 / _BLEND), 0)
    per_batch["host"] = stages - sum(per_batch.values(), start=np.zeros(again.shape))
    behind = _behind(bench, weights, stages)
    return _summed(bench, per_batch, stages, behind)


def _stage_work(bench: Bench) -> tuple[Work, Work]:
    """Seconds of one micro batch by term, forward and backward: `# (candidate, stage)`."""
    shape, candidates = bench.shape, bench.candidates
    sources = [(parts.work(bench, letter), number) for letter, number in candidates.parts.items() if number.any()]
    sources.append((parts.output(bench), candidates.output.astype(np.int64)))
    if shape.depths:
        sources.append((parts.depth(bench), candidates.depths * shape.depths))
    names = (*BUSY, TENSOR, CONTEXT, INSIDE, ACROSS, LAUNCHES)
    both = []
    for direction in (0, 1):
        zeros = {name: np.zeros(candidates.layers.shape) for name in names}
        for work, number in sources:
            for term, seconds in work.items():
                zeros[term] = zeros[term] + number * seconds[direction][:, None]
        both.append(zeros)
    return both[0], both[1]


def _hidden(bench: Bench, per_batch: Work, busy: Floats) -> Floats:
    """Of the exchange, what runs behind another micro batch's computation; the first and last have none beside them."""
    exchange = per_batch[INSIDE] + per_batch[ACROSS]
    beside = bench.candidates.overlap_expert * (1 - 1 / np.maximum(bench.candidates.micro_batches, 1))
    return beside[:, None] * bench.hardware.constants.overlap * np.minimum(exchange, busy)


def _sharded_weights(bench: Bench, weights: Held, busy: Floats) -> Floats:
    """With FSDP, what a micro batch's weights and gradients take beyond the computation they run behind."""
    facts, candidates = bench.facts, bench.candidates
    if facts.sharding != "fsdp" or facts.fsdp_strategy not in ("optim_grads", "optim_grads_params"):
        return np.zeros(busy.shape)
    seconds = reduced(weights, facts, candidates, bench.hardware)
    if facts.fsdp_strategy == "optim_grads_params":
        seconds = seconds + 2 * gathered(weights, facts, candidates, bench.hardware)
    return np.maximum(seconds - bench.hardware.constants.overlap * busy, 0)


_BLEND = 4.0
"""How the GPU's time and the host's make one: the longer of both, more where they are alike, since a micro batch has
long kernels that hide launches and short ones that wait for them. Assumed."""
_FORWARD_SHARE = 0.35
"""Of a micro batch's time: a third of the multiplications, and some more of the rest."""


def _behind(bench: Bench, weights: Held, stages: Floats) -> dict[str, Floats]:
    """What follows the micro batches and what of it nothing hides: `# (candidate,)`, the slowest stage's."""
    facts, candidates, hardware = bench.facts, bench.candidates, bench.hardware
    reduction = reduced(weights, facts, candidates, hardware)
    gathering = gathered(weights, facts, candidates, hardware)
    if facts.sharding == "fsdp" and facts.fsdp_strategy in ("optim_grads", "optim_grads_params"):
        reduction = reduction * 0
        gathering = gathering * (facts.fsdp_strategy == "optim_grads")
    if facts.overlap_grad_reduce:
        reduction = np.maximum(reduction - (1 - _FORWARD_SHARE) * stages, 0)
    if facts.overlap_param_gather:
        gathering = np.maximum(gathering - _FORWARD_SHARE * stages, 0)
    slots = np.where(candidates.exists, 1.0, 0.0)
    return {
        "gradient reduction": (reduction * slots).max(1),
        "weight gathering": (gathering * slots).max(1),
        "optimizer": (optimized(weights, facts, candidates, hardware) * slots).max(1),
        "fixed": of_step(candidates, bench.shape).max(1) * hardware.constants.launch_us * 1e-6
        + hardware.constants.step_ms * 1e-3,
    }


def _summed(bench: Bench, per_batch: Work, stages: Floats, behind: dict[str, Floats]) -> StepTime:
    """The pipeline's schedule: as many micro batches as there are on the slowest stage, the others' once (1F1B)."""
    candidates, facts, hardware = bench.candidates, bench.facts, bench.hardware
    slowest = stages.argmax(1)
    batches = candidates.micro_batches.astype(np.float64)

    def of_slowest(values: Floats) -> Floats:
        return np.take_along_axis(values, slowest[:, None], 1)[:, 0]

    terms = {term: batches * of_slowest(values) for term, values in per_batch.items()}
    terms["pipeline bubble"] = (stages.sum(1) - of_slowest(stages)) / candidates.virtual
    size = bench.sharded * bench.shape.hidden * 2
    once = 2 * hop(hardware, size, candidates.world // candidates.pipeline)
    shown = np.where(candidates.virtual > 1, candidates.pipeline * 2.0, batches)
    terms["pipeline transfers"] = np.where(candidates.pipeline > 1, once * shown, 0.0)
    terms |= behind
    seconds = sum((terms[term] for term in TERMS), start=np.zeros(candidates.number))
    exchange = terms[INSIDE] + terms[ACROSS]
    linked = (TENSOR, CONTEXT, "weights on the way", "pipeline transfers", "gradient reduction")
    exposed = exchange + terms["hidden exchange"] + terms["weight gathering"] + sum(terms[name] for name in linked)
    tokens = candidates.global_batch * facts.seq_length / candidates.world / seconds
    rate = tokens * per_token(bench.shape, facts.seq_length)
    return StepTime(
        seconds=seconds,
        terms=terms,
        stages=stages,
        exchange=exchange,
        exposed=exposed,
        tokens_per_gpu=tokens,
        tflops_per_gpu=rate / 1e12,
        model_flops_utilization=rate / hardware.gpu.bf16,
    )
