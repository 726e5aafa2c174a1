"""`runtime.device: cpu`: the limits of `moekit.megatron.cpu_limits`, at the lines of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moekit.megatron import flags, table
from moekit.megatron.cpu_limits import Limit, cpu_limits
from moekit.problems import Problem
from moekit.recipe.load import Loaded


def cpu_problems(loaded: Loaded) -> Iterator[Problem]:
    """What a CPU cannot do of a recipe, at the fields that ask for it."""
    arguments = flags.arguments(loaded.recipe)
    known = table.load(loaded.recipe.megatron.version)

    def limits(without: flags.Argument | None = None) -> list[Limit]:
        words = flags.argv(argument for argument in arguments if argument is not without)
        values: dict[str, Any] = table.parse_values(words, known)
        return cpu_limits(values)

    for limit in limits():
        name, value = _OFF.get(limit.feature, ("", ""))
        fields = [argument.field for argument in arguments if limit not in limits(argument)]
        place = loaded.source.where(*([f"model.{name}"] if name else []), *fields, "runtime.device")
        hint = f"add `{name}: {value}` to `model`" if name else ""
        yield Problem(place, f"a CPU has no {limit.feature}: {limit.reason}", hint)


_OFF = {
    "rotary embedding fusion": ("no_rope_fusion", "true"),
    "masked softmax fusion": ("no_masked_softmax_fusion", "true"),
    "gradient accumulation fusion": ("no_gradient_accumulation_fusion", "true"),
    "persistent layer norm": ("no_persist_layer_norm", "true"),
    "Transformer Engine's layers": ("transformer_impl", "local"),
}
"""What Megatron does unless told not to, and the field of `model` that tells it."""
