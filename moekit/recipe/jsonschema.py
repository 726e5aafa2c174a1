"""The JSON Schema of a recipe, for editors: hover shows a field's text, a typo is underlined."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from moekit.megatron.table import load, shipped
from moekit.recipe.build import is_section, markers
from moekit.recipe.docs import description, field_texts
from moekit.recipe.schema import Recipe
from moekit.recipe.schema.markers import AtLeast, Flag


def schema_text() -> str:
    """The schema as it is written to `recipes/schema.json`."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, Any]:
    """A recipe's schema; nothing is required, since a recipe with `base:` says only what it changes."""
    properties: dict[str, Any] = {}
    for name, (hint, _) in markers(Recipe).items():
        if is_section(hint):
            fields = {field: _field(hint, field) for field in markers(hint)}
            properties[name] = _object(fields, (hint.__doc__ or "").strip())
        else:
            properties[name] = {**_nullable(_type(hint)), "description": field_texts(Recipe)[name]}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "moekit recipe", **_object(properties)}


def _object(properties: dict[str, Any], text: str = "") -> dict[str, Any]:
    # "type" and not "anyOf": a typo then reads "`topkk` was unexpected" instead of "not valid under any of the schemas"
    described = {"description": text} if text else {}
    return {"type": ["object", "null"], **described, "additionalProperties": False, "properties": properties}


def _field(cls: Any, name: str) -> dict[str, Any]:
    hint, marks = markers(cls)[name]
    inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
    one = _type(inner)
    for mark in marks:
        if isinstance(mark, AtLeast):
            one["minimum"] = mark.least
        if isinstance(mark, Flag) and (choices := _choices(mark.option)):
            one = {**one, "enum": choices}
    if inner is not hint:  # a list, which may be written as one value
        one = {"type": [*one.pop("type"), "array"], "items": dict(one), **{k: v for k, v in one.items() if k != "enum"}}
        one["items"]["type"] = _type(inner)["type"]
    return {**_nullable(one), "description": description(cls, name)}


def _type(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        return {"type": ["string"], "enum": list(get_args(hint))}
    if get_origin(hint) is Mapping:
        return {"type": ["object"], "additionalProperties": {"type": ["string", "number", "boolean", "null"]}}
    if hasattr(hint, "parse"):
        return {"type": ["integer", "string", "array"]}
    # an unquoted 12 or 95,5,0 is text where the field is text
    names = {bool: ["boolean"], int: ["integer"], float: ["number"], str: ["string", "number"]}
    return {"type": names[hint]}


def _nullable(one: dict[str, Any]) -> dict[str, Any]:
    if "enum" in one:
        one["enum"] = [*one["enum"], None]
    return {**one, "type": [*one["type"], "null"]}


def _choices(option: str) -> list[Any]:
    """What any of the shipped Megatrons takes."""
    found: dict[Any, None] = {}
    for version in shipped():
        known = load(version).option(option)
        found.update(dict.fromkeys(known.choices if known else ()))
    return list(found)
