"""Whether a run's stack is proven, to be asked before a setting is blamed (handbook A.2): what `moekit prove` left."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moekit.launch.rundir import RunDir
from moekit.prove.record import read, software_text

ASKED = ("one-expert", "deterministic")
"""The two that the handbook asks for (2.5)."""
_COMPARED = ("megatron", "torch", "transformer_engine", "device")
"""moekit's own version does not train."""


@dataclass(frozen=True)
class Proof:
    """What is on record of one."""

    name: str
    state: str
    """`passed`, `failed`, `other software` (on record, of another stack), `missing`."""
    sentence: str


def proofs(run: RunDir) -> list[Proof]:
    """What is on record for the software that trained a run.

    Raises:
        MoekitError: a record is none of moekit's.
    """
    software = _software(run)
    return [_proof(run.path.parent.parent, name, software) for name in ASKED]


def _proof(root: Path, name: str, software: dict[str, Any]) -> Proof:
    found = read(root, name)
    if not found:
        return Proof(name, "missing", f"not on record; `moekit prove {name}` makes it")
    if software:
        same = [one for one in found if all(one["software"].get(key) == software.get(key) for key in _COMPARED)]
        if not same:
            what = f"on record for {software_text(found[0]['software'])}, and not for this run's software"
            return Proof(name, "other software", f"{what}; `moekit prove {name}` makes it")
        found = same
    said = "" if software else ", and what trained this run is not on record"
    return Proof(name, found[0]["verdict"], f"{found[0]['verdict']} on {found[0]['when']}{said}")


def _software(run: RunDir) -> dict[str, Any]:
    """Of the newest attempt that told it; empty where none did."""
    for number in reversed(run.numbers()):
        with suppress(OSError, ValueError):
            said = json.loads(run.attempt(number).software.read_text())
            if isinstance(said, dict):
                return said
    return {}
