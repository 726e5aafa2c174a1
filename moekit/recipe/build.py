"""A node tree and a dataclass to an instance: the field's type decides how a scalar is read.

Nothing is coerced and nothing is skipped: an unknown key, a wrong type or a value out of bounds is a problem with its
own place, and all of them are collected.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moekit.problems import CONTROL, Problem, did_you_mean, shortened
from moekit.recipe import nodes
from moekit.recipe.names import VARIABLE, is_secret
from moekit.recipe.schema.markers import AtLeast, FreeText

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_MOST_DIGITS = 18


class Refused(Exception):
    """A value that a field cannot take; becomes a `Problem` at the value's place."""

    def __init__(self, what: str, hint: str = "", place: nodes.Place | None = None) -> None:
        super().__init__(what)
        self.what, self.hint, self.place = what, hint, place


@functools.cache
def markers(cls: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """For each field of a dataclass, its type without null and its markers (`Flag`, `AtLeast`, ...)."""
    hints = {field.name: field.type for field in fields(cls)}
    if any(isinstance(hint, str) for hint in hints.values()):  # the module postpones its annotations
        hints = get_type_hints(cls, include_extras=True)
    return {field.name: _unwrapped(hints[field.name]) for field in fields(cls)}


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    marks = getattr(hint, "__metadata__", ())
    hint = getattr(hint, "__origin__", hint) if marks else hint
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    return hint, marks


def build[T](
    cls: type[T], node: nodes.Mapping, problems: list[Problem], owner: str = "", elsewhere: Elsewhere | None = None
) -> T:
    """An instance of dataclass `cls` from a mapping; what cannot be taken is left unset and added to `problems`.

    `owner` is the dotted name of the mapping. `elsewhere` names the field that says an unknown key, if there is one.
    """
    known = markers(cls)  # type: ignore[arg-type]  # a class is hashable
    values: dict[str, Any] = {}
    for key, (place, value) in node.entries.items():
        name = f"{owner}.{key}" if owner else key
        if key not in known:
            problems.append(_unknown(place, key, owner, known, elsewhere))
            continue
        hint, marks = known[key]
        if is_section(hint):
            if isinstance(value, nodes.Mapping):
                values[key] = build(hint, value, problems, name, elsewhere)
            elif not (isinstance(value, nodes.Scalar) and value.is_null):
                problems.append(Problem(str(value.place), f"`{name}` must be a section of `key: value` lines"))
            continue
        try:
            values[key] = _value(value, hint, marks)
        except Refused as refused:
            problems.append(Problem(str(refused.place or value.place), f"`{name}` {refused.what}", refused.hint))
    for required in (f for f in fields(cls) if _is_required(f) and f.name not in values):  # type: ignore[arg-type]
        if required.name not in node.entries:
            problems.append(Problem(str(node.place), f"`{required.name}` is missing"))
        values[required.name] = None
    return cls(**{key: value for key, value in values.items() if value is not None or not _has_value(cls, key)})


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _has_value(cls: Any, key: str) -> bool:
    """Whether a field's default is a value and not null: null in the recipe then means that default."""
    default = next(field.default for field in fields(cls) if field.name == key)
    return default is not None and default is not MISSING


Elsewhere = Callable[[str], str | None]


def _unknown(
    place: nodes.Place, key: str, owner: str, known: Mapping[str, Any], elsewhere: Elsewhere | None
) -> Problem:
    name = f"{owner}.{key}" if owner else key
    said = elsewhere(key) if elsewhere else None
    if said and said.rpartition(".")[2] == key:
        hint = f"did you mean `{said}`?"
    elif said:
        hint = f"that is Megatron's name; in a recipe it is `{said}`"
    else:
        every = ", ".join(f"`{name}`" for name in known)
        hint = did_you_mean(key, known) or (
            f"there are {every}" if len(known) < 24 else "`moekit schema` lists every field"
        )
    kind = "section" if not owner and any(is_section(hint) for hint, _ in known.values()) else "field"
    return Problem(str(place), f"unknown {kind} `{shortened(name)}`", hint)


def is_section(hint: Any) -> bool:
    """Whether a field's type is a section of further fields, and not a value."""
    return is_dataclass(hint) and not hasattr(hint, "parse")


def _value(node: nodes.Node, hint: Any, marks: tuple[Any, ...]) -> Any:
    if isinstance(node, nodes.Scalar) and node.is_null:
        return None
    origin = get_origin(hint)
    if origin is tuple:
        items = node.items if isinstance(node, nodes.Sequence) else (node,)
        if not items:
            raise Refused("is an empty list", "write `null` to unset it")
        for item in items:
            if isinstance(item, nodes.Scalar) and item.is_null:
                raise Refused("has an empty item", place=item.place)
        return tuple(_element(item, get_args(hint)[0], marks) for item in items)
    if origin is Mapping:
        return _environment(node)
    if hasattr(hint, "parse") and isinstance(node, nodes.Sequence):
        node = nodes.Scalar(node.place, "[" + ",".join(_text(item) for item in node.items) + "]", True)
    return _element(node, hint, marks)


def _element(node: nodes.Node, hint: Any, marks: tuple[Any, ...]) -> Any:
    if not isinstance(node, nodes.Scalar):
        raise Refused(f"must be {_kind(hint)}, not a {'list' if isinstance(node, nodes.Sequence) else 'section'}")
    value = _scalar(node, hint, marks)
    for mark in marks:
        if isinstance(mark, AtLeast) and value < mark.least:
            raise Refused(f"must be at least {mark.least:g}, not {node.text}")
    return value


def _scalar(node: nodes.Scalar, hint: Any, marks: tuple[Any, ...]) -> Any:
    text = node.text
    if hint is str:
        if any(isinstance(mark, FreeText) for mark in marks):
            return text.strip()
        if not text:
            raise Refused("is empty", "write `null` to unset it")
        return _one_line(text)
    if hasattr(hint, "parse"):
        try:
            return hint.parse(text)
        except ValueError as reason:
            raise Refused(f"`{shortened(text)}` {reason}") from None
    if get_origin(hint) is Literal:
        return one_of(text, get_args(hint))
    if node.plain and hint is bool and text in ("true", "false"):
        return text == "true"
    if node.plain and hint is int and _INT.fullmatch(text) and len(text) <= _MOST_DIGITS:
        return int(text)
    if node.plain and hint is float and _FLOAT.fullmatch(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise Refused(f"must be a finite number, not `{shortened(text)}`")
        return number
    raise Refused(f"must be {_kind(hint)}, not `{shortened(text)}`", _type_hint(node, hint))


def one_of(text: str, choices: tuple[str, ...]) -> str:
    """`text` if it is among `choices`, else refused with the closest."""
    if text in choices:
        return text
    raise Refused(f"must be one of {', '.join(choices)}, not `{shortened(text)}`", did_you_mean(text, choices))


def _one_line(text: str) -> str:
    if found := CONTROL.search(text):
        name = "a newline" if found.group() == "\n" else f"a control character ({found.group()!r})"
        raise Refused(f"has {name}, which no command line carries")
    return text


def _environment(node: nodes.Node) -> dict[str, str | None]:
    if not isinstance(node, nodes.Mapping):
        raise Refused("must be `NAME: value` lines")
    result: dict[str, str | None] = {}
    for name, (place, value) in node.entries.items():
        if not VARIABLE.fullmatch(name):
            what = f"has the name `{shortened(name)}`; a variable's has letters, digits and `_`"
            raise Refused(what, place=place)
        if not isinstance(value, nodes.Scalar):
            raise Refused(f"has no plain value for `{name}`", place=place)
        if is_secret(name) and not value.is_null:
            raise Refused(
                f"gives `{name}` a value",
                f"a secret travels by name only: set it in your shell; a recipe says `runtime.secrets: [{name}]`",
                place,
            )
        result[name] = None if value.is_null else _one_line(value.text)
    return result


def _kind(hint: Any) -> str:
    if hint is bool:
        return "`true` or `false`"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    return {int: "an integer", float: "a number", str: "text"}.get(hint, "text")


def _type_hint(node: nodes.Scalar, hint: Any) -> str:
    if not node.plain and (node.text in ("true", "false") if hint is bool else _FLOAT.fullmatch(node.text)):
        return "write it without quotes"
    lowered = node.text.lower()
    if hint is bool and lowered in ("yes", "on", "y", "true", "1"):
        return "write `true`"
    if hint is bool and lowered in ("no", "off", "n", "false", "0"):
        return "write `false`"
    if hint is int and len(node.text) > _MOST_DIGITS:
        return f"at most {_MOST_DIGITS} digits"
    if hint is int and _FLOAT.fullmatch(node.text) and float(node.text).is_integer() and abs(float(node.text)) < 1e15:
        return f"write `{int(float(node.text))}`"
    return ""


def _text(node: nodes.Node) -> str:
    return node.text if isinstance(node, nodes.Scalar) else "?"
