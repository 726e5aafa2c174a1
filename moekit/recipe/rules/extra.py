"""Rules on `megatron.extra`, Megatron's options as they are."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe

_REMOVED = {
    "--batch-size": "train.micro_batch_size",
    "--warmup": "schedule.warmup_fraction",
    "--model-parallel-size": "parallel.tensor_model",
    "--checkpoint-activations": "memory.recompute_granularity",
}


def removed_options_are_left_out(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron's parser still has some options, only to say that they are gone.

    Megatron, validate: `--batch-size argument is no longer valid` and its like
    (megatron/training/arguments.py:573-586).
    """
    for option, field in _REMOVED.items():
        if option in (recipe.megatron.extra or ()):
            yield Violation(
                ("megatron.extra", field), f"`megatron.extra` says `{option}`, which Megatron removed", f"use `{field}`"
            )


RULES: tuple[Rule, ...] = (removed_options_are_left_out,)
