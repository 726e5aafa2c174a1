"""Why an attempt's training ended, from what its ranks and torchrun left in `attempts/N/`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

STOPPED = (128 + 2, 128 + 15)
"""Exit codes of ranks that were stopped by SIGINT or SIGTERM: never a cause, torchrun stops the others so."""

GAVE_UP = "SystemExit: None"
"""Where Megatron has nothing to start from it prints why and leaves without a code, which Python makes 0."""


def exit_records(attempt: Path) -> dict[int, dict[str, Any]]:
    """`exit/rankR.json` by rank (`moekit/job/exits.py`); a rank without one is running or was killed."""
    return {
        int(path.stem.removeprefix("rank")): json.loads(path.read_text())
        for path in sorted((attempt / "exit").glob("rank*.json"))
    }


def ended_well(attempt: Path, world: int) -> bool:
    """Whether every rank came to its end by itself."""
    records = exit_records(attempt)
    return len(records) == world and all(
        record["code"] == 0 and record["reason"] != GAVE_UP for record in records.values()
    )


def first_cause(attempt: Path, world: int) -> str:
    """One sentence: what broke first, as far as the files tell."""
    records = exit_records(attempt)
    log = attempt / "train.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    killed = [rank for rank in range(world) if rank not in records]
    if killed and re.search(r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\)", text):
        return f"rank {killed[0]} was killed (SIGKILL): most often the machine was out of memory"
    if found := not_a_number(text):
        return found
    failed = [(record["time"], rank) for rank, record in records.items() if record["code"] not in (0, *STOPPED)]
    if failed:
        _, rank = min(failed)
        reason = str(records[rank]["reason"]).strip().splitlines()[0]
        refusal = re.search(r"^\S+: error: (.*)$", text, re.MULTILINE)  # argparse, which exits with 2
        if reason == "SystemExit: 2" and refusal:
            return f"Megatron refuses its arguments: {refusal[1]}"
        return f"rank {rank}: {reason}"
    if any(record["reason"] == GAVE_UP for record in records.values()):
        said = re.findall(r"^>> (.*?)(?: <<)?$", text, re.MULTILINE)
        return f"Megatron left without training{': ' + said[-1] if said else ''}"
    return first_error(text) or "it ended without a word"


def first_error(text: str) -> str:
    """The last line of the first Python traceback in `text`, else its last line; empty for an empty text."""
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if "Traceback (most recent call last):" in line:
            after = (later for later in lines[number + 1 :] if not later.startswith(" "))
            return next(after, line).strip()
    return lines[-1].strip() if lines else ""


def not_a_number(text: str) -> str:
    """What Megatron's check found that is no number, from a log; it then goes on to other failures, or saves to None.

    megatron/core/rerun_state_machine.py of 0.19.2, `validate_result`.
    """
    found = re.search(r"Unexpected result (\S+) on rank (\d+) at iteration .*\(message='([^']*)'\)", text)
    return f"rank {found[2]}: {found[3]} (it is {found[1]})" if found else ""
