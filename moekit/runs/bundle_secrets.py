"""Secrets in a text: values whose names say so, and words whose shape says so. More is masked rather than less."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from urllib.parse import quote

from moekit.recipe.names import is_secret

_MORE_NAMES = re.compile(
    r"(^|_)(PASSPHRASE|PASS|PWD|AUTH|AUTHORIZATION|COOKIE|WEBHOOK|SIGNATURE|(ACCESS|SECRET|PRIVATE)_?KEY(_?ID)?)(_|$)"
)
_NO_SECRET = re.compile(
    r"(^|_)(BOS|EOS|PAD|UNK|MASK|CLS|SEP|EOD|EOT|SPECIAL|IMAGE|PER|EACH|FIM|PREFIX|MIDDLE|SUFFIX|SPLIT)_TOKEN(_|$)"
    r"|_(ERROR|EXCEPTION)$|(^|_)TOKEN_(DISPATCHER|DROP|TYPE|ID)"
)
"""What a tokenizer and Megatron call tokens are no secrets, nor is what a `KeyError` says."""
_STRONG_NAME = re.compile(r"PASS|SECRET|PWD|CREDENTIAL")
_HARMLESS = re.compile(r"(?i)true|false|null|none|\$\{?\w+\}?|\d{1,6}|\d{1,6}\.\d+|[-*.]+|[|>][+-]?|")
_COMMON_NAMES = ("KEY", "TOKEN", "AUTH", "SIGNATURE")
"""Alone they also name what is none; their value then is masked where it stands, and elsewhere if it has digits."""

_NAME = (
    r"(?i)(?<![\w.-])(?P<option>-{0,2})(?P<name>(?=[\w.-]*(?:tok|key|secret|pass|pwd|cred|auth|cookie|hook|signat{more}))"
    r"[a-z_][\w.-]*?)"
    r"(?P<sep>\\*[\"']?\]?[ \t]*(?:=>|[:=])[ \t]*|[ \t]*\.{3,}[ \t]*|\\*[\"']?,?\s+(?=\S))"
)
"""A name and what stands before its value: of Python, JSON, YAML, shells, Megatron's list of its arguments; or of a
command line, a word a line or not."""
_QUOTED = re.compile(r"[bBuUrR]{0,2}(?P<quote>\\*[\"'])")
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:(?!-----BEGIN)[\s\S]){0,20000}?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
    r"|(?:[^\n]*\n[^\n]*(?:[A-Za-z0-9+/=]{16,}|-Type: .*|-Info: .*)[ \t\r]*(?=\n|\Z)){0,400}(?:\n[^\n]*\Z)?)"
    r"|(?:^[^\n]*\n)?^[^\n]*-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----",
    re.MULTILINE,
)
"""A private key, also one of which the beginning or the end is missing."""
_SHAPES = re.compile(
    r"(?:hf|api_org)_[A-Za-z0-9]{12,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}"
    r"|(?<![A-Za-z])sk-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|wandb_v1_\w{8,}|nvapi-[\w-]{16,}"
    r"|AIza[\w-]{30,}|ya29\.[\w-]{16,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|dckr_pat_[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]*(?:\.[\w-]*)?"
    r"|(?<![A-Za-z])(?:hf_|gh[pousr]_|github_pat_|AKIA|sk-|xox[abeoprs]-|wandb_v1_|nvapi-)[\w-]*\Z"
    r"|(?i:(?<=bearer )|(?<=basic ))[\w.~+/=-]{8,}"
    r"|(?<=://)[^\s/:@]{0,256}:[^\s\"'<>]{0,512}@|(?<=://)[^\s/@]{1,512}@"
)
"""Words that are secrets by their shape, of which the end may be missing at the end of a text; users of URLs too."""
_OF_COMMANDS = re.compile(
    r"\bcurl [^\n]{0,300}?(?:-u|--user)[ =]?[\"']?[^\s:\"']+:([^\s\"']+)"
    r"|\bsshpass -p ?[\"']?([^\s\"']+)"
    r"|\blogin [^\n]{0,300}?-p ?[\"']?([^\s\"']+)"
    r"|\bmysql\w* [^\n]{0,300}?-p([^\s\"']+)"
    r"|\bwandb login (?:--\S+ )*([^\s\"'-][^\s\"']+)"
    r"|(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks|webhook\.office\.com)/([^\s\"'<>]+)"
    r"|(?i:pass\w*|token|key|secret) (?:is|was) [\"'`]?((?=\S*\d)[^\s\"'`]+)"
)
"""Passwords that commands take as words, addresses that are secrets, sentences."""
_KEY_OF_40 = re.compile(r"(?<![A-Za-z0-9])[0-9a-f]{40}(?![A-Za-z0-9])")
"""A key of Weights & Biases; or a commit."""
_COMMIT = re.compile(r"(?i:commit)\\?[\"']?[:= ]+\\?[\"']?([0-9a-f]{40})\b|\+([0-9a-f]{40})\b")
_RANDOM = re.compile(r"[A-Za-z0-9+/]{60,}={0,2}")

Span = tuple[int, int]


class Secrets:
    """What is known of a run's secrets; `names` are further variables whose values are."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._extra = {_plain(name) for name in names}
        more = "".join(f"|{re.escape(name)}" for name in names)
        self._name = re.compile(_NAME.replace("{more}", more))
        self._values: set[str] = set()
        self._commits: set[str] = set()
        self._known: re.Pattern[str] | None = None

    def learn(self, text: str) -> None:
        """Take the values that stand beside their names, so that they are found where they stand alone."""
        self._known = None
        self._commits.update(found[1] or found[2] for found in _COMMIT.finditer(text))
        for name, (begin, end) in self._named(text):
            value = text[begin:end].strip()
            self._add(value, name in _COMMON_NAMES)
            if " " in value:
                self._add(value.split()[0], True)
        for found in _OF_COMMANDS.finditer(text):
            self._add(found[found.lastindex or 0], True)
        for found in _SHAPES.finditer(text):
            if found[0].endswith("@"):
                self._add(found[0][:-1].partition(":")[2], False)

    def add(self, value: str) -> None:
        """Take a value, whatever stands beside it."""
        self._known = None
        self._values.add(value)

    def spans(self, text: str) -> list[Span]:
        """Where secrets are in a text, in order, none within another."""
        found = [match.span() for match in _KEY_BLOCK.finditer(text)]
        found += [span for _, span in self._named(text)]
        if self._values:
            if self._known is None:
                words = sorted(self._values, key=lambda word: (-len(word), word))
                self._known = re.compile("|".join(map(re.escape, words)))
            found += [match.span() for match in self._known.finditer(text)]
        for match in _SHAPES.finditer(text):
            found.append((match.start(), match.end() - match[0].endswith("@")))
        found += [match.span(match.lastindex or 0) for match in _OF_COMMANDS.finditer(text)]
        found += [match.span() for match in _KEY_OF_40.finditer(text) if match[0] not in self._commits]
        found += [match.span() for match in _RANDOM.finditer(text) if _looks_random(match[0])]
        return _joined(found)

    def _add(self, value: str, only_with_digits: bool) -> None:
        if len(value) < 6 or _HARMLESS.fullmatch(value):
            return
        if only_with_digits and not (re.search(r"\d", value) and re.search(r"[A-Za-z]", value)):
            return
        self._values |= {value, json.dumps(value)[1:-1], quote(value, safe="")}

    def _named(self, text: str) -> Iterator[tuple[str, Span]]:
        """(name, where its value is) for each name of a secret."""
        at = 0
        while found := self._name.search(text, at):
            at = found.end("name")
            name, by_space = _plain(found["name"]), not found["sep"].strip(" \t\n\r\\\"',")
            if by_space and not found["option"]:
                continue
            if name not in self._extra and not (is_secret(name) or _MORE_NAMES.search(name)):
                continue
            if _NO_SECRET.search(name):
                continue
            begin, end = _value(text, found)
            value = text[begin:end]
            strong = _STRONG_NAME.search(name) and value.isdecimal()
            if (_HARMLESS.fullmatch(value) and not strong) or (by_space and value.startswith("--")):
                continue
            yield name, (begin, end)
            at = max(at, end)


def _plain(name: str) -> str:
    """A name as environment variables are spelled."""
    return re.sub(r"[.-]", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)).upper().strip("_")


def _value(text: str, name: re.Match[str]) -> Span:
    """Where the value is that follows a name: within its quotes, the rest of a line of YAML, else one word."""
    at = name.end()
    line_end = text.find("\n", at)
    line_end = len(text) if line_end < 0 else line_end
    if quoted := _QUOTED.match(text, at):
        begin, end = quoted.end(), _closing(text, quoted.end(), line_end, quoted["quote"])
        after = end + len(quoted["quote"])
        goes_on = after < line_end and (text[after].isalnum() or text[after] in "'\"\\") and "\\" not in quoted["quote"]
        return begin, line_end if goes_on else end
    line = text.rfind("\n", 0, name.start()) + 1
    if ":" in name["sep"] and re.fullmatch(r"\s*(?:- )?", text[line : name.start()]):
        block = re.compile(r"[|>][+-]?[ \t]*\n((?:[ \t]+[^\n]*(?:\n|\Z))+)").match(text, at)
        return block.span(1) if block else (at, at + len(text[at:line_end].rstrip()))
    word = re.compile(r"(?:(?i:token|basic|bearer|negotiate) +)?\S*").match(text, at)
    end = word.end() if word else at
    return at, at + len(text[at:end].rstrip("\"',;)}]\\"))


def _closing(text: str, at: int, line_end: int, mark: str) -> int:
    """Where a quoted value ends; at the end of its line where nothing closes it."""
    end = at
    while (end := text.find(mark, end, line_end)) >= 0:
        before = len(text[at:end]) - len(text[at:end].rstrip("\\"))
        if len(mark) > 1 or before % 2 == 0:
            return end
        end += 1
    return line_end


def _looks_random(word: str) -> bool:
    """Whether a long word is a key's line or the like: no path, and no hash, which has no capitals."""
    mixed = all(re.search(kind, word) for kind in ("[A-Z]", "[a-z]", "[0-9]"))
    return mixed and word.count("/") * 12 < len(word)


def _joined(spans: list[Span]) -> list[Span]:
    """Spans in order, overlapping ones as one."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if begin == end:
            continue
        if joined and begin < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
