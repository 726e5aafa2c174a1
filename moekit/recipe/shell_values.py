"""What a word of a bash text becomes once variables stand for their values. Nothing is run.

What only a running shell could know becomes an `Unknown` inside the value and travels with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from moekit.recipe.shell_words import MOST_DEPTH, Char, Chars, Unknown, Unreadable, behind, lettered, spelled

MOST_LETTERS = 1 << 20
"""Longest value that variables may add up to."""


@dataclass
class Variables:
    """What the script's variables hold so far: a list of elements each, one for a plain variable."""

    values: dict[str, list[Chars]] = field(default_factory=dict)
    defined: frozenset[str] = frozenset()
    """Names that the user set: the script's own assignments do not touch them."""


def unknown_char(text: str, line: int, what: str, hint: str = "") -> Char:
    """A letter of a value that stands for an unknown piece."""
    return Char("\0", line, Unknown(text, line, what, hint))


class _Fields:
    """The words that an expansion makes, while it makes them."""

    def __init__(self, split: bool) -> None:
        self.split = split
        self.done: list[list[Char]] = []
        self.open: list[Char] | None = None
        self.size = 0

    def put(self, chars: Chars) -> None:
        self.open = self.open if self.open is not None else []
        self.open += chars
        self.size += len(chars)
        if self.size > MOST_LETTERS:
            raise Unreadable(chars[0].line, f"has variables that grow beyond {MOST_LETTERS:,} letters", "")

    def cut(self) -> None:
        if self.open is not None:
            self.done.append(self.open)
        self.open = None

    def put_values(self, elements: Sequence[Chars], quoted: bool, every: bool) -> None:
        """A variable's elements; `every` for `[@]`, whose elements stay apart within quotes as well."""
        for number, element in enumerate(elements):
            if number and self.split and (every or not quoted):
                self.cut()
            elif number:
                self.put([Char(" ", element[0].line if element else 0)])
            if quoted or not self.split:
                self.put(element)
                continue
            for char in element:
                if char.letter in " \t\n":
                    self.cut()
                else:
                    self.put([char])


def expand(
    raw: Chars, variables: Variables, split: bool = True, heredoc: bool = False, quoted: bool = False
) -> list[Chars]:
    """The words that one written word becomes: none, one or several; exactly one without `split`.

    `heredoc`: quotes are letters. `quoted`: the word stands within double quotes.
    """
    fields = _Fields(split)
    text = "".join(char.letter for char in raw)
    at, every = 0, False
    while at < len(text):
        letter, following = text[at], text[at + 1 : at + 2]
        if letter == '"' and not heredoc:
            quoted = not quoted
            every = every and not quoted
            if not quoted and not every:
                fields.put([])
            at += 1
        elif letter == "'" and not quoted and not heredoc:
            end = behind(text, at)
            fields.put(raw[at + 1 : end - 1])
            at = end
        elif letter == "\\" and following:
            kept = following in '$`\\"\n' if quoted or heredoc else True
            if not (kept and following == "\n"):  # else the line goes on
                fields.put(raw[at + kept : at + 2])
            at += 2
        elif letter in "$`" and (end := _reference_end(text, at)) > at + 1:
            values, all_elements = _value(raw[at:end], variables, quoted or heredoc)
            every = every or all_elements
            fields.put_values(values, quoted or heredoc, all_elements)
            at = end
        else:
            fields.put(raw[at : at + 1])
            at += 1
    fields.cut()
    return list(fields.done) if split or fields.done else [[]]


def _reference_end(text: str, at: int) -> int:
    if text[at] == "`":
        return behind(text, at)
    if text[at + 1 : at + 2] in ("(", "{", "'"):
        return behind(text, at + 1)
    match = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]").match(text, at + 1)
    return match.end() if match else at + 1


_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*])(\[[@*]\])?(?:(:?)([-=?+])(.*))?", re.DOTALL)


def _value(raw: Chars, variables: Variables, quoted: bool) -> tuple[Sequence[Chars], bool]:
    """What a `$...` stands for, and whether it is every element of an array."""
    text, line = spelled(raw), raw[0].line
    if text.startswith("$((") and text.endswith("))"):
        return [_arithmetic(raw, variables)], False
    if text.startswith(("$(", "`")):
        return [[unknown_char(text, line, f"`{_short(text)}` is known only to a running shell")]], False
    inside = raw[2:-1] if text.startswith("${") else raw[1:]
    match = _PARAMETER.fullmatch(spelled(inside))
    if match is None:
        return [[unknown_char(text, line, f"`{_short(text)}` is more than moekit reads of bash")]], False
    name, index, colon, operator, _ = match.groups()
    every = index == "[@]" or name == "@"
    values: Sequence[Chars] | None = variables.values.get(name)
    if values is not None and name in variables.defined:
        values = [[Char(char.letter, line) for char in value] for value in values]
        values = expand(lettered("$X", line), Variables({"X": list(values)})) if index or name in "@*" else values
    if values is not None and not (index or name in "@*"):
        values = values[:1]
    if name in "@*" and values is None:
        values = []
    if operator:
        other = inside[match.start(5) :]
        return _operated(values, name, colon, operator, other, variables, quoted), every
    if values is None:
        values = [_unset(name, line)]
    return values, every


def _operated(
    values: Sequence[Chars] | None,
    name: str,
    colon: str,
    operator: str,
    other: Chars,
    variables: Variables,
    quoted: bool,
) -> Sequence[Chars]:
    """`${NAME:-other}` and its relatives."""
    is_set = values is not None and (not colon or any(values))
    if values is not None and any(char.unknown for value in values for char in value):
        return values
    if operator == "+":
        return expand(other, variables, split=False, quoted=quoted) if is_set else []
    if values is not None and is_set:
        return values
    if operator == "?":
        return [_unset(name, other[0].line if other else 0)]
    default = expand(other, variables, split=False, quoted=quoted)
    if operator == "=" and name not in variables.defined:
        variables.values[name] = default
    return default


def _unset(name: str, line: int) -> Chars:
    if name.isdigit():
        return [unknown_char(f"${name}", line, f"`${name}` is an argument of the script")]
    return [unknown_char(f"${name}", line, f"`${name}` has no value in the script", f"`--set {name}=VALUE`")]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 40 else line[:37] + "..."


def _arithmetic(raw: Chars, variables: Variables) -> Chars:
    """The number that a `$((...))` is."""
    (inside,) = expand(raw[3:-2], variables, split=False, heredoc=True)
    if missing := next((char for char in inside if char.unknown), None):
        return [missing]
    text, line = spelled(inside), raw[0].line
    words = re.findall(r"\d+|[A-Za-z_]\w*|\S", text)
    for number, word in enumerate(words):
        if word.isidentifier():
            value = variables.values.get(word, [_unset(word, line)])[0]
            if value and value[0].unknown:
                return value
            words[number] = spelled(value)
    try:
        number, rest = _sum(words, 0)
    except (ValueError, IndexError, ZeroDivisionError):
        number, rest = 0, [""]
    if rest or abs(number) >= 1 << 63:
        return [unknown_char(f"$(({text}))", line, f"`$(({_short(text)}))` is more arithmetic than moekit reads")]
    return [Char(letter, line) for letter in str(number)]


def _sum(words: list[str], depth: int) -> tuple[int, list[str]]:
    value, words = _product(words, depth)
    while words and words[0] in "+-":
        sign, (right, words) = words[0], _product(words[1:], depth)
        value = value + right if sign == "+" else value - right
    return value, words


def _product(words: list[str], depth: int) -> tuple[int, list[str]]:
    value, words = _atom(words, depth)
    while words and words[0] in "*/%":
        sign, (right, words) = words[0], _atom(words[1:], depth)
        if sign == "*":
            value *= right
        else:
            quotient = abs(value) // abs(right) * (1 if (value < 0) == (right < 0) else -1)
            value = quotient if sign == "/" else value - quotient * right
        if abs(value) >= 1 << 63:
            raise ValueError
    return value, words


def _atom(words: list[str], depth: int) -> tuple[int, list[str]]:
    if depth > MOST_DEPTH:
        raise ValueError
    if words[0] == "(":
        value, rest = _sum(words[1:], depth + 1)
        if rest[0] != ")":
            raise ValueError
        return value, rest[1:]
    if words[0] in ("-", "+"):
        value, rest = _atom(words[1:], depth + 1)
        return (-value if words[0] == "-" else value), rest
    if len(words[0]) > 18 or (len(words[0]) > 1 and words[0].startswith("0")):
        raise ValueError
    return int(words[0]), words[1:]
