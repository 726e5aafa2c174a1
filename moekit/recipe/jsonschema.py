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
from moekit.recipe.sweep import CONTROL, FIELD_TEXTS


def schema_text() -> str:
    """The schema as it is written to `recipes/schema.json`."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, Any]:
    """The schema of a recipe or a sweep; nothing is required, since a recipe with `base:` says only what it changes."""
    properties: dict[str, Any] = {}
    for name, (hint, _) in markers(Recipe).items():
        if is_section(hint):
            fields = {field: field_schema(hint, field) for field in markers(hint)}
            properties[name] = object_schema(fields, (hint.__doc__ or "").strip())
        else:
            properties[name] = {**_nullable(_type(hint)), "description": field_texts(Recipe)[name]}
    properties |= _of_a_sweep([name for name in properties if name != "base"])
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "moekit recipe", **object_schema(properties)}


def _of_a_sweep(names: list[str]) -> dict[str, Any]:
    """The keys that make a file a sweep; a variant has what a recipe has, but for its base."""
    variant = object_schema({name: {"$ref": f"#/properties/{name}"} for name in names})
    several = {"type": "object", "minProperties": 1, "additionalProperties": variant}
    shapes = {"sweep": several, "ladder": several, "control": {"type": ["string", "null"], "enum": [CONTROL, None]}}
    return {name: {**shape, "description": FIELD_TEXTS[name]} for name, shape in shapes.items()}


def object_schema(properties: dict[str, Any], text: str = "") -> dict[str, Any]:
    """The schema of a mapping that has these keys and no other; null unsets it."""
    # "type" and not "anyOf": a typo then reads "`topkk` was unexpected" instead of "not valid under any of the schemas"
    described = {"description": text} if text else {}
    return {"type": ["object", "null"], **described, "additionalProperties": False, "properties": properties}


def flat_schema(cls: Any, title: str, required: tuple[str, ...]) -> dict[str, Any]:
    """The schema of a file that says one dataclass's fields and nothing else; `required` ones may not be null."""
    properties = {name: field_schema(cls, name) for name in markers(cls)}
    for name in required:
        properties[name] = {key: _without_null(value) for key, value in properties[name].items()}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    return {**head, **object_schema(properties), "type": "object", "required": list(required)}


def _without_null(value: Any) -> Any:
    return [item for item in value if item not in (None, "null")] if isinstance(value, list) else value


def field_schema(cls: Any, name: str) -> dict[str, Any]:
    """The schema of one field of a dataclass."""
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
