"""A recipe with other values, and what changed, told to its writer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moekit.recipe.build import markers
from moekit.recipe.load import sections
from moekit.recipe.schema import Recipe

Changes = Mapping[str, Any]
"""New values by dotted name; None unsets."""


@dataclass(frozen=True)
class Change:
    """One field of a small recipe that differs from the user's."""

    field: str
    """Dotted name, such as `model.hidden_size`."""
    value: Any
    """The new value; None: unset."""
    why: str = ""
    """Empty where it is a size, or what keeps the run short."""


def value(recipe: Recipe, field: str) -> Any:
    """What a recipe says of a dotted name; None where it says nothing."""
    section, _, name = field.partition(".")
    return getattr(getattr(recipe, section), name)


def changed(recipe: Recipe, changes: Changes) -> Recipe:
    """The recipe with other values."""
    new: dict[str, dict[str, Any]] = {}
    for field, to in changes.items():
        section, _, name = field.partition(".")
        new.setdefault(section, {})[name] = to
    return replace(recipe, **{name: replace(getattr(recipe, name), **values) for name, values in new.items()})


def differences(before: Recipe, after: Recipe, why: Mapping[str, str]) -> tuple[Change, ...]:
    """Every field in which two recipes differ, in the schema's order."""
    fields = [f"{section}.{name}" for section, cls in sections() for name in markers(cls)]
    return tuple(
        Change(field, value(after, field), why.get(field, ""))
        for field in fields
        if value(before, field) != value(after, field)
    )
