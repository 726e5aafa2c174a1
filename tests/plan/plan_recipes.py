"""Recipes that the planner's tests ask about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from moekit.recipe.load import Loaded, load

SECTIONS = ("megatron", "model", "moe", "router", "balance", "parallel", "train", "data")


def written(folder: Path, fields: dict[str, Any], name: str = "asked") -> Loaded:
    """A recipe of these sections, through a file as everybody's."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(fields, sort_keys=False))
    return load(str(path))


def public_models() -> dict[str, dict[str, Any]]:
    """The rows of `model_shapes.yaml` by name."""
    rows: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "model_shapes.yaml").read_text())
    del rows["defaults"]
    return rows


def of_row(folder: Path, row: dict[str, Any]) -> Loaded:
    """A public model's recipe."""
    fields = {section: row[section] for section in SECTIONS if section in row}
    fields["data"] = {"tokenizer_type": "NullTokenizer", "vocab_size": row["vocabulary"]}
    if "megatron" in fields:
        fields["megatron"] = {"extra": [str(word) for word in fields["megatron"]["extra"]]}
    return written(folder, fields)
