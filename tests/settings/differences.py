"""What a shipped recipe changes against the one it is built on."""

from __future__ import annotations

import json
import os
from typing import Any

from moekit import share
from moekit.recipe.load import find, load
from moekit.recipe.values import order, plain_values

ROOT = share.folder("recipes")


def base_of(name: str) -> str | None:
    """A name or path that loads what `name` inherits from; None for a whole recipe."""
    path = ROOT / f"{name}.yaml"
    given = load(name).recipe.base
    return given and os.path.relpath(find(given, path.parent).resolve())


def base_name(name: str) -> str:
    """The same as people call it: a shipped recipe's name, or a shape's."""
    base = base_of(name)
    assert base
    return os.path.relpath(base, ROOT).removesuffix(".yaml")


def changes(name: str) -> dict[str, tuple[Any, Any]]:
    """Dotted fields that differ from the base, summaries apart: the value there, and here; None where unset."""
    base = base_of(name)
    before = plain_values(load(base).recipe) if base else {}
    after = plain_values(load(name).recipe)
    names = sorted((name for name in {**before, **after} if name != "summary"), key=order)
    return {field: (before.get(field), after.get(field)) for field in names if before.get(field) != after.get(field)}


def sections(name: str) -> tuple[str, ...]:
    """The sections of these fields, in the schema's order, and top-level keys such as `benchmark`."""
    return tuple(dict.fromkeys(field.partition(".")[0] for field in changes(name)))


def shown(value: Any) -> str:
    """A value as a recipe writes it; a list of one as its element."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else json.dumps(value)
