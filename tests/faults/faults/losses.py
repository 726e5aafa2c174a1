"""Whether a run that was disturbed computed what an undisturbed one did: every number, of every attempt, to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Numbers = dict[int, dict[str, float]]
"""By step, by name."""
_TIMES = ("iteration-time", "batch-size", "samples vs steps")


def numbers(attempt: Path) -> Numbers:
    """What an attempt logged: losses, their parts, gradient norms, learning rates, of training and validation."""
    found: Numbers = {}
    for line in _lines(attempt / "metrics.jsonl"):
        if "step" in line:
            kept = {name: value for name, value in line["metrics"].items() if _is_computed(name)}
            found.setdefault(int(line["step"]), {}).update(kept)
    return found


def _is_computed(name: str) -> bool:
    return ("loss" in name or name in ("grad-norm", "learning-rate")) and "time" not in name and name not in _TIMES


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; a killed rank may have left half of one."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def of_run(run: Path) -> dict[int, Numbers]:
    """The numbers of all its attempts."""
    return {int(folder.name): numbers(folder) for folder in (run / "attempts").glob("[0-9]*")}


def last_step(run: Path, attempt: int) -> int:
    """The last step that an attempt logged; 0 before the first."""
    return max(numbers(run / "attempts" / str(attempt)), default=0)


def compare(run: Path, reference: Numbers) -> tuple[int, list[str]]:
    """How many numbers of a run are the reference's, and in a sentence each where one is not."""
    same, other = 0, []
    for attempt, steps in sorted(of_run(run).items()):
        for step, values in sorted(steps.items()):
            for name, value in values.items():
                expected = reference.get(step, {}).get(name)
                if value == expected:
                    same += 1
                else:
                    other.append(f"attempt {attempt}, step {step}: {name} is {value!r}, undisturbed {expected!r}")
    return same, other


def missing(run: Path, last: int) -> list[int]:
    """The steps up to `last` that no attempt logged."""
    seen = {step for steps in of_run(run).values() for step in steps}
    return [step for step in range(1, last + 1) if step not in seen]
