"""Rules on the transformer: sizes, attention, activation, prediction depths."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def needed_sizes_are_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron has no default for these: stops with `... argument is None`, at validate.

    Source: megatron/training/arguments.py:675, 1274-1277.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"):
        if getattr(recipe.model, name) is None:
            yield Violation((f"model.{name}",), f"`model.{name}` is missing", "Megatron has no default for it")
    if recipe.parallel.gpus is None:
        yield Violation(
            ("parallel.gpus",), "`parallel.gpus` is missing", "it is the run's world size, one process each"
        )


def heads_divide_the_width(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A bare assert, at validate. Source: megatron/training/arguments.py:1292-1294."""
    width, heads = recipe.model.hidden_size, recipe.model.num_attention_heads
    if width and heads and recipe.model.kv_channels is None and width % heads:
        yield Violation(
            ("model.num_attention_heads", "model.hidden_size"),
            f"{heads} attention heads do not divide model.hidden_size = {width}",
            "change one of them, or give a head's width as `model.kv_channels`",
        )


def query_groups_divide_heads(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A reshape error, at the first step; nothing before it looks. Seen on a CPU."""
    heads, groups = recipe.model.num_attention_heads, recipe.model.num_query_groups
    if heads and groups and heads % groups:
        yield Violation(
            ("model.num_query_groups", "model.num_attention_heads"),
            f"{groups} query groups do not divide model.num_attention_heads = {heads}",
            f"use one of {_divisors(heads)}",
        )


def query_groups_are_switched_on(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without the switch the groups are ignored and a wider model is trained; never noticed.

    Source: megatron/training/argument_utils.py:330-333.
    """
    if recipe.model.num_query_groups and not recipe.model.group_query_attention:
        yield Violation(
            ("model.num_query_groups", "model.group_query_attention"),
            "`model.num_query_groups` does nothing without `model.group_query_attention`",
            "add `group_query_attention: true`",
        )


def positions_cover_the_sequence(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate. Source: megatron/training/arguments.py:1314."""
    length, positions = recipe.model.seq_length, recipe.model.max_position_embeddings
    if length and positions and length > positions:
        yield Violation(
            ("model.max_position_embeddings", "model.seq_length"),
            f"model.max_position_embeddings = {positions} is below model.seq_length = {length}",
            f"use at least {length}",
        )


def one_activation(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A bare assert, at config. Source: megatron/training/argument_utils.py, `core_transformer_config_from_args`."""
    if recipe.model.swiglu and recipe.model.squared_relu:
        yield Violation(
            ("model.squared_relu", "model.swiglu"), "`model.swiglu` and `model.squared_relu` exclude each other"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


RULES: tuple[Rule, ...] = (
    needed_sizes_are_given,
    heads_divide_the_width,
    query_groups_divide_heads,
    query_groups_are_switched_on,
    positions_cover_the_sequence,
    one_activation,
)
