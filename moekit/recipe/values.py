"""A recipe as a flat list of dotted names with plain values: what `show` and `diff` print."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from moekit.recipe.build import is_section
from moekit.recipe.load import Loaded, sections
from moekit.recipe.nodes import Mapping as Tree
from moekit.recipe.schema import Recipe


def plain_values(recipe: Recipe) -> dict[str, Any]:
    """Every value that is set, as JSON has it, by dotted name in the schema's order; variables one by one."""
    return dict(_plain(recipe, ""))


def _plain(section: Any, owner: str) -> Iterator[tuple[str, Any]]:
    for field in fields(section):
        name, value = owner + field.name, getattr(section, field.name)
        if value is None or name == "base":
            continue
        if is_section(value):
            yield from _plain(value, f"{name}.")
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, plain(value)


def plain(value: Any) -> Any:
    """A field's value as JSON has it."""
    if isinstance(value, tuple):
        return [*value]
    if isinstance(value, Mapping):
        return {**value}
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def differences(one: Loaded, other: Loaded) -> list[tuple[str, Any, Any]]:
    """(dotted name, value in `one`, value in `other`) of all that two recipes resolve to differently; None is unset."""
    a, b = plain_values(one.recipe), plain_values(other.recipe)
    names = sorted((name for name in {**a, **b} if a.get(name) != b.get(name)), key=order)
    return [(name, a.get(name), b.get(name)) for name in names]


def origins(loaded: Loaded) -> list[tuple[str, Any, str]]:
    """(dotted name, value, file:line) of all that the recipe's files mention, what they unset too, in reading order."""
    values = plain_values(loaded.recipe)
    unset = {name: None for name in _mentioned(loaded.source.tree, "") if name not in values and name != "base"}
    rows = []
    for name, value in {**values, **unset}.items():
        node = loaded.source.find(name)
        rows.append((name, value, str(node.place) if node else "moekit"))
    return sorted(rows, key=lambda row: order(row[0]))


def _mentioned(tree: Tree, owner: str) -> Iterator[str]:
    for key, (_, node) in tree.entries.items():
        if isinstance(node, Tree):
            yield from _mentioned(node, f"{owner}{key}.")
        else:
            yield owner + key


def order(name: str) -> int:
    """Where a dotted name stands in the schema, variables where their field does."""
    return _order()[".".join(name.split(".")[:2])]


@functools.cache
def _order() -> dict[str, int]:
    below = {section: [f"{section}.{field.name}" for field in fields(cls)] for section, cls in sections()}
    names = [name for field in fields(Recipe) for name in (field.name, *below.get(field.name, ()))]
    return {name: index for index, name in enumerate(names)}
