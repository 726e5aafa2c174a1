"""The words of a bash text: where they begin and end. Every letter knows the line it was written on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_DEPTH = 40
"""Deepest nesting of brackets and quotes."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A piece of a value that nobody knows without running the script: a problem only where the value is needed."""

    spelled: str
    """As the script writes it, such as `$1`."""
    line: int
    what: str
    hint: str = ""
    """What to do about it; empty until a variable takes the value, whose `--set` then helps."""


class Char(NamedTuple):
    """One letter of a value."""

    letter: str
    line: int
    unknown: Unknown | None = None


type Chars = Sequence[Char]


class Unreadable(Exception):
    """The text is not bash; `args` are the line, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A word as it is written, quotes and all."""

    chars: Chars

    @property
    def line(self) -> int:
        """Where it begins."""
        return self.chars[0].line

    @property
    def text(self) -> str:
        """Its letters."""
        return spelled(self.chars)


@dataclass(frozen=True, slots=True)
class Array:
    """`NAME=( ... )` or `NAME+=( ... )`."""

    name: str
    appends: bool
    items: tuple[Raw, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Operator:
    """What ends or joins commands: `;`, `&&`, `|`, a new line, ..."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Heredoc:
    """The lines behind `<<EOF`; comes before the operator that ends its command."""

    chars: Chars
    expands: bool


Token = Raw | Array | Operator | Heredoc


def lettered(text: str, line: int = 1) -> list[Char]:
    """A text with its lines, the first of them `line`."""
    chars = []
    for letter in text:
        chars.append(Char(letter, line))
        line += letter == "\n"
    return chars


def spelled(chars: Chars) -> str:
    """The value as text; what is unknown as the script writes it."""
    return "".join(char.unknown.spelled if char.unknown else char.letter for char in chars)


_REDIRECT = re.compile(r"\d*(<<<|<<-?|<>|>>|>\||[<>]&?)|&>>?")
_OPERATOR = re.compile(r";;&?|;&|&&|\|\||\|&|[|&;()\n]")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
_SPACE = " \t\r"
_RIGHT = "is this the right file?"


def tokens(chars: Chars, plain: bool = False) -> Iterator[Token]:
    """Cut a text into words and operators. `plain` text is only words: brackets and the like are letters in it."""
    text = "".join(char.letter for char in chars)
    at, heredocs = 0, list[tuple[str, bool]]()
    while at < len(text):
        if (skipped := _skip(text, at, newlines=plain)) > at:
            at = skipped
        elif not plain and (match := _REDIRECT.match(text, at)):
            at = _skip(text, match.end())
            end = _word_end(text, at)
            if match.group(1) in ("<<", "<<-"):
                quoted = text[at:end]
                heredocs.append((quoted.strip("'\"\\"), not re.search(r"['\"\\]", quoted)))
            at = end
        elif not plain and (match := _OPERATOR.match(text, at)):
            line, at = chars[at].line, match.end()
            for delimiter, expands in heredocs if match.group() == "\n" else ():
                if found := re.compile(rf"^\t*{re.escape(delimiter)}$", re.MULTILINE).search(text, at):
                    yield Heredoc(chars[at : found.start()], expands)
                    at = found.end()
            heredocs = [] if match.group() == "\n" else heredocs
            yield Operator(match.group(), line)
        elif not plain and (match := _ARRAY.match(text, at)):
            items, end = _items(chars, text, match.end())
            yield Array(match.group(1), bool(match.group(2)), items, chars[at].line)
            at = end
        else:
            end = _word_end(text, at, "\n" if plain else "\n;|&()<>")
            yield Raw(chars[at : max(end, at + 1)])
            at = max(end, at + 1)


def _skip(text: str, at: int, newlines: bool = False) -> int:
    """Behind blanks, continued lines and comments."""
    while at < len(text):
        if text[at] in _SPACE or (newlines and text[at] == "\n"):
            at += 1
        elif text.startswith("\\\n", at):
            at += 2
        elif text[at] == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        else:
            break
    return at


def _items(chars: Chars, text: str, at: int) -> tuple[tuple[Raw, ...], int]:
    """The words of an array from behind its bracket on, and the place behind the closing one."""
    start, items = at, list[Raw]()
    while (at := _skip(text, at, newlines=True)) < len(text):
        if text[at] == ")":
            return tuple(items), at + 1
        end = max(_word_end(text, at, "\n()"), at + 1)
        items.append(Raw(chars[at:end]))
        at = end
    raise Unreadable(chars[start - 1].line, "has an unclosed `(`", _RIGHT)


def _word_end(text: str, at: int, stops: str = "\n;|&()<>") -> int:
    while at < len(text) and text[at] not in _SPACE and text[at] not in stops:
        if text[at] == "\\":
            at += 2
        elif text[at] in "'\"`":
            at = behind(text, at)
        elif text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = behind(text, at + 1)
        else:
            at += 1
    return min(at, len(text))


def behind(text: str, at: int, double: bool = False, depth: int = 0) -> int:
    """The place behind what opens at `at`: a quote, a bracket. `double`: within double quotes."""
    opening = text[at]
    closing = {"(": ")", "{": "}"}.get(opening, opening)
    double = double or opening == '"'
    start, at = at, at + 1
    while at < len(text) and depth < MOST_DEPTH:
        letter = text[at]
        if letter == closing:
            return at + 1
        if opening == "'":
            at += 1
        elif letter == "\\":
            at += 2
        elif letter in '"`' or (letter == "'" and not double):
            at = behind(text, at, double and letter != "`", depth + 1)
        elif letter in "({" and (text[at - 1] == "$" or letter == opening):
            at = behind(text, at, double and letter == "{", depth + 1)
        else:
            at += 1
    wrong = "has an unclosed" if depth < MOST_DEPTH else f"nests more than {MOST_DEPTH} deep at a"
    raise Unreadable(text.count("\n", 0, start) + 1, f"{wrong} `{opening}`", _RIGHT)
