"""A run's attempts as a table, and what comes next: as text for a terminal or a pipe, or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from moekit.runs.history import History, Start
from moekit.runs.look import Seen
from moekit.runs.report import as_json as run_as_json
from moekit.runs.report import headline, next_command, when

_COLUMNS = ("ATTEMPT", "START", "END", "STEPS", "JOB", "NODES", "CAUSE", "DECISION")
_SENTENCES = 2
"""The last columns, which wrap."""
_LEAST_ROOM = 60
"""Characters for both of them, below which they get lines of their own."""
_LABEL = 14
"""Where facts begin, as `moekit status` has them."""


def lines(seen: Seen, history: History, profile: str | None, width: int | None) -> Iterator[str]:
    """What a person reads; `width` is the terminal's in characters, None where nothing is wrapped."""
    yield headline(seen)
    if history.starts:
        yield ""
        last = history.starts[-1]
        rows = [
            _row(start, start.then or (_outcome(seen, history) if start is last else "")) for start in history.starts
        ]
        yield from _table(rows, width)
        yield ""
    for sentence in history.passed_over:
        yield from _fact("checkpoint", sentence, width)
    if history.decision and seen.state.word != "finished":
        yield from _fact("decision", history.decision.sentence or "begins at the beginning", width)
    if history.exclude:
        yield from _fact("excluded", ", ".join(history.exclude), width)
    if command := next_command(seen, history, profile):
        yield from _fact("next", command, None)


def as_json(seen: Seen, history: History, profile: str | None) -> dict[str, Any]:
    """The same for a script; times in seconds since 1970."""
    decision = history.decision
    return {
        **run_as_json(seen),
        "attempts": [_start_as_json(start) for start in history.starts],
        "decision": {**asdict(decision), "goes_on": decision.goes_on} if decision else None,
        "exclude": list(history.exclude),
        "passed_over": list(history.passed_over),
        "next": next_command(seen, history, profile) or None,
    }


def _start_as_json(start: Start) -> dict[str, Any]:
    attempt = start.attempt
    return {
        "attempt": attempt.number,
        "start": attempt.start or None,
        "end": None if start.running else attempt.end or None,
        "from_step": attempt.began_at_step,
        "step": attempt.step,
        "job": attempt.job or None,
        "nodes": list(attempt.nodes),
        "running": start.running,
        "kind": None if start.running else attempt.ending.kind,
        "cause": start.cause or None,
        "suspects": list(attempt.suspects),
        "forgiven": attempt.forgiven,
        "then": start.then or None,
    }


def _row(start: Start, then: str) -> tuple[str, ...]:
    attempt = start.attempt
    steps = f"{attempt.began_at_step:,}-{attempt.step:,}"
    end = "" if start.running else when(attempt.end)
    cause = "running" if start.running else start.cause
    return (str(attempt.number), when(attempt.start), end, steps, attempt.job, _nodes(attempt.nodes), cause, then)


def _outcome(seen: Seen, history: History) -> str:
    """What the last attempt led to, in few words: the whole sentence stands below."""
    decision = history.decision
    if seen.state.word == "finished" or (decision and decision.action == "finished"):
        return "finished"
    if decision is None:
        return ""
    if decision.action == "stop":
        return "stop"
    if not any(job.waiting for job in seen.state.live):
        return "can go on" if decision.step else "can begin anew"
    return f"job {seen.state.live[0].id} waits"


def _nodes(names: Sequence[str]) -> str:
    return ",".join(names) if len(names) <= 3 else f"{names[0]},... ({len(names)})"


def _table(rows: Sequence[tuple[str, ...]], width: int | None) -> Iterator[str]:
    """A line for each row below a heading; sentences wrap in their columns, or below the row where those are narrow."""
    columns = list(zip(_COLUMNS, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    room = (width or 0) - sum(widths[:-_SENTENCES]) - 2 * (len(widths) - 1)
    if width and room < min(_LEAST_ROOM, sum(widths[-_SENTENCES:])):
        facts = widths[:-_SENTENCES]
        yield _line(_COLUMNS, facts)
        for row in rows:
            yield _line(row, facts)
            for mark, sentence in zip(("  ", "→ "), row[-_SENTENCES:], strict=True):
                yield from textwrap.wrap(sentence, width, initial_indent=f"  {mark}", subsequent_indent="    ")
        return
    if width and room < sum(widths[-_SENTENCES:]):
        then = min(widths[-1], max(room // 3, room - widths[-2]))
        widths[-_SENTENCES:] = [room - then, then]
    for row in (_COLUMNS, *rows):
        wrapped = [textwrap.wrap(cell, room) for cell, room in zip(row, widths, strict=True)]
        for cells in zip_longest(*wrapped, fillvalue=""):
            yield _line(cells, widths)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip()


def _fact(label: str, text: str, width: int | None) -> list[str]:
    begin = f"  {label.ljust(_LABEL - 2)}"
    if not width:
        return [begin + text]
    return textwrap.wrap(text, max(width, 40), initial_indent=begin, subsequent_indent=" " * _LABEL)
