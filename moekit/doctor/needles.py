"""Which lines of a long log may match any of many expressions: those with a text that one of them cannot do without.

Trying hundreds of expressions on a line takes a hundred times as long as reading it. Each has a text that stands in
all that it matches, and nearly no line has any of those texts. They are looked for in a whole block at once, by one
expression that stops at rare bytes alone: of each text its rarest byte, and what stands around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

DIGITS = b"0123456789"
_MOST = 12
"""Texts of one expression."""
_AROUND = 8
"""Bytes that are looked at before and behind the rare one."""
_RARE = b"hufgbykvw()'x*NS=E7FzTIRACMP#LO;D][UGBjqHVWK{}X%Y$ZJQ!@~^&?<>|"
"""Bytes of which logs have few, the rarest last. Each text has one of them."""


@dataclass(frozen=True)
class _Needle:
    text: bytes
    rare: int
    """Where in it its rarest byte stands."""
    owners: frozenset[int]
    """The numbers of its expressions."""


@dataclass(frozen=True)
class Needles:
    """Texts, and the expressions that cannot do without one of them."""

    pattern: re.Pattern[bytes]
    without_digits: re.Pattern[bytes]
    """The same for lines without their digits."""
    by_bytes: dict[bytes, list[_Needle]]
    """By the rarest byte and up to two that stand behind it."""

    def within(self, line: bytes) -> list[int]:
        """Numbers of the expressions that may match a line, in their order."""
        found: set[int] = set()
        for hit in self.pattern.finditer(line):
            at = hit.start()
            for key in (line[at : at + 3], line[at : at + 2], line[at : at + 1]):
                for needle in self.by_bytes.get(key, ()):
                    if at >= needle.rare and line.startswith(needle.text, at - needle.rare):
                        found |= needle.owners
        return sorted(found)

    def kinds(self, kinds: Iterable[bytes]) -> set[bytes]:
        """Of lines without their digits, those that may have had any of the texts."""
        block, at, found = b"\n".join(kinds), 0, set()
        while hit := self.without_digits.search(block, at):
            at = block.find(b"\n", hit.start())
            at = len(block) if at < 0 else at
            found.add(block[block.rfind(b"\n", 0, hit.start()) + 1 : at])
        return found


def needles(expressions: Sequence[str]) -> Needles:
    """Of expressions over bytes, by their numbers.

    Raises:
        ValueError: an expression has no text of its own.
    """
    owners: dict[bytes, set[int]] = {}
    for number, expression in enumerate(expressions):
        found = _texts(_parser.parse(expression.encode()))
        if not found:
            raise ValueError(f"no text is in all that `{expression}` matches")
        for text in found:
            owners.setdefault(text, set()).add(number)
    by_bytes: dict[bytes, list[_Needle]] = {}
    for text, numbers in owners.items():
        rare = _rarest(text)
        by_bytes.setdefault(text[rare : rare + 3], []).append(_Needle(text, rare, frozenset(numbers)))
    return Needles(_any_of(owners), _any_of({text.translate(None, DIGITS) for text in owners}), by_bytes)


def _any_of(texts: Iterable[bytes]) -> re.Pattern[bytes]:
    """An expression that matches a rare byte where what stands around it is of one of the texts.

    A branch by the next byte is a comparison, and one by what stands before is fifty; frequent bytes are asked first.
    """
    by_byte: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for text in texts:
        rare = _rarest(text)
        behind = text[rare + 1 : rare + 1 + _AROUND]
        before = text[max(0, rare - _AROUND) : rare + 1] + behind if len(behind) < _AROUND else b""
        by_byte.setdefault(text[rare : rare + 1], []).append((behind, before))
    ordered = sorted(by_byte.items(), key=lambda item: _RARE.find(item[0]))
    return re.compile(b"|".join(re.escape(byte) + b"(?=" + _branches(places) + b")" for byte, places in ordered))


def _branches(places: Sequence[tuple[bytes, bytes]], depth: int = 2) -> bytes:
    """What stands behind, by its first bytes, each with what stands before it."""
    by_first: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for behind, before in places:
        by_first.setdefault(behind[:1], []).append((behind[1:], before))
    parts = []
    for first, rest in sorted(by_first.items(), reverse=True):
        if first and depth and len(rest) > 1:
            parts.append(re.escape(first) + b"(?:" + _branches(rest, depth - 1) + b")")
        else:
            parts += sorted({re.escape(first + behind) + _looks_back(before) for behind, before in rest})
    return b"|".join(parts)


def _looks_back(before: bytes) -> bytes:
    return b"(?<=" + re.escape(before) + b")" if before else b""


def _rarest(text: bytes) -> int:
    """Where the rarest byte of a text stands."""
    return max(range(len(text)), key=lambda at: _RARE.find(text[at : at + 1]))


def _texts(parsed: Iterable[Any]) -> set[bytes]:
    """Texts of which each match of a parsed expression has one; none where that is not known."""
    best: set[bytes] = set()
    run = {b""}
    for code, value in [*parsed, (None, None)]:
        choices = _choices(code, value)
        if choices and len(run) * len(choices) <= _MOST:
            run = {one + other for one in run for other in choices}
            continue
        best = max(best, run, _inner(code, value), key=_worth)
        run = choices or {b""}
    return best if _worth(best) else set()


def _choices(code: Any, value: Any) -> set[bytes]:
    """All that one part takes, where it is little."""
    if code is op.LITERAL:
        return {bytes([value])}
    if code is op.IN and all(one is op.LITERAL for one, _ in value) and len(value) < 4:
        return {bytes([byte]) for _, byte in value}
    if code is op.SUBPATTERN:
        return _exact(value[-1])
    if code is op.BRANCH:
        parts = [_exact(part) for part in value[1]]
        return set().union(*parts) if all(parts) else set()
    return set()


def _exact(parsed: Iterable[Any]) -> set[bytes]:
    """All that a parsed expression matches, where it is little."""
    run = {b""}
    for code, value in parsed:
        choices = _choices(code, value)
        if not choices or len(run) * len(choices) > _MOST:
            return set()
        run = {one + other for one in run for other in choices}
    return run


def _inner(code: Any, value: Any) -> set[bytes]:
    """Texts of a group, of alternatives, of what is repeated."""
    if code is op.SUBPATTERN:
        return _texts(value[-1])
    if code is op.BRANCH:
        parts = [_texts(part) for part in value[1]]
        return set().union(*parts) if all(parts) else set()
    if code in (op.MAX_REPEAT, op.MIN_REPEAT) and value[0]:
        return _texts(value[2])
    return set()


def _worth(texts: set[bytes]) -> float:
    """How much is told by texts: how rare the worst of them is, nothing where one has a few bytes or none is rare."""
    if not texts or min(len(text.translate(None, DIGITS)) for text in texts) < 4:
        return 0
    rare = min(_RARE.find(text[_rarest(text)]) for text in texts)
    return max(0, 1 + rare and 1 + min(rare, 20) + 4 * min(8, *map(len, texts)) - len(texts) / 10)
