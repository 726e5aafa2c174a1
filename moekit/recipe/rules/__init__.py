"""Facts across fields that Megatron needs, each one small function that changes nothing.

A rule's docstring says what happens without it, the stage at which Megatron itself would notice (parse, validate,
config, schedule, groups, build, first step, never) and the source. Lines are those of megatron-core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules import batch, experts, layers, output, schedule
from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe

RULES: tuple[Rule, ...] = (*layers.RULES, *experts.RULES, *batch.RULES, *schedule.RULES, *output.RULES)


def violations(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Everything in the recipe that Megatron would refuse, or would take and not mean."""
    for rule in RULES:
        yield from rule(recipe, target)
