"""What logs say when a run fails or is slow, as data: `causes/*.yaml`, and which cause comes before which.

Of the causes that a log names, the first of the first tier is the one; what it `explains` follows from it, wherever it
stands. A watchdog's time-out is printed by every rank that waited, often before the node's own message of its GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import yaml

Tier = Literal["root", "event", "unnamed", "echo", "drag"]

PRECEDENCE: tuple[Tier, ...] = ("root", "event", "unnamed", "echo")
"""Whose cause comes first, whatever line it stands on.

`root`: nothing in a run brings it about. `event`: it ends a run, and may follow from a root. `unnamed`: an exception
that no cause knows. `echo`: what ranks say whose other end is gone, and what is said of an end. `drag` is beside them:
it makes a run slow and does not end it.
"""
_ORDER: tuple[Tier, ...] = (*PRECEDENCE, "drag")
OF_NETWORK = ("nccl_socket", "plugin_missing", "fabric_abi")
"""Causes that say nothing of a run within one node."""
UNNAMED = "exception"
"""The cause of an exception that no other knows."""


@dataclass(frozen=True)
class Cause:
    """One thing that can be wrong, and how software says so."""

    key: str
    tier: Tier
    says: tuple[str, ...]
    """Regular expressions over one line."""
    cause: str
    """One sentence."""
    sure: Literal["sure", "likely", "possible"]
    """How sure it is where a line says it."""
    more: str
    """What would tell more, and how to get it."""
    remedy: str
    section: str = ""
    """Of the handbook."""
    explains: tuple[str, ...] = ()
    """Causes that follow from this one where both are found."""
    when_resumed: bool = False
    """Only of an attempt that others went before: of a first one it is as it should be."""
    broad: bool = False
    """What it says may be of others too, which are asked of a line before it."""
    lasts: bool = False
    """Training may go on for a while after it, as after a fault of a GPU that others wait for."""
    text: str = ""
    """Of Megatron's own: a part of the message as it stands in its source."""


@cache
def causes() -> dict[str, Cause]:
    """All causes by key, in the order of their files."""
    found = {}
    for path in sorted((Path(__file__).parent / "causes").glob("*.yaml")):
        for key, said in yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader).items():
            said |= {"says": tuple(said["says"]), "explains": tuple(said.get("explains", ()))}
            found[key] = Cause(key, **{**said, "section": str(said.get("section", ""))})
    found[UNNAMED] = Cause(
        UNNAMED,
        "unnamed",
        (),
        "an exception ended the training",
        "possible",
        "the traceback above that line, of the rank that printed it first",
        "what the exception names; a bare assertion of Megatron's stands with its condition in the traceback",
    )
    return found


def patterns() -> list[tuple[str, str]]:
    """Each expression of each cause with its key, in the order in which a line is asked for them."""
    ordered = sorted(causes().values(), key=lambda cause: (cause.broad, _ORDER.index(cause.tier)))
    return [(cause.key, said) for cause in ordered for said in cause.says]


def first(found: Iterable[tuple[str, int]], survived: Collection[str] = ()) -> list[str]:
    """The keys of found causes, each with the line it first stands on, as they are to be told: the first cause first.

    What another explains comes behind all others, and what training `survived` behind what it did not.
    """
    known = causes()
    lines = dict(found)
    explained = {
        other for key in lines for other in known[key].explains if other in lines and key not in known[other].explains
    }
    return sorted(lines, key=lambda key: (key in explained, key in survived, _ORDER.index(known[key].tier), lines[key]))
