"""YAML to places and texts, and inheritance between trees."""

from __future__ import annotations

import pytest

from moekit.problems import MoekitError, Problem
from moekit.recipe import nodes
from moekit.recipe.nodes import Mapping, Scalar, Sequence, merged


def parse(text: str) -> Mapping:
    problems: list[Problem] = []
    tree = nodes.parse(text, "x.yaml", problems)
    assert problems == []
    return tree


def as_plain(node: object) -> object:
    if isinstance(node, Mapping):
        return {key: as_plain(value) for key, (_, value) in node.entries.items()}
    if isinstance(node, Sequence):
        return [as_plain(item) for item in node.items]
    assert isinstance(node, Scalar)
    return None if node.is_null else node.text


def test_nothing_is_coerced() -> None:
    tree = parse("a: [yes, 010, 1_000, 12:00:00, 3e-4, 0x10, 2026-01-01, .inf]\non: no\n")
    texts = ["yes", "010", "1_000", "12:00:00", "3e-4", "0x10", "2026-01-01", ".inf"]
    assert as_plain(tree) == {"a": texts, "on": "no"}


@pytest.mark.parametrize("spelled", ["", "~", "null", "Null", "NULL"])
def test_null_is_null_without_quotes_only(spelled: str) -> None:
    assert as_plain(parse(f"a: {spelled}\n")) == {"a": None}
    assert as_plain(parse(f'a: "{spelled}"\n')) == {"a": spelled}
    assert as_plain(parse(f"a: '{spelled}'\n")) == {"a": spelled}


def test_every_key_and_value_knows_its_line() -> None:
    tree = parse("# first\nmoe:\n  topk:\n    8\n  list:\n  - a\n  - b\n")
    place, moe = tree.entries["moe"]
    assert (str(place), str(moe.place)) == ("x.yaml:2", "x.yaml:3")
    assert isinstance(moe, Mapping)
    place, topk = moe.entries["topk"]
    assert (str(place), str(topk.place)) == ("x.yaml:3", "x.yaml:4")
    listed = moe.entries["list"][1]
    assert isinstance(listed, Sequence)
    assert [str(item.place) for item in listed.items] == ["x.yaml:6", "x.yaml:7"]


@pytest.mark.parametrize(
    ("parent", "child", "result"),
    [
        ("{a: {b: 1, c: 2}}", "{a: {c: 3}}", {"a": {"b": "1", "c": "3"}}),
        ("{a: [1, 2]}", "{a: [3]}", {"a": ["3"]}),
        ("{a: {b: 1}}", "{a: null}", {"a": None}),
        ("{a: null}", "{a: {b: 1}}", {"a": {"b": "1"}}),
        ("{a: {b: {c: 1, d: 2}}}", "{a: {b: {c: null}}}", {"a": {"b": {"c": None, "d": "2"}}}),
        ("{a: 1}", "{b: 2}", {"a": "1", "b": "2"}),
        ("{a: {b: 1}}", "{a: 2}", {"a": "2"}),
    ],
)
def test_inheritance(parent: str, child: str, result: object) -> None:
    above, below = parse(parent), parse(child)
    before = as_plain(above), as_plain(below)
    assert as_plain(merged(above, below)) == result
    assert (as_plain(above), as_plain(below)) == before


def test_merged_values_keep_their_places() -> None:
    parent = nodes.parse("a:\n  b: 1\n  c: 2\n", "parent.yaml", [])
    child = nodes.parse("\n\na: {c: 3}\n", "child.yaml", [])
    a = merged(parent, child).entries["a"][1]
    assert isinstance(a, Mapping)
    assert {key: str(node.place) for key, (_, node) in a.entries.items()} == {
        "b": "parent.yaml:2",
        "c": "child.yaml:3",
    }


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_line_ends_and_a_byte_order_mark_change_nothing(line_end: str) -> None:
    text = "\ufeffmoe:\n  topk: 8\n".replace("\n", line_end)
    tree = nodes.parse(text, "x.yaml", [])
    assert as_plain(tree) == {"moe": {"topk": "8"}}
    assert str(tree.entries["moe"][1].place) == "x.yaml:2"


@pytest.mark.parametrize("letter", ["\x00", "\x07", "\x1b", "\x7f", "\x80", "\ufffe"])
def test_a_control_character_is_found_at_its_line(letter: str) -> None:
    with pytest.raises(MoekitError) as refused:
        nodes.parse(f"a: naïve\nb: 1\nc: x{letter}y\n", "x.yaml", [])
    assert [problem.where for problem in refused.value.problems] == ["x.yaml:3"]
    assert "control character" in refused.value.problems[0].what


@pytest.mark.parametrize("escape", ["\\ud800", "\\udfff", "\\xq", "\\U00110000"])
def test_escapes_of_no_character_are_refused(escape: str) -> None:
    with pytest.raises(MoekitError) as refused:
        nodes.parse(f'a: 1\nb: "{escape}"\n', "x.yaml", [])
    assert refused.value.problems[0].where == "x.yaml:2"


def test_all_wrong_keys_of_a_file_are_found() -> None:
    problems: list[Problem] = []
    nodes.parse("a: 1\na: 2\n<<: {b: 1}\n? [c]\n: 1\n", "x.yaml", problems)
    assert [problem.where for problem in problems] == ["x.yaml:2", "x.yaml:3", "x.yaml:4"]
