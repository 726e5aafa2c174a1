"""Rules on what is computed again, moved to the host or fused."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def recompute_is_said_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at config. Source: megatron/core/transformer/transformer_config.py:1739-1754."""
    memory = recipe.memory
    for name in ("recompute_method", "recompute_num_layers"):
        if memory.recompute_granularity == "full" and not getattr(memory, name):
            yield Violation(
                ("memory.recompute_granularity", f"memory.{name}"),
                f"`recompute_granularity: full` needs `memory.{name}`",
                "the dense baseline uses `uniform` with `recompute_num_layers: 1` (handbook 2.4)",
            )
    if memory.recompute_granularity == "selective" and (memory.recompute_num_layers or memory.recompute_method):
        name = "recompute_num_layers" if memory.recompute_num_layers else "recompute_method"
        yield Violation(
            (f"memory.{name}", "memory.recompute_granularity"),
            f"`memory.{name}` belongs to `recompute_granularity: full`, not to `selective`",
            "unset it with `null`",
        )


def fused_cross_entropy_runs(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate (megatron/training/arguments.py:1645; megatron/training/determinism.py:24)."""
    memory = recipe.memory
    if memory.cross_entropy_loss_fusion and memory.cross_entropy_fusion_impl == "te":
        yield Violation(
            ("memory.cross_entropy_fusion_impl",),
            "Megatron switched Transformer Engine's fused cross-entropy off",
            "use `native`",
        )
    if memory.cross_entropy_loss_fusion and recipe.precision.deterministic_mode:
        yield Violation(
            ("precision.deterministic_mode", "memory.cross_entropy_loss_fusion"),
            "`precision.deterministic_mode` excludes `memory.cross_entropy_loss_fusion`",
            "unset the fusion with `null`",
        )


RULES: tuple[Rule, ...] = (
    recompute_is_said_whole,
    fused_cross_entropy_runs,
)
