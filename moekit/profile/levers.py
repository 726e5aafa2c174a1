"""Which lever of handbook 3.7 comes first, and which may come after it, each alone. Pure.

"HB 2159" is a line of the handbook. It names no limits: what is large is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moekit.profile.families import ALL_TO_ALL, COMMUNICATION, IDLE, PERMUTE
from moekit.profile.shares import Shares, Waiting, part
from moekit.recipe.schema import Recipe

LARGE = 0.10
"""A share of the step that is worth a lever. In the handbook's example permute and copy took 11.45% (HB 2155)."""
SHORTER = 0.10
"""How much shorter all-to-all is under forced balance before imbalance is said to cost: one step has noise."""
_FABRIC = "the fabric"


@dataclass(frozen=True)
class Lever:
    """One thing to try."""

    name: str
    why: str
    change: str
    source: str


def levers(ranks: Sequence[Shares], against: Waiting | None, recipe: Recipe | None) -> list[Lever]:
    """The first lever, then those that may come after it; none where nothing is large or a CPU was recorded."""
    if any(rank.on_cpu for rank in ranks):
        return []
    found: list[Lever] = []
    if part(ranks, ALL_TO_ALL) >= LARGE:
        found += _of_exchange(part(ranks, ALL_TO_ALL), against, recipe)
    if part(ranks, PERMUTE) >= LARGE and not (recipe and recipe.moe.permute_fusion):
        why = f"permute and copy take {part(ranks, PERMUTE):.0%} of the step"
        found.append(Lever("fused permutation", why, "`moe.permute_fusion: true`", "Profiling, HB 2155 and 2159"))
    if part(ranks, COMMUNICATION) >= LARGE and not any(lever.name == _FABRIC for lever in found):
        why = f"other communication is exposed for {part(ranks, COMMUNICATION):.0%} of the step"
        change = "look for `Using network Socket` in a log with NCCL_DEBUG=INFO"
        found.append(Lever(_FABRIC, why, change, "Interconnect, HB 2200"))
    return found


def _of_exchange(share: float, against: Waiting | None, recipe: Recipe | None) -> Iterator[Lever]:
    exposed = f"all-to-all is exposed for {share:.0%} of the step"
    if against is None:
        why = f"{exposed}, and nothing says how much of that is waiting for the rank with most tokens"
        change = (
            "`moekit router` for MaxVio; then record once more with `balance.force_load_balancing: true`, as --control"
        )
        yield Lever("waiting or moving", why, change, "Profiling, HB 2153 and 2159")
        return
    if against.waiting_ms > SHORTER * against.all_to_all_ms:
        shorter = against.waiting_ms / against.all_to_all_ms
        why = (
            f"all-to-all is {shorter:.0%} shorter under forced balance: {against.waiting_ms:.1f} ms a step are waiting"
        )
        yield Lever("balance", why, "the balancers of handbook 3.3, one at a time", "Profiling, HB 2153 and 2159")
    why = f"{exposed}, and {against.moving_ms:.1f} ms a step stay under forced balance"
    change = "look for `Using network Socket` with NCCL_DEBUG=INFO; keep `parallel.expert_model` within a node"
    yield Lever(_FABRIC, why, change, "Interconnect, HB 2200 and 2202")
    if recipe and recipe.overlap.moe_expert_parallel_comm:
        return
    change = "`overlap: {moe_expert_parallel_comm: true, delay_wgrad_compute: true}`, where memory allows"
    if recipe and recipe.memory.recompute_granularity == "full":
        change += "; it cannot go with `memory.recompute_granularity: full`"
    yield Lever("overlap", exposed, change, "Overlap, HB 2295")


def remark(ranks: Sequence[Shares]) -> str:
    """What large share no lever of 3.7 is for, empty where there is none."""
    if any(rank.on_cpu for rank in ranks) or part(ranks, IDLE) < LARGE:
        return ""
    return f"idle for {part(ranks, IDLE):.0%}: nothing runs on the GPU, which waits for its host or another stage"
