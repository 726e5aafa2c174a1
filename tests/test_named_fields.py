"""Fields of the recipe that messages, docstrings and pages name are fields of the recipe."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import moekit
from moekit.recipe.load import sections

PACKAGE = Path(moekit.__file__).parent
ROOT = PACKAGE.parent
FIELDS = {name: {field.name for field in fields(section)} for name, section in sections()}
NAMED = re.compile(rf"`((?:{'|'.join(FIELDS)})\.[a-z_0-9]+)(?::[^`\n]*)?`")
ELSEWHERE = {"train.log", "train.sh", "megatron.training"}
"""Files, and a module."""
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(PACKAGE.rglob("*.py"))]


def strangers(text: str) -> list[str]:
    """The fields that `text` names and that are none."""
    found = (match[1] for match in NAMED.finditer(text))
    return [name for name in found if name not in ELSEWHERE and name.split(".")[1] not in FIELDS[name.split(".")[0]]]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_field_that_is_named_is_there(path: Path) -> None:
    assert strangers(path.read_text(encoding="utf-8")) == []


def test_a_field_that_is_none_is_seen() -> None:
    assert strangers("`moe.num_experts`, `moe.topk: 8` and `router.topk: 8`; `train.log`") == ["moe.topk"]
