"""A recipe to Megatron's arguments: one field, one option, in the schema's order.

Nothing is added that the recipe does not say; the options whose values are paths come from the launch
(`moekit.launch.run_files.owned_arguments`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moekit.recipe.build import markers
from moekit.recipe.load import sections
from moekit.recipe.schema import Recipe
from moekit.recipe.schema.markers import Flag


@dataclass(frozen=True, slots=True)
class Argument:
    """One option with its values, and the field that says it."""

    field: str
    """Dotted name, such as `router.topk`."""
    words: tuple[str, ...]
    """The option and its values, a word each."""


def arguments(recipe: Recipe) -> list[Argument]:
    """What the recipe's fields say, in the schema's order, and `megatron.extra` behind them."""
    found = []
    for section, cls in sections():
        values = getattr(recipe, section)
        for name, (_, marks) in markers(cls).items():
            for mark in marks:
                if isinstance(mark, Flag) and (words := _words(mark.option, getattr(values, name))):
                    found.append(Argument(f"{section}.{name}", words))
    if recipe.megatron.extra:
        found.append(Argument("megatron.extra", recipe.megatron.extra))
    return found


def argv(arguments: Iterable[Argument]) -> list[str]:
    """The arguments as one list of words."""
    return [word for argument in arguments for word in argument.words]


def _words(option: str, value: Any) -> tuple[str, ...]:
    if value is None or value is False:
        return ()
    if value is True:
        return (option,)
    values = value if isinstance(value, tuple) else (value,)
    return (option, *(_word(item) for item in values))


def _word(value: Any) -> str:
    """A value as Megatron's parser reads it; a float in its shortest exact form."""
    return repr(value) if isinstance(value, float) else str(value)
