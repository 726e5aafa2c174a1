"""A recipe as one flat, complete YAML text: what a run keeps of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from moekit.recipe.build import is_section
from moekit.recipe.schema import Recipe

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*")
_READ_OTHERWISE = frozenset(["null", "true", "false", "yes", "no", "on", "off", "y", "n"])


def flat_yaml(recipe: Recipe) -> str:
    """Every value of a recipe, inherited ones too, as a YAML text that loads to an equal recipe, less its `base`."""
    return "".join(f"{line}\n" for line in _section(recipe, ""))


def _section(section: Any, indent: str) -> Iterator[str]:
    for name in (field.name for field in fields(section)):
        value = getattr(section, name)
        if value is None or name == "base":
            continue
        if is_section(value):
            body = list(_section(value, indent + "  "))
            if body:
                yield from (f"{indent}{name}:", *body)
        elif isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            for key, item in value.items():
                yield f"{indent}  {_text(key)}: {'null' if item is None else _text(item)}"
        else:
            yield f"{indent}{name}: {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    return "{}" if isinstance(value, Mapping) else _text(str(value))


def _text(text: str) -> str:
    """A scalar that every YAML reader takes for this text, on one line."""
    if _PLAIN.fullmatch(text) and text.lower() not in _READ_OTHERWISE:
        return text
    return '"' + "".join(_escaped(letter) for letter in text) + '"'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"
