"""How a field's type reads a scalar, and what it says where it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Annotated, Any, Literal

import pytest

from moekit.problems import Problem
from moekit.recipe import nodes
from moekit.recipe.build import build, markers
from moekit.recipe.patterns import LayerPattern
from moekit.recipe.schema.markers import AtLeast, Flag, FreeText
from moekit.recipe.schema.moe import Moe


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    whole: Annotated[int | None, AtLeast(1)] = None
    number: Annotated[float | None, Flag("--number"), AtLeast(0)] = None
    switch: bool | None = None
    word: str | None = None
    note: Annotated[str | None, FreeText()] = None
    choice: Literal["left", "right"] | None = None
    wholes: Annotated[tuple[int, ...] | None, AtLeast(0)] = None
    words: tuple[str, ...] | None = None
    pattern: LayerPattern | None = None
    variables: Mapping[str, str | None] | None = None
    kept: str = "default"
    inner: Inner | None = None


def read(text: str) -> tuple[Shape, list[Problem]]:
    problems: list[Problem] = []
    tree = nodes.parse(text, "x.yaml", problems)
    return build(Shape, tree, problems), problems


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("whole: 12", "whole", 12),
        ("whole: +12", "whole", 12),
        ("whole: 1_000_000", "whole", 1_000_000),
        ("number: 1", "number", 1.0),
        ("number: 1e-3", "number", 1e-3),
        ("number: 5.0E-4", "number", 5e-4),
        ("number: .5", "number", 0.5),
        ("number: 2.", "number", 2.0),
        ("switch: true", "switch", True),
        ("switch: false", "switch", False),
        ("word: 8", "word", "8"),
        ("word: yes", "word", "yes"),
        ("word: 12:00:00", "word", "12:00:00"),
        ('word: "null"', "word", "null"),
        ("word: ' a  b '", "word", " a  b "),
        ("note: |\n  one\n  two\n", "note", "one\ntwo"),
        ("choice: left", "choice", "left"),
        ("wholes: 3", "wholes", (3,)),
        ("wholes: [3, 4]", "wholes", (3, 4)),
        ("words: [--a, 1]", "words", ("--a", "1")),
        ("pattern: 2", "pattern", LayerPattern.parse("2")),
        ("pattern: [0, 1]", "pattern", LayerPattern.parse("[0,1]")),
        ("pattern: ([0]*1+[1]*3)", "pattern", LayerPattern.parse("([0]*1+[1]*3)")),
        ("variables: {A: 1, b_2: null, C: ''}", "variables", {"A": "1", "b_2": None, "C": ""}),
        ("kept: null", "kept", "default"),
        ("kept: other", "kept", "other"),
        ("inner: {count: 2}", "inner", Inner(count=2)),
        ("inner: null", "inner", None),
    ],
)
def test_taken(text: str, name: str, value: Any) -> None:
    shape, problems = read(text)
    assert problems == []
    assert getattr(shape, name) == value
    assert type(getattr(shape, name)) is type(value)


@pytest.mark.parametrize("name", list(markers(Shape)))
def test_null_unsets_every_field(name: str) -> None:
    assert read(f"{name}: null") == (Shape(), [])


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("whole: 0", "`whole` must be at least 1, not 0", ""),
        ("whole: 1.0", "`whole` must be an integer, not `1.0`", "write `1`"),
        ("whole: 1e3", "`whole` must be an integer, not `1e3`", "write `1000`"),
        ("whole: 1.5", "`whole` must be an integer, not `1.5`", ""),
        ("whole: '1'", "`whole` must be an integer, not `1`", "write it without quotes"),
        ("whole: 1_", "`whole` must be an integer, not `1_`", ""),
        ("whole: 0b1", "`whole` must be an integer, not `0b1`", ""),
        ("whole: true", "`whole` must be an integer, not `true`", ""),
        ("whole: 1e300", "`whole` must be an integer, not `1e300`", ""),
        (f"whole: {'9' * 5000}", f"`whole` must be an integer, not `{'9' * 57}...`", "at most 18 digits"),
        ("number: .inf", "`number` must be a number, not `.inf`", ""),
        ("number: nan", "`number` must be a number, not `nan`", ""),
        ("number: 1e400", "`number` must be a finite number, not `1e400`", ""),
        ("number: 1_0.0", "`number` must be a number, not `1_0.0`", ""),
        ("number: '1e-3'", "`number` must be a number, not `1e-3`", "write it without quotes"),
        ("switch: yes", "`switch` must be `true` or `false`, not `yes`", "write `true`"),
        ("switch: True", "`switch` must be `true` or `false`, not `True`", "write `true`"),
        ("switch: off", "`switch` must be `true` or `false`, not `off`", "write `false`"),
        ("switch: 'true'", "`switch` must be `true` or `false`, not `true`", "write it without quotes"),
        ("switch: 2", "`switch` must be `true` or `false`, not `2`", ""),
        ("word: ''", "`word` is empty", "write `null` to unset it"),
        ("word: [a]", "`word` must be text, not a list", ""),
        ("word: {a: b}", "`word` must be text, not a section", ""),
        ('word: "a\\tb"', "`word` has a control character ('\\t'), which no command line carries", ""),
        ("choice: lefft", "`choice` must be one of left, right, not `lefft`", "did you mean `left`?"),
        ("wholes: []", "`wholes` is an empty list", "write `null` to unset it"),
        ("wholes: [1, -1]", "`wholes` must be at least 0, not -1", ""),
        ("wholes: [1, [2]]", "`wholes` must be an integer, not a list", ""),
        ("words: [a, null]", "`words` has an empty item", ""),
        ("pattern: [0, [1]]", "`pattern` `[0,?]` may only have digits and `[ ] ( ) + * ,`", ""),
        ("variables: {1A: x}", "`variables` has the name `1A`; a variable's has letters, digits and `_`", ""),
        ("inner: 2", "`inner` must be a section of `key: value` lines", ""),
        ("inner: {cuont: 2}", "unknown field `inner.cuont`", "did you mean `count`?"),
    ],
)
def test_refused(text: str, what: str, hint: str) -> None:
    shape, problems = read(text)
    assert problems == [Problem("x.yaml:1", what, hint)]
    assert shape in (Shape(), Shape(inner=Inner()))


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "my_password", "aws_secret_access_key"])
def test_a_secret_has_no_value_in_a_file(name: str) -> None:
    shape, problems = read(f"variables:\n  A: 1\n  {name}: hf_abcdefgh\n")
    assert [problem.where for problem in problems] == ["x.yaml:3"]
    assert "hf_abcdefgh" not in problems[0].what + problems[0].hint
    assert shape.variables is None


def test_all_problems_come_at_once() -> None:
    _, problems = read("whole: a\nnumber: b\nswitch: c\nwrod: d\n")
    assert [problem.where for problem in problems] == ["x.yaml:1", "x.yaml:2", "x.yaml:3", "x.yaml:4"]


def test_a_section_is_frozen_and_compared_by_value() -> None:
    moe = Moe(num_experts=8)
    with pytest.raises(FrozenInstanceError):
        moe.num_experts = 9  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del moe.num_experts
    with pytest.raises(TypeError, match="Moe has no field topk"):
        Moe(topk=8)
    assert moe == replace(Moe(), num_experts=8)
    assert hash(moe) == hash(Moe(num_experts=8))
    assert moe != Moe()
    assert repr(moe) == "Moe(num_experts=8)"
