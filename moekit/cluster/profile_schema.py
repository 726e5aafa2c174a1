"""The JSON Schema of a cluster profile, for editors, and the page of its fields."""

from __future__ import annotations

import json
from typing import Any

from moekit.cluster.profile import Cluster
from moekit.cluster.profile_rules import REQUIRED
from moekit.recipe.build import markers
from moekit.recipe.docs import field_texts
from moekit.recipe.jsonschema import field_schema, object_schema


def schema_text() -> str:
    """The schema as it is written to `slurm/clusters/schema.json`."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, Any]:
    """A profile's schema."""
    properties = {name: field_schema(Cluster, name) for name in markers(Cluster)}
    for name in REQUIRED:
        properties[name] = {key: _without_null(value) for key, value in properties[name].items()}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "moekit cluster profile"}
    return {**head, **object_schema(properties), "type": "object", "required": list(REQUIRED)}


def _without_null(value: Any) -> Any:
    return [item for item in value if item not in (None, "null")] if isinstance(value, list) else value


def reference() -> str:
    """Every field of a profile, as a list."""
    texts = field_texts(Cluster)
    needed = dict.fromkeys(REQUIRED, " Needed.")
    return "".join(f"- **`{name}`** {texts[name]}{needed.get(name, '')}\n" for name in markers(Cluster))
