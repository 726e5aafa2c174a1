"""What each GPU holds as text: a bar a pipeline stage, and its terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moekit.plan.bars import Chart
from moekit.plan.candidates import Floats
from moekit.plan.estimate import Estimate
from moekit.plan.memory.model import Memory
from moekit.plan.memory.verdict import GIB
from moekit.plan.report.table import table

_BARS: Mapping[str, tuple[str, ...]] = {
    "weights": ("weights", "FP8 copies"),
    "gradients": ("gradients", "placeholder gradients"),
    "optimizer": ("main weights", "first moments", "second moments"),
    "layers": ("layer inputs", "norms", "dropout", "attention", "attention core", "mlp", "delta net", "mamba"),
    "experts": ("router", "dispatch", "experts", "shared expert", "latent"),
    "logits": ("output", "logits"),
    "other": (),
    "allowance": (),
}
"""Terms of a bar's parts; what is in none is `other`, what is outside torch's allocator the allowance."""


def stage_names(estimate: Estimate) -> list[str]:
    """A name for each pipeline stage; of many alike neighbours the first's."""
    return [f"stage {place}" for place in range(int(estimate.rows.pipeline[0]))]


def chart_of(estimate: Estimate) -> Chart:
    """The bars of the memory of each stage's GPUs."""
    memory = estimate.memory
    bars = {name: [0.0] * len(_BARS) for name in stage_names(estimate)}
    parts = list(_BARS)
    for term, size in memory.terms.items():
        known = next((part for part, names in _BARS.items() if term in names), "other")
        part = "allowance" if term in memory.outside else known
        for stage, bar in zip(bars.values(), size[0], strict=False):
            stage[parts.index(part)] += float(bar) / GIB
    used = [place for place in range(len(parts)) if any(bar[place] for bar in bars.values())]
    return Chart(
        title="memory of each GPU, modelled",
        unit="GiB",
        terms=[parts[place] for place in used],
        bars={name: [bar[place] for place in used] for name, bar in bars.items()},
        limit=estimate.verdict.capacity_bytes / GIB,
        limit_name=estimate.cluster.gpu,
    )


def verdict_line(estimate: Estimate) -> str:
    """Whether it fits, and what takes most."""
    of = estimate.verdict
    most = ", ".join(f"{term} {size / GIB:,.1f}" for term, size in of.largest[:4])
    stage = f", of stage {of.stage}," if estimate.rows.pipeline[0] > 1 else ""
    needed = f"{of.needed_bytes / GIB:,.1f} of {of.capacity_bytes / GIB:,.1f} GiB"
    return f"  {of.fit}: the fullest GPU{stage} needs {needed}; most of it {most}"


def explained_memory(estimate: Estimate) -> Iterator[str]:
    """Every term of every stage, and how sure it is."""
    memory, stages = estimate.memory, int(estimate.rows.pipeline[0])
    shown = _different(memory, stages)
    rows: list[tuple[str, ...]] = [("GiB", "", *(_stages_text(group) for group in shown))]

    def row(name: str, mark: str, size: Floats) -> None:
        rows.append((name, mark, *(f"{size[0, group[0]] / GIB:,.2f}" for group in shown)))

    for mark, terms, total, sum_so_far in _sections(memory):
        for term, size in terms.items():
            row(term, mark, size)
        if total and terms:
            row(f"= {total}", "", sum_so_far)
    yield from table(rows, left=2)


def _sections(memory: Memory) -> Iterator[tuple[str, dict[str, Floats], str, Floats]]:
    """How sure terms are, the terms, and what is said of their sum with those before."""
    static = memory.needed * 0 + sum(memory.static.values())
    yield "exact but for buffers", memory.static, "all the time", static
    yield "exact but for buffers", memory.step, "between steps", memory.allocated
    yield "modelled", memory.activations, "", static
    yield "modelled", memory.moment, "at the peak, without what is there between steps alone", memory.peak
    yield "assumed", memory.outside, "with what torch does not count", memory.needed


def _different(memory: Memory, stages: int) -> list[list[int]]:
    """Neighbouring stages that hold the same, together."""
    groups: list[list[int]] = []
    for stage in range(stages):
        same = groups and all(size[0, stage] == size[0, groups[-1][0]] for size in memory.terms.values())
        if same:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _stages_text(group: Sequence[int]) -> str:
    return f"stage {group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}"
