"""A step's time as text: what comes out, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.plan.bars import Chart
from moekit.plan.estimate import Estimate
from moekit.plan.plan import Plan
from moekit.plan.report.table import table
from moekit.plan.time.step import TERMS

_LINKS = {
    "experts, inside nodes": "exchange inside nodes",
    "experts, across nodes": "exchange across nodes",
    "tensor parallel": "tensor parallel",
    "context parallel": "context parallel",
    "pipeline": "pipeline transfers",
    "gradients": "gradient reduction",
    "weights": "weight gathering",
}


def time_lines(plan: Plan, estimate: Estimate) -> Iterator[str]:
    """What a step and the run take, and what of it is communication."""
    time, mark, run = estimate.time, estimate.time_mark, estimate.run
    seconds, rows = float(time.seconds[0]), estimate.rows
    yield f"a step on {rows.world} {estimate.cluster.gpu} of {estimate.cluster.name}{estimate.imbalance_text}"
    tokens = float(time.tokens_per_gpu[0])
    numbers = [
        (f"{seconds:,.3f} s", f"for {rows.global_batch:,} sequences, {int(rows.micro_batches[0]):,} micro batches"),
        (f"{time.tflops_per_gpu[0]:,.1f} TFLOP/s", "a GPU, by Megatron's count"),
        (f"{time.model_flops_utilization[0]:.1%}", "MFU: of the dense bf16 peak"),
        (f"{tokens:,.0f} tokens/s", f"a GPU, {tokens * rows.world:,.0f} in all"),
        (f"{time.exposed[0]:,.3f} s", f"communication that nothing hides, {time.exposed[0] / seconds:.0%} of the step"),
    ]
    least = float(estimate.least_time.seconds[0])
    if least != seconds:
        even = f"at the best placement, where the busiest rank is at {estimate.least_busiest:.2f} of the mean"
        numbers.insert(1, (f"{least:,.3f} s", even))
    if run is not None:
        whole = f"and {run.gpu_hours:,.0f} GPU-hours for {plan.steps:,} steps, evaluation and restarts apart"
        numbers.append((f"{run.hours:,.1f} hours", whole))
        if run.cost is not None:
            numbers.append((f"{run.cost:,.0f}", f"the cost, at {estimate.cluster.price_per_gpu_hour:g} a GPU-hour"))
    yield from (f"  {number:>17}  {mark:10}  {what}" for number, what in numbers)
    yield from _link_lines(estimate)


def _link_lines(estimate: Estimate) -> Iterator[str]:
    terms, seconds = estimate.time.terms, float(estimate.time.seconds[0])
    shown = [(name, float(terms[term][0])) for name, term in _LINKS.items() if terms[term][0] > 0]
    if shown:
        split = ", ".join(f"{name} {part:,.3f}" for name, part in shown)
        hidden = -float(terms["hidden exchange"][0])
        behind = f"; {hidden:,.3f} of it hidden" if hidden else ""
        yield f"  communication of a step, s, {estimate.time_mark}: {split}{behind}"
    bubble = float(terms["pipeline bubble"][0])
    if bubble:
        yield f"  pipeline bubble, {estimate.time_mark}: {bubble:,.3f} s, {bubble / seconds:.0%} of the step"


def explained_time(estimate: Estimate) -> Iterator[str]:
    """A step's terms, of the slowest stage, and what they rest on."""
    time = estimate.time
    seconds = float(time.seconds[0])
    rows = [("of a step", "s", "share")]
    rows += [
        (term, f"{time.terms[term][0]:,.4f}", f"{time.terms[term][0] / seconds:.1%}")
        for term in TERMS
        if abs(time.terms[term][0]) > 0
    ]
    rows.append(("step", f"{seconds:,.4f}", "100.0%"))
    yield from table(rows, left=1)
    stages = [float(one) for one in time.stages[0][: int(estimate.rows.pipeline[0])]]
    if len(stages) > 1:
        yield ""
        yield "a micro batch, forward and backward, by pipeline stage"
        yield "  " + ", ".join(f"{place}: {one * 1e3:,.1f} ms" for place, one in enumerate(stages))
    yield ""
    yield from ground_lines(estimate)


def ground_lines(estimate: Estimate) -> Iterator[str]:
    """What memory and time rest on."""
    yield "what memory and time rest on"
    yield from (f"  {mark:13} {what}" for mark, what in estimate.grounds)


def time_chart(estimate: Estimate) -> Chart:
    """Where a step's time goes, as one bar; what runs behind computation is taken off the exchange."""
    terms = {name: float(size[0]) for name, size in estimate.time.terms.items()}
    bars = {part: sum(terms.get(name, 0.0) for name in names) for part, names in _PARTS.items()}
    other = sum(terms.values()) - sum(bars.values())
    bars = {name: max(size, 0.0) for name, size in {**bars, "other": other}.items() if size > 1e-9}
    return Chart("a step", "s", list(bars), {"step": list(bars.values())})


_PARTS = {
    "matrices": ("dense gemm", "grouped gemm"),
    "attention": ("attention",),
    "memory": ("memory",),
    "recomputation": ("recompute",),
    "expert exchange": ("exchange inside nodes", "exchange across nodes", "hidden exchange"),
    "tensor and context": ("tensor parallel", "context parallel"),
    "pipeline": ("pipeline bubble", "pipeline transfers"),
}
