"""A text without secrets and without names of machines and people; one word stands for a name everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import partial

from moekit.runs.bundle_names import EMAIL, HOME, Names, addresses
from moekit.runs.bundle_secrets import Secrets

KINDS = {
    "secret": "secrets",
    "email": "e-mail addresses",
    "folder": "folders",
    "user": "user names",
    "account": "accounts",
    "host": "host names",
    "ip": "addresses of networks",
}
"""What is masked, in that order."""
_FIRST = 0xF0000
"""A masked word is one private character until all is masked, which no pattern takes for a part of a word."""
_PRIVATE = re.compile(r"[\ue000-\uf8ff\U000f0000-\U0010ffff]")
_LAST = 0x10FFFD


class Masker:
    """First `learn` all texts, then `mask` each.

    `secret_names` are variables whose values are secrets, `folders` are those that are replaced as a whole; `users` and
    `hosts` are names that are known beforehand.
    """

    def __init__(
        self,
        secret_names: Collection[str] = (),
        folders: Iterable[str] = (),
        users: Iterable[str] = (),
        hosts: Iterable[str] = (),
    ) -> None:
        self._secrets = Secrets(secret_names)
        self._names = Names()
        self._folders = sorted({one.rstrip("/") for one in folders} - {""}, key=lambda one: (-len(one), one))
        self._names.users.update(users)
        for host in hosts:
            self._names.add_host(host)
        self._words: list[tuple[str, str]] = []
        """(kind, word) by the private character's number."""
        self._known: dict[tuple[str, str], str] = {}
        """The private character of each masked (kind, value)."""
        self._different: dict[str, int] = {}
        self._times: dict[str, int] = {}

    def learn(self, text: str) -> None:
        """Take what a text says of secrets and names."""
        self._secrets.learn(text)
        self._names.learn(text)

    def hide(self, word: str) -> None:
        """Take a word for a secret, whatever it is."""
        self._secrets.add(word)

    def mask(self, text: str) -> str:
        """A text without them."""
        text = _PRIVATE.sub("?", text)
        secrets = [(begin, end, [text[begin:end]]) for begin, end in self._secrets.spans(text)]
        text = _replaced(text, secrets, partial(self._word, "secret"))
        text = EMAIL.sub(lambda found: self._word("email", found[0].lower()), text)
        if self._folders:
            folders = rf"(?<![\w.-])(?:{'|'.join(map(re.escape, self._folders))})(?![\w-])"
            text = re.sub(folders, lambda found: "/" + self._word("folder", found[0]), text)
        text = HOME.sub(lambda found: self._word("user", found[0].lower()), text)
        text = self._without("user", self._names.users, text)
        text = self._without("account", self._names.accounts, text)
        text = _replaced(text, self._names.hosts(text), partial(self._word, "host"))
        found = [(begin, end, [text[begin:end].lower()]) for begin, end in addresses(text)]
        return _PRIVATE.sub(self._rendered, _replaced(text, found, partial(self._word, "ip")))

    def told(self) -> list[str]:
        """What was masked, in words, and never the values."""
        return [
            f"{what}: {self._different[kind]:,} different, in {times:,} place{'s' * (times > 1)}"
            for kind, what in KINDS.items()
            if (times := self._times.get(kind, 0))
        ]

    def _without(self, kind: str, names: Iterable[str], text: str) -> str:
        longest_first = sorted((name for name in names if len(name) > 2), key=lambda one: (-len(one), one))
        if not longest_first:
            return text
        words = rf"(?i)(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, longest_first))})(?![A-Za-z0-9])"
        return re.sub(words, lambda found: self._word(kind, found[0].lower()), text)

    def _word(self, kind: str, value: str) -> str:
        known = self._known.get((kind, value))
        if known is None:
            self._different[kind] = number = self._different.get(kind, 0) + 1
            known = self._known[kind, value] = chr(min(_FIRST + len(self._words), _LAST))
            self._words.append((kind, f"[secret{number}]" if kind == "secret" else f"{kind}{number}"))
        return known

    def _rendered(self, found: re.Match[str]) -> str:
        kind, word = self._words[ord(found[0]) - _FIRST]
        self._times[kind] = self._times.get(kind, 0) + 1
        return word


def _replaced(text: str, spans: Iterable[tuple[int, int, list[str]]], word: Callable[[str], str]) -> str:
    """A text with words in place of spans; of those that overlap the first and longest, so that nothing is left."""
    parts: list[str] = []
    at = 0
    for begin, end, values in sorted(spans, key=lambda span: (span[0], -span[1])):
        if begin >= at:
            parts += [text[at:begin], ",".join(map(word, values))]
        at = max(at, end)
    return "".join([*parts, text[at:]])
