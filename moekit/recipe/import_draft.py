"""A recipe that is being put together from an imported text, and its YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moekit.problems import Problem
from moekit.recipe import nodes
from moekit.recipe.build import markers
from moekit.recipe.load import sections
from moekit.recipe.shell import Word


@dataclass
class Draft:
    """A recipe that is being put together; a problem with it is one with the imported text, so it has its places."""

    shown: str
    values: dict[str, nodes.Node] = field(default_factory=dict)
    """By dotted name."""
    comments: dict[str, str] = field(default_factory=dict)
    """What stands behind a value, by dotted name."""
    extra: list[nodes.Scalar] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What the recipe does not say, each with its line and why."""
    problems: list[Problem] = field(default_factory=list)

    def say(self, name: str, place: nodes.Place, texts: Sequence[str], plain: bool = False, comment: str = "") -> None:
        """Set a field to one value or several; `plain` for numbers and switches, which take no quotes."""
        items = tuple(nodes.Scalar(place, text, plain) for text in texts)
        self.values[name] = items[0] if len(items) == 1 else nodes.Sequence(place, items)
        if comment:
            self.comments[name] = comment

    def need(self, words: Sequence[Word]) -> None:
        """Words whose values matter: what is unknown in them is a problem."""
        self.problems += [problem for word in words for problem in word.problems()]

    def leave_out(self, said: str, place: nodes.Place, why: str) -> None:
        """Note what the recipe does not say."""
        self.left_out.append(f"{said} (line {place.line}): {why}")

    def tree(self, summary: str) -> nodes.Mapping:
        """The recipe's tree, in the schema's order."""
        first = nodes.Place(self.shown, 1)
        values = self.values | (
            {"megatron.extra": nodes.Sequence(self.extra[0].place, tuple(self.extra))} if self.extra else {}
        )
        tree = nodes.Mapping(first, {"summary": (first, nodes.Scalar(first, " ".join(summary.split()), False))})
        for section, cls in sections():
            said = {name: values[f"{section}.{name}"] for name in markers(cls) if f"{section}.{name}" in values}
            if said:
                entries = {name: (node.place, node) for name, node in said.items()}
                tree.entries[section] = (first, nodes.Mapping(first, entries))
        return tree

    def text(self, tree: nodes.Mapping) -> str:
        """The tree as YAML, with the comments, and at the end what was left out."""
        lines = []
        for section, (_, node) in tree.entries.items():
            if not isinstance(node, nodes.Mapping):
                lines.append(f"{section}:{''.join(_value(node))}")
                continue
            lines += ["", f"{section}:"]
            for name, (_, value) in node.entries.items():
                comment = self.comments.get(f"{section}.{name}", "")
                lines.append(f"  {name}:{''.join(_value(value))}" + (f" # {_one_line(comment)}" if comment else ""))
        if self.left_out:
            lines += ["", "# Not in the recipe:", *(f"# - {_one_line(line)}" for line in self.left_out)]
        return "".join(f"{line}\n" for line in lines)


_PLAIN = re.compile(r"-{0,2}[A-Za-z0-9_./+(][A-Za-z0-9_./+()*=,-]*|-?[0-9.][0-9.eE+-]*")
_READ_OTHERWISE = frozenset(["null", "true", "false", "yes", "no", "on", "off", "y", "n"])


def _value(node: nodes.Node) -> Iterator[str]:
    """What stands behind a field's colon."""
    if isinstance(node, nodes.Mapping):
        for name, (_, value) in node.entries.items():
            yield f"\n    {name}:{''.join(_value(value))}"
    elif isinstance(node, nodes.Scalar):
        yield f" {scalar(node)}"
    elif texts := [scalar(item) for item in node.items if isinstance(item, nodes.Scalar)]:
        inline = f" [{', '.join(texts)}]"
        is_short = len(inline) <= 80 and not any("," in text or text.startswith("-") for text in texts)
        yield inline if is_short else "".join(f"\n    - {text}" for text in texts)


def scalar(node: nodes.Scalar) -> str:
    """A value that every YAML reader takes for what it is, on one line."""
    text = node.text
    if node.plain or (_PLAIN.fullmatch(text) and text.lower() not in _READ_OTHERWISE):
        return text
    return '"' + "".join(_escaped(letter) for letter in text) + '"'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
