"""The JSON Schema of a data set's description, for editors, and the page of its fields."""

from __future__ import annotations

import json
from typing import Any

from moekit.data.dataset import Dataset
from moekit.data.dataset_rules import REQUIRED
from moekit.recipe.docs import field_list
from moekit.recipe.jsonschema import flat_schema


def schema_text() -> str:
    """The schema as it is written to `datasets/schema.json`."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, Any]:
    """The schema of a description."""
    whole = flat_schema(Dataset, "moekit data set", REQUIRED)
    fraction = whole["properties"]["keep_fraction"]
    fraction["exclusiveMinimum"] = fraction.pop("minimum")
    fraction["maximum"] = 1
    return whole


def reference() -> str:
    """Every field of a description, as a list."""
    return field_list(Dataset, REQUIRED)
