"""Rules on communication behind computation, and on CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def gathers_overlap_with_what_they_need(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate. Source: megatron/training/arguments.py:993-995."""
    if not recipe.overlap.param_gather:
        return
    if not recipe.overlap.grad_reduce:
        yield Violation(
            ("overlap.param_gather", "overlap.grad_reduce"), "`overlap.param_gather` needs `overlap.grad_reduce`"
        )
    muon = recipe.optimizer.name == "dist_muon"
    if not (recipe.parallel.use_distributed_optimizer or recipe.parallel.use_megatron_fsdp or muon):
        yield Violation(
            ("overlap.param_gather", "parallel.use_distributed_optimizer"),
            "`overlap.param_gather` needs `parallel.use_distributed_optimizer`",
        )


def expert_overlap_needs_activations(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at config. Source: megatron/core/transformer/transformer_config.py:2690, 2752."""
    overlap = recipe.overlap
    if overlap.moe_expert_parallel_comm and recipe.memory.recompute_granularity == "full":
        yield Violation(
            ("overlap.moe_expert_parallel_comm", "memory.recompute_granularity"),
            "`overlap.moe_expert_parallel_comm` excludes `recompute_granularity: full`",
            "use `selective` with `memory.recompute_modules`, or unset it and its method and layers with `null`",
        )
    if overlap.delay_wgrad_compute and not overlap.moe_expert_parallel_comm:
        yield Violation(
            ("overlap.delay_wgrad_compute", "overlap.moe_expert_parallel_comm"),
            "`overlap.delay_wgrad_compute` needs `overlap.moe_expert_parallel_comm`",
        )


RULES: tuple[Rule, ...] = (
    gathers_overlap_with_what_they_need,
    expert_overlap_needs_activations,
)
