"""What is said of a rehearsal: a line or two for each part, then what was not judged and why."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from moekit.megatron.cpu_limits import Limit
from moekit.megatron.judgement import in_one_line, shown_stage
from moekit.recipe.values import plain
from moekit.rehearse.edit import Change, value
from moekit.rehearse.plan import Part, Plan

_SIZES = (
    *("model.num_layers", "model.hidden_size", "model.ffn_hidden_size", "moe.ffn_hidden_size", "model.seq_length"),
    *("train.micro_batch_size", "train.global_batch_size"),
)
"""The changes that are told one by one."""
_LABEL = 14


def begin(made: Plan) -> Iterator[str]:
    """What is going to be done, before the seconds it takes."""
    yield from _fact("made small", ", ".join(_sizes(made)) + f"; {len(made.two.changes)} fields differ in all (--json)")
    layout = [change for change in made.two.changes if change.field.startswith("parallel.")]
    if told := [f"{change.field} {_of(made, change)}" for change in layout if change.field in _LAYOUT]:
        yield from _fact("on two", ", ".join(told))


_LAYOUT = tuple(f"parallel.{name}_model" for name in ("tensor", "pipeline", "expert"))


def _sizes(made: Plan) -> Iterator[str]:
    for change in made.two.changes:
        if change.field in _SIZES:
            yield f"{change.field} {_of(made, change)}"


def _of(made: Plan, change: Change) -> str:
    before, after = (plain(v) for v in (value(made.loaded.recipe, change.field), change.value))
    return f"{'unset' if before is None else before} → {'unset' if after is None else after}"


def told(part: Part) -> Iterator[str]:
    """A part that has ended."""
    yield from _fact(part.name, f"{part.seconds:.0f}\N{NO-BREAK SPACE}s: {_said(part)}")


def _said(part: Part) -> str:
    stages = [verdict for verdict in part.verdicts if verdict.stage not in ("step", "train")]
    if stages:
        said = [
            f"{', '.join(dict.fromkeys(names))} {word}"
            for answer, word in (("passed", "passed"), ("refused", "refused"), ("not_judged", "not judged"))
            if (names := [shown_stage(verdict.stage) for verdict in stages if verdict.answer == answer])
        ]
        return "; ".join(said)
    (verdict,) = part.verdicts
    if verdict.answer == "refused":
        return f"refused: {in_one_line(verdict.message)}"
    if verdict.answer == "not_judged":
        return f"not judged: {verdict.feature} ({in_one_line(verdict.message)})"
    if verdict.stage == "step":
        return "trained; the other ranks are made up, so the loss would say nothing"
    return "trained, loss " + ", ".join(f"{loss:.3f}" for loss in part.losses)


def end(made: Plan, parts: Sequence[Part]) -> Iterator[str]:
    """What was not judged, and the verdict."""
    limits = made.left_out
    replaced = [limit.feature for limit in limits if limit.build == "replaced"]
    if replaced:
        yield from _fact("in torch", f"plain torch in the place of kernels that only GPUs have: {', '.join(replaced)}")
    for limit in limits:
        if limit.build != "replaced":
            yield from _fact("left out", f"{limit.feature}, since {limit.reason}")
    yield verdict(made, parts)


def verdict(made: Plan, parts: Sequence[Part]) -> str:
    """The last line: whether it ran, and what a rehearsal can say of it."""
    name, missing = made.loaded.source.shown, not_judged(made, parts)
    if answer(parts) == "refused":
        return f"{name}: Megatron refuses it"
    if answer(parts) == "not_judged":
        return f"{name}: not rehearsed, nothing of it could be trained here"
    but = f"; {len(missing)} not judged: {', '.join(missing)}" if missing else ""
    return f"{name}: rehearsed, nothing refused{but}"


def answer(parts: Sequence[Part]) -> str:
    """`refused`; `passed` where real steps were taken; else `not_judged`."""
    if any(part.answer == "refused" for part in parts):
        return "refused"
    verdicts = [verdict for part in parts for verdict in part.verdicts if verdict.answer == "passed"]
    return "passed" if any(verdict.stage in ("step", "train") for verdict in verdicts) else "not_judged"


def not_judged(made: Plan, parts: Sequence[Part]) -> list[str]:
    """Features of the recipe of which the rehearsal says nothing, and parts that could not be done."""
    found = [limit.feature for limit in made.left_out if limit.build != "replaced"]
    found += [part.name for part in parts if part.answer == "not_judged"]
    return list(dict.fromkeys(found))


def as_json(made: Plan, parts: Sequence[Part]) -> dict[str, Any]:
    """All of it, for a script."""
    return {
        "answer": answer(parts),
        "parts": [_part_as_json(part) for part in parts],
        "left_out": [_limit_as_json(limit) for limit in made.left_out],
        "changes": {
            name: [{"field": c.field, "to": plain(c.value), "why": c.why} for c in changes]
            for name, changes in made.changes.items()
        },
    }


def _part_as_json(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "answer": part.answer,
        "seconds": round(part.seconds, 1),
        "losses": list(part.losses),
        "verdicts": [one.told() for one in part.verdicts],
        "problems": [asdict(problem) for problem in part.problems],
    }


def _limit_as_json(limit: Limit) -> dict[str, str]:
    return {
        "feature": limit.feature,
        "why": limit.reason,
        "how": "replaced" if limit.build == "replaced" else "left out",
    }


def _fact(label: str, text: str) -> Iterator[str]:
    """A labelled text, wrapped; a label too long for its column has a line of its own."""
    width = max(60, min(110, shutil.get_terminal_size().columns))
    indent = " " * (_LABEL + 2)
    if len(label) > _LABEL:
        yield f"  {label}"
        label = ""
    yield from textwrap.wrap(text, width, initial_indent=f"  {label:{_LABEL}}", subsequent_indent=indent) or [
        f"  {label}"
    ]
