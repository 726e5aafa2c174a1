"""The options a Megatron takes, and what is wrong with a command line before Megatron sees it.

A table is made by running Megatron's own parser (`moekit.megatron.dump`), never typed. Reading one costs a few
milliseconds and needs neither torch nor Megatron; entries become `Option`s only when they are asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from moekit.problems import did_you_mean, error, shortened

TABLES = Path(__file__).parent / "tables"
MOST_CHOICES = 12
"""As many are listed in a message."""

Kind = Literal["unknown", "arity", "type", "choice", "twice"]

# What argparse takes for a negative number, hence for a value, on Python 3.12 and 3.13 (`-1e-5` is not one).
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_TYPE_NAMES = {"int": "an integer", "float": "a number"}
_READERS = {"int": int, "float": float, "bool": bool}


@dataclass(frozen=True, slots=True)
class Option:
    """One spelling of one of Megatron's options."""

    name: str
    """As written, for example `--moe-router-topk`."""
    dest: str
    """The attribute of Megatron's `args` that it sets; spellings of one option share it."""
    action: Literal["store", "store_true", "store_false"]
    """`store` takes values; the other two are switches."""
    type: str = "str"
    """`int`, `float`, `str`, `bool` (any text but the empty is true), else Megatron's own function or enum by name."""
    nargs: int | str | None = None
    """None: exactly one value; a number: that many; `+`: one or more; `*`: any number."""
    choices: tuple[str | int, ...] = ()
    """The values it takes; empty where any value of its type will do."""
    group: str = ""
    """The title of Megatron's argument group."""
    inferred: bool = False
    """True where no parser was asked: the option is known from the handbook only."""

    @property
    def is_switch(self) -> bool:
        """Whether it stands alone, without a value."""
        return self.action != "store"


@dataclass(frozen=True)
class FlagTable:
    """Every option of one Megatron."""

    version: str
    """What recipes call it: `0.19.2`, `d6316eb45`."""
    source: str
    """Where the entries come from, in words."""
    entries: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """Option string to its fields; those that equal their default are left out (`option` fills them in)."""

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def option(self, name: str) -> Option | None:
        """The option of that spelling, None where there is none."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        fields = {"dest": name.removeprefix("--").replace("-", "_"), "action": "store"} | dict(entry)
        fields["choices"] = tuple(fields.get("choices", ()))
        return Option(name=name, **fields)


@dataclass(frozen=True)
class Complaint:
    """One thing that is wrong with a command line."""

    kind: Kind
    option: str
    """The option at fault as written, without its value; empty for a value that no option takes."""
    what: str
    """One sentence, as in `moekit.problems.Problem`."""
    hint: str
    position: int
    """Index into argv of the argument at fault."""


@dataclass(frozen=True)
class Occurrence:
    """One option in a command line, with the values that follow it up to the next option."""

    name: str
    """The option as written, without `=value`; empty for values before the first option."""
    option: Option | None
    """None where the table has no such option."""
    position: int
    values: tuple[str, ...]
    joined: str | None
    """The value written as `--name=value`; argparse then takes no other."""


def load(version: str) -> FlagTable:
    """The shipped table of that Megatron.

    Raises `MoekitError` for a version that no table is shipped for.
    """
    if version not in (known := shipped()):
        raise error(f"moekit has no flag table for Megatron `{version}`", f"it has {', '.join(known)}")
    return read_table((TABLES / f"{version}.json").read_text(encoding="utf-8"))


@cache
def shipped() -> tuple[str, ...]:
    """The versions that `load` knows, sorted."""
    return tuple(sorted(path.stem for path in TABLES.glob("*.json")))


def read_table(text: str) -> FlagTable:
    """The table that `moekit.megatron.dump.dump_table` wrote as text."""
    document = json.loads(text)
    return FlagTable(document["version"], document["source"], document["options"])


def occurrences(argv: Sequence[str], table: FlagTable) -> Iterator[Occurrence]:
    """Cut a command line into options and their values where Megatron's argparse (`allow_abbrev=False`) cuts it."""
    name, joined, position, values = "", None, 0, list[str]()
    for index, word in enumerate(argv):
        if _is_value(word, table):
            values.append(word)
            continue
        if name or values:
            yield Occurrence(name, table.option(name), position, tuple(values), joined)
        name, position, values, joined = word, index, [], None
        if word not in table and "=" in word:
            name, _, joined = word.partition("=")
    if name or values:
        yield Occurrence(name, table.option(name), position, tuple(values), joined)


def _is_value(word: str, table: FlagTable) -> bool:
    if not word.startswith("-") or word == "-":
        return True
    if word in table or word.partition("=")[0] in table:
        return False
    return bool(_NEGATIVE_NUMBER.fullmatch(word)) or " " in word


def parse_values(argv: Sequence[str], table: FlagTable) -> dict[str, Any]:
    """What a command line sets, by dest; what it does not name is absent, since no default of Megatron's is known here.

    Switches give True or False, several values a list, types that are Megatron's own functions or enums their text.
    Expects a command line that `check` has no complaint about; where it has, the last readable value counts.
    """
    values: dict[str, Any] = {}
    for found in occurrences(argv, table):
        option = found.option
        if option is None:
            continue
        if option.is_switch:
            values[option.dest] = option.action == "store_true"
            continue
        texts = found.values if found.joined is None else (found.joined,)
        read = [_read(option, text) for text in texts if _readable(option, text)]
        if option.nargs is not None:
            values[option.dest] = read
        elif read:
            values[option.dest] = read[0]
    return values


def check(argv: Sequence[str], table: FlagTable) -> list[Complaint]:
    """Everything Megatron's parser refuses in a command line, and every option that is given twice, in argv's order.

    Types that are Megatron's own functions (`moe_freq_type` and the like) are not judged: any text passes.
    """
    complaints: list[Complaint] = []
    first: dict[str, Occurrence] = {}
    previous = ""
    for found in occurrences(argv, table):
        if found.option is None:
            complaints.append(_unknown(found, table, previous))
        else:
            complaints += _values(found, found.option)
            before = first.setdefault(found.option.dest, found)
            if before is not found:
                complaints.append(_twice(before, found))
        previous = found.name
    return complaints


def _unknown(found: Occurrence, table: FlagTable, previous: str) -> Complaint:
    if not found.name:
        return Complaint("unknown", "", f"`{shortened(found.values[0])}` follows no option", "", found.position)
    longer = [name for name in table.entries if name.startswith(found.name)] if len(found.name) > 3 else []
    if previous and not found.name.startswith("--"):
        hint = f"as a value it is written `{previous}={found.name}`"
    elif len(longer) == 1:
        hint = f"Megatron takes no abbreviations; write `{longer[0]}`"
    else:
        hint = did_you_mean(found.name, table.entries, cutoff=0.75)
    if not hint and any(entry.get("inferred") for entry in table.entries.values()):
        hint = f"moekit's table of {table.version} is {table.source}"
    what = f"Megatron {table.version} has no option `{shortened(found.name)}`"
    return Complaint("unknown", found.name, what, hint, found.position)


def _values(found: Occurrence, option: Option) -> Iterator[Complaint]:
    """Complaints about the values of one occurrence: too few, unreadable, not among the choices, too many."""
    note = " (inferred from the handbook)" if option.inferred else ""

    def complain(kind: Kind, what: str, hint: str, position: int) -> Complaint:
        return Complaint(kind, option.name, f"`{option.name}` {what}{note}", hint, position)

    follow = list(enumerate(found.values, found.position + 1))  # (position in argv, text)
    given = follow if found.joined is None else [(found.position, found.joined)]
    least, most = _arity(option)
    if len(given) < least:
        needs = "a value" if option.nargs is None else "at least one value"
        if isinstance(option.nargs, int):
            needs = f"{least} values, not {len(given)}"
        yield complain("arity", f"needs {needs}", "", found.position)
    for position, text in given[:most]:
        if not _readable(option, text):
            what = f"takes {_TYPE_NAMES[option.type]}, not `{shortened(text)}`"
            yield complain("type", what, _as_integer(option, text), position)
        elif option.choices and _read(option, text) not in option.choices:
            choices = [str(choice) for choice in option.choices]
            few = ", ".join(choices[:MOST_CHOICES]) + (", ..." if len(choices) > MOST_CHOICES else "")
            what = f"must be one of {few}, not `{shortened(text)}`"
            yield complain("choice", what, did_you_mean(text, choices, cutoff=0.7), position)
    surplus = given[most:] if found.joined is None else given[most:] + follow
    if surplus:
        position, text = surplus[0]
        if most == 0:
            takes = "is a switch and takes no value"
        elif found.joined is not None:
            takes = "takes no more values than the one after `=`"
        else:
            takes = f"takes {most} value{'s' * (most > 1)}"
        yield complain("arity", f"{takes}, so `{shortened(text)}` is one too many", "", position)


def _arity(option: Option) -> tuple[int, int]:
    """The least and the greatest number of values."""
    if option.is_switch:
        return 0, 0
    if option.nargs is None:
        return 1, 1
    if isinstance(option.nargs, int):
        return option.nargs, option.nargs
    return (1 if option.nargs == "+" else 0), 1_000_000


def _twice(before: Occurrence, found: Occurrence) -> Complaint:
    assert before.option is not None
    assert found.option is not None
    if before.name == found.name:
        what = f"`{found.name}` is given twice"
    elif before.option.action == found.option.action:
        what = f"`{found.name}` sets what `{before.name}` already sets"
    else:
        what = f"`{found.name}` contradicts `{before.name}`"
    hint = f"first given as argument {before.position + 1}, again as argument {found.position + 1}"
    return Complaint("twice", found.name, what, hint, found.position)


def _read(option: Option, text: str) -> Any:
    return _READERS[option.type](text) if option.type in _READERS else text


def _readable(option: Option, text: str) -> bool:
    try:
        _read(option, text)
    except ValueError:
        return False
    return True


def _as_integer(option: Option, text: str) -> str:
    """A hint for the integers that are written like numbers (`1e3`, `64.0`)."""
    try:
        number = float(text)
    except ValueError:
        return ""
    whole = option.type == "int" and number.is_integer() and abs(number) < 1e15
    return f"write `{int(number)}`" if whole else ""
