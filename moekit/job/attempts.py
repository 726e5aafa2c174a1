"""A run's earlier attempts, from the files that each left: what `retry.py` decides by and `moekit why` shows."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __package__:
    from .endings import Ending, ending, last_saved, last_step, refusal
else:
    from endings import Ending, ending, last_saved, last_step, refusal  # type: ignore[import-not-found, no-redef]

MAX_ATTEMPTS = 100
"""Attempts of a run over all, where its recipe does not say."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run, and what it came to."""

    number: int
    ending: Ending
    began_at_step: int = 0
    """The checkpoint that it began from; 0 from the beginning."""
    step: int = 0
    """The last step that it logged."""
    checkpoint: int = 0
    """The last complete checkpoint when it had ended."""
    start: float = 0.0
    """Seconds since 1970; 0 where nobody wrote it down."""
    end: float = 0.0
    job: str = ""
    nodes: tuple[str, ...] = ()
    """In the order of ranks."""
    suspects: tuple[str, ...] = ()
    """Nodes that further attempts stay away from."""
    met: tuple[tuple[int, str], ...] = ()
    """Where a result was met that Megatron wants to see on another GPU: each the node's place in the order of ranks,
    and its name. A rank that comes upon its own GPU again ends the attempt."""
    forgiven: bool = False
    """Whether a person said that the run goes on in spite of all up to here."""


@dataclass(frozen=True)
class Facts:
    """What `retry.json` and `end` say of a run."""

    requeue: bool = False
    """Whether a job that can go on puts itself back into the queue."""
    max_attempts: int = MAX_ATTEMPTS
    world: int = 1
    """Ranks."""
    ranks_per_node: int = 1
    total: int = 0
    """The last step of the training; 0 where no file says it."""
    exit_interval: int = 0
    """Training ends at a multiple of it; 0 for none."""

    def is_end(self, step: int) -> bool:
        """Whether training ends at a step."""
        return 0 < self.total <= step or bool(step and self.exit_interval and step % self.exit_interval == 0)


def read_facts(run: Path) -> Facts:
    """What a run's files say of it; what is missing or unreadable is left at its default."""
    said = read_json(run / "retry.json")
    facts = Facts(
        requeue=bool(said.get("requeue")),
        max_attempts=int(said.get("max_attempts") or MAX_ATTEMPTS),
        world=int(said.get("world") or 1),
        ranks_per_node=int(said.get("ranks_per_node") or 1),
    )
    with suppress(OSError, ValueError, IndexError):
        lines = (run / "end").read_text().split()
        return replace(facts, total=int(lines[0]), exit_interval=int(lines[1]))
    return facts


def numbers(run: Path) -> list[int]:
    """The numbers of all starts of a run, ascending."""
    try:
        return sorted(int(name) for name in os.listdir(run / "attempts") if name.isdecimal())  # noqa: PTH208
    except OSError:
        return []


def new_attempt(run: Path) -> int:
    """Make the next start's folder and return its number; two launches or jobs never get the same one."""
    (run / "attempts").mkdir(exist_ok=True)
    number = max(numbers(run), default=0) + 1
    while True:
        try:
            (run / "attempts" / str(number)).mkdir()
        except FileExistsError:
            number += 1
        else:
            return number


def read_attempts(run: Path, facts: Facts) -> list[Attempt]:
    """All attempts of a run, ascending, each as if it had ended."""
    return [_read_attempt(run / "attempts" / str(number), number, facts) for number in numbers(run)]


def _read_attempt(folder: Path, number: int, facts: Facts) -> Attempt:
    decision, end = read_json(folder / "decision.json"), read_json(folder / "end.json")
    nodes = tuple(map(str, decision.get("nodes") or ()))
    if "kind" in end:
        how = Ending(str(end["kind"]), str(end.get("sentence", "")), tuple(end.get("ranks") or ()))
        saved = int(end.get("checkpoint") or 0)
    else:
        how, saved = ending(folder, facts.world, taken=True), last_saved(folder)
    if (folder / "cancelled").exists() and how.kind != "ended":
        how = Ending("stopped", "`moekit cancel` ended it")
    met = _met(how, nodes, facts.ranks_per_node)
    return Attempt(
        number=number,
        ending=how,
        began_at_step=int(decision.get("step") or 0),
        step=max(last_step(folder / "metrics.jsonl"), int(decision.get("step") or 0)),
        checkpoint=saved,
        start=float(decision.get("time") or 0),
        end=float(end.get("time") or 0),
        job=str(decision.get("job") or ""),
        nodes=nodes,
        suspects=_suspects(met, len(nodes)) or tuple(map(str, refusal(folder).get("bad") or ())),
        met=met,
        forgiven=(folder / "forgiven").exists(),
    )


def _met(how: Ending, nodes: Sequence[str], ranks_per_node: int) -> tuple[tuple[int, str], ...]:
    """Where ranks met the result that an attempt ended for, in the order in which they said so."""
    places = (rank // ranks_per_node for rank in how.ranks) if how.kind == "rerun" else ()
    return tuple(dict.fromkeys((place, nodes[place]) for place in places if place < len(nodes)))


def _suspects(met: Sequence[tuple[int, str]], nodes: int) -> tuple[str, ...]:
    """The nodes that had it; of more than half of them, which a NaN reaches that spread, the one that said so first."""
    names = tuple(name for _, name in met)
    return names if len(names) * 2 <= nodes else names[:1]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; an empty one where there is none, or half of one."""
    with suppress(OSError, ValueError):
        said = json.loads(path.read_text())
        if isinstance(said, dict):
            return said
    return {}
