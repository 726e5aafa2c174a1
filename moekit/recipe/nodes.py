"""YAML text to a tree in which every key and value knows its file and line, and `base:` inheritance between trees.

The tree is made from the parser's events, so nothing is coerced, nothing is constructed, and the depth is bounded
before anything recurses. What a scalar means is the business of the field that takes it (`build.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moekit.problems import MoekitError, Problem, shortened

MOST_BYTES = 1 << 20
MOST_DEPTH = 8
MOST_ENTRIES = 1_000

_NOT_YAML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")

try:
    from yaml import CSafeLoader as Loader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader as Loader  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Place:
    """A file, as the user would name it, and a line from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value, as it is spelled."""

    place: Place
    text: str
    plain: bool
    """Written without quotes: only then may it be null, a number or a switch."""

    @property
    def is_null(self) -> bool:
        """Whether it unsets its field."""
        return self.plain and self.text in ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    place: Place
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys with values; a key keeps its own place."""

    place: Place
    entries: dict[str, tuple[Place, Node]] = field(default_factory=dict)


Node = Scalar | Sequence | Mapping


def read(path: Path, shown: str, problems: list[Problem]) -> Mapping:
    """The tree of one file, called `shown` in every place; keys that are wrong are left out and added to `problems`.

    Raises:
        MoekitError: not readable, too large, not text, not YAML, or YAML that is more than keys, values and lists.
    """
    return parse(read_text(path, shown), shown, problems)


def read_text(path: Path, shown: str) -> str:
    """The text of a file that a user named, or a `MoekitError` that says why not."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as reason:
        hint = "look for a slip in the path" if isinstance(reason, FileNotFoundError) else ""
        raise MoekitError(Problem(shown, f"cannot be read: {(reason.strerror or str(reason)).lower()}", hint)) from None
    if len(data) > MOST_BYTES:
        what = f"is larger than {MOST_BYTES >> 20} MiB, the most that moekit reads"
        raise MoekitError(Problem(shown, what, "a recipe is a page of YAML: is this the right file?"))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as reason:
        line = data[: reason.start].count(b"\n") + 1
        raise MoekitError(Problem(f"{shown}:{line}", "is not UTF-8 text", "is this the right file?")) from None


def parse(text: str, shown: str, problems: list[Problem]) -> Mapping:
    """The tree of a YAML text; see `read`."""
    try:
        return _document(_Events(yaml.parse(text, Loader=Loader), shown), problems)
    except yaml.MarkedYAMLError as reason:
        mark = reason.problem_mark or reason.context_mark
        line = mark.line + 1 if mark else 1
        what = f"is not YAML: {reason.problem or reason.context}"
        raise MoekitError(Problem(f"{shown}:{line}", what, _yaml_hint(text))) from None
    except yaml.reader.ReaderError:
        found = _NOT_YAML.search(text)
        line = text[: found.start() if found else 0].count("\n") + 1
        raise MoekitError(Problem(f"{shown}:{line}", "has a control character, which YAML does not allow")) from None


def _yaml_hint(text: str) -> str:
    return "YAML indents with spaces, not tabs" if "\n\t" in text else ""


class _Events:
    """The parser's events, one at a time, each with its place."""

    def __init__(self, events: Iterator[yaml.Event], shown: str) -> None:
        self.events = events
        self.shown = shown

    def next(self) -> tuple[Any, Place]:
        event: Any = next(self.events)
        return event, Place(self.shown, event.start_mark.line + 1)


def _document(events: _Events, problems: list[Problem]) -> Mapping:
    events.next()  # stream start
    event, place = events.next()
    if isinstance(event, yaml.StreamEndEvent):
        raise MoekitError(
            Problem(f"{events.shown}:1", "is empty", "`moekit new NAME --from first_moe` writes a recipe")
        )
    event, place = events.next()
    root = _node(event, place, events, problems, 1)
    events.next()  # document end
    event, more = events.next()
    if not isinstance(event, yaml.StreamEndEvent):
        problems.append(Problem(str(more), "begins a second document", "one file holds one recipe"))
    if isinstance(root, Mapping):
        return root
    if isinstance(root, Scalar) and root.is_null:
        raise MoekitError(
            Problem(f"{events.shown}:1", "is empty", "`moekit new NAME --from first_moe` writes a recipe")
        )
    raise MoekitError(*problems, Problem(str(place), "must begin with `key: value`"))


def _node(event: Any, place: Place, events: _Events, problems: list[Problem], depth: int) -> Node:
    if depth > MOST_DEPTH:
        raise MoekitError(
            *problems, Problem(str(place), f"is nested more than {MOST_DEPTH} deep", "a recipe is two levels")
        )
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
        sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
        raise MoekitError(
            *problems,
            Problem(
                str(place), f"uses a YAML anchor or alias (`{sign}{shortened(event.anchor)}`)", "inherit with `base:`"
            ),
        )
    if getattr(event, "tag", None):
        raise MoekitError(
            *problems,
            Problem(
                str(place),
                f"uses a YAML tag (`{shortened(event.tag.replace('tag:yaml.org,2002:', '!!'))}`)",
                "write the plain value",
            ),
        )
    if isinstance(event, yaml.ScalarEvent):
        return Scalar(place, event.value, event.style is None or event.style == "")
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Node] = []
        while not isinstance((following := events.next())[0], yaml.SequenceEndEvent):
            items.append(_node(*following, events, problems, depth + 1))
            _count(len(items), following[1], problems)
        return Sequence(place, tuple(items))
    return _mapping(place, events, problems, depth)


def _mapping(place: Place, events: _Events, problems: list[Problem], depth: int) -> Mapping:
    mapping, count = Mapping(place), 0
    while not isinstance((following := events.next())[0], yaml.MappingEndEvent):
        key = _node(*following, events, problems, depth + 1)
        value = _node(*events.next(), events, problems, depth + 1)
        _count(count := count + 1, key.place, problems)
        if not isinstance(key, Scalar):
            problems.append(Problem(str(key.place), "has a key that is not a word"))
        elif key.text == "<<":
            problems.append(Problem(str(key.place), "uses a YAML merge key (`<<`)", "inherit with `base:`"))
        elif key.text in mapping.entries:
            first = mapping.entries[key.text][0]
            problems.append(
                Problem(str(key.place), f"`{shortened(key.text)}` is given twice", f"first given at {first}")
            )
        else:
            mapping.entries[key.text] = (key.place, value)
    return mapping


def _count(entries: int, place: Place, problems: list[Problem]) -> None:
    if entries > MOST_ENTRIES:
        what = f"is more than the {MOST_ENTRIES:,} keys or items that a section or a list may have"
        raise MoekitError(*problems[:MOST_ENTRIES], Problem(str(place), what))


def merged(parent: Mapping, child: Mapping) -> Mapping:
    """`child` over `parent`: mappings merge, lists and scalars replace, null stays and unsets."""
    result = Mapping(child.place, dict(parent.entries))
    for key, (place, value) in child.entries.items():
        below = result.entries.get(key)
        if below and isinstance(below[1], Mapping) and isinstance(value, Mapping):
            value = merged(below[1], value)
        result.entries[key] = (place, value)
    return result
