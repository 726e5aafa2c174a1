"""Facts across fields that Megatron needs, each one small function that changes nothing.

A rule's docstring says what happens without it, the one stage at which Megatron itself would notice, and the source:
`Megatron, STAGE: ...`, where STAGE is one of `STAGES`. Lines are those of megatron-core 0.19.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from moekit.recipe.rules import (
    attention,
    balance,
    batch,
    checkpoint,
    companions,
    data,
    dispatch,
    dispatch_libraries,
    environment,
    exchange_formats,
    expert_bias,
    expert_overlap,
    experts,
    extra,
    graphs,
    grouped_experts,
    hybrid,
    interleaving,
    layers,
    memory,
    monitor,
    muon,
    network,
    offload,
    optimizer,
    output,
    overlap,
    parallel,
    pipeline,
    positions,
    precision,
    reproducible,
    resilience,
    routing,
    schedule,
    shared,
    upcycling,
)
from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe

MODULES = (
    layers,
    attention,
    positions,
    parallel,
    pipeline,
    interleaving,
    experts,
    shared,
    upcycling,
    hybrid,
    dispatch,
    dispatch_libraries,
    grouped_experts,
    routing,
    balance,
    expert_bias,
    batch,
    data,
    schedule,
    optimizer,
    muon,
    precision,
    exchange_formats,
    reproducible,
    memory,
    offload,
    overlap,
    expert_overlap,
    graphs,
    output,
    monitor,
    checkpoint,
    resilience,
    network,
    environment,
    companions,
    extra,
)

RULES: tuple[Rule, ...] = tuple(rule for module in MODULES for rule in module.RULES)

STAGES = ("parse", "validate", "config", "schedule", "groups", "build", "first step", "later", "never")
"""When Megatron notices: `later` is hours into the run, `never` means that it trains something else without a word."""


def violations(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Everything in the recipe that Megatron would refuse, or would take and not mean."""
    for rule in RULES:
        yield from rule(recipe, target)


def stage_of(rule: Rule) -> str:
    """The stage of `STAGES` at which Megatron would notice, as the rule's docstring says it."""
    found = re.search(rf"^ *Megatron, ({'|'.join(STAGES)}):", rule.__doc__ or "", re.MULTILINE)
    if found is None:
        raise ValueError(f"the docstring of `{rule.__name__}` has no line `Megatron, STAGE: ...`")
    return found.group(1)
