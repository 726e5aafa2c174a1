"""What proofs leave: `<shared root>/proofs/<name>.json`, the newest of each software, for whoever asks later.

To be asked before a setting is blamed: a stack that is not proven may be what is wrong (handbook A.2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moekit.launch.folders import write
from moekit.problems import error
from moekit.prove.compare import BALANCE_LOSS, GRAD_NORM, ZEROS, Check, Pair, balance_loss
from moekit.prove.judge import Result
from moekit.prove.runs import Run, Software
from moekit.watch.metrics import LOSS

Record = dict[str, Any]

NAMES = ("one-expert", "slices", "deterministic")


def as_record(result: Result, sentence: str, when: str, without: Result | None = None) -> Record:
    """A proof as JSON keeps it. `when`: a time in ISO 8601. `without`: the same two runs without deterministic mode."""
    record: Record = {
        "proof": result.proof,
        "verdict": "passed" if result.holds else "failed",
        "sentence": sentence,
        "when": when,
        "software": result.runs[0].software,
        "runs": [_run(run) for run in result.runs],
        "alignment": result.alignment,
        "checks": [_check(check) for check in result.checks],
        "steps": [_pair(pair) for pair in result.pairs],
    }
    if without:
        runs, checks = [_run(run) for run in without.runs], [_check(check) for check in without.checks]
        record["without_deterministic_mode"] = {"runs": runs, "checks": checks}
    return record


def _run(run: Run) -> Record:
    return {"name": run.name, "folder": run.shown}


def _check(check: Check) -> Record:
    return {
        "what": check.what,
        "holds": check.holds,
        "bound": check.bound,
        "largest": _number(check.largest),
        "parts_at": check.parts_at,
        "parts_by": _number(check.parts_by),
    }


def _pair(pair: Pair) -> Record:
    values: Record = {"step": pair.step, "iterations": [pair.first_step, pair.second_step]}
    for name in (LOSS, GRAD_NORM, ZEROS):
        values[name] = [_number(pair.first.get(name)), _number(pair.second.get(name))]
    values[BALANCE_LOSS] = [_number(balance_loss(pair.first)), _number(balance_loss(pair.second))]
    return values


def _number(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity; they are told by name."""
    return value if value is None or math.isfinite(value) else str(value)


def keep(root: Path, record: Record) -> Path:
    """Put a record with those of other software, in the place of an older one of the same; the file's path."""
    others = [old for old in read(root, record["proof"]) if old["software"] != record["software"]]
    text = json.dumps([record, *others], indent=1) + "\n"
    write(root / "proofs", {_file(root, record["proof"]).name: text})
    return _file(root, record["proof"])


def read(root: Path, proof: str) -> list[Record]:
    """The records of a proof, the newest first; empty where there is none.

    Raises:
        MoekitError: the file is not one of moekit's.
    """
    file = _file(root, proof)
    if not file.is_file():
        return []
    try:
        found: list[Record] = json.loads(file.read_text(encoding="utf-8"))
        known = all(set(NAMES) >= {one["proof"]} and one["software"] and one["when"] for one in found)
    except (ValueError, LookupError, TypeError):
        known = False
    if not known:
        raise error("this is no record of proofs", "remove it; the next `moekit prove` writes another", str(file))
    return sorted(found, key=lambda one: str(one["when"]), reverse=True)


def _file(root: Path, proof: str) -> Path:
    return root / "proofs" / f"{proof}.json"


def software_text(software: Software | Mapping[str, str | None]) -> str:
    """`Megatron 0.19.2, torch 2.13.0, no Transformer Engine, on cpu, by moekit 0.1.0`."""
    engine = software.get("transformer_engine")
    parts = [
        f"Megatron {software.get('megatron') or 'of unknown version'}",
        f"torch {software.get('torch') or 'of unknown version'}",
        f"Transformer Engine {engine}" if engine else "no Transformer Engine",
        f"on {software.get('device') or 'an unknown device'}",
        f"by moekit {software.get('moekit') or 'of unknown version'}",
    ]
    return ", ".join(parts)
