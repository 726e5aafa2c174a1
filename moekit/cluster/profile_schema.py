"""The JSON Schema of a cluster profile, for editors, and the page of its fields."""

from __future__ import annotations

import json
from typing import Any

from moekit.cluster.profile import Cluster
from moekit.cluster.profile_rules import REQUIRED
from moekit.recipe.docs import field_list
from moekit.recipe.jsonschema import flat_schema


def schema_text() -> str:
    """The schema as it is written to `slurm/clusters/schema.json`."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, Any]:
    """A profile's schema."""
    return flat_schema(Cluster, "moekit cluster profile", REQUIRED)


def reference() -> str:
    """Every field of a profile, as a list."""
    return field_list(Cluster, REQUIRED)
