"""A search as text: single changes to measure, the fastest layouts, the way to the one that is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moekit.plan.flops import per_token
from moekit.plan.memory.verdict import fit_of
from moekit.plan.report.table import table
from moekit.plan.search.best import Found
from moekit.plan.search.choice import Searched
from moekit.plan.search.grid import KNOBS
from moekit.plan.search.steps import Step, shown_value

_SINGLE = 12
_HEADS = {"expert_tensor": "expert tensor", "micro_batch": "micro batch", "overlap": "expert overlap"}


def search_lines(found: Searched) -> Iterator[str]:
    """The whole answer."""
    answer, question = found.answer, found.question
    where = f"{question.grid.world} {question.target.gpu} of {question.target.name}"
    yield (
        f"{answer.layouts:,} legal layouts on {where} in {found.seconds:.1f} s; {answer.judged:,} worked out, "
        f"{answer.fitting:,} of them fit"
    )
    room, whole = question.room_bytes / 2**30, question.capacity_bytes / 2**30
    tight = ", as none needs less: they are tight" if question.is_tight else ""
    yield f"  fits: needs up to {room:.1f} GiB, {room / whole:.0%} of {whole:.1f}{tight}"
    for what, times in answer.refused.most_common(3):
        yield f"  {times} faster ones are refused by `moekit check`: {what}"
    yield f"  steps are {question.time_mark}, memory modelled; runs of one layout differ by about 5 %"
    yield ""
    yield from _own_lines(found)
    yield from _single_lines(found)
    yield ""
    yield f"the {len(answer.survivors)} fastest, one of each ranks and micro batch"
    yield from _survivor_lines(found)
    yield ""
    yield from _way_lines(found)


def _own_lines(found: Searched) -> Iterator[str]:
    if found.own is None:
        yield "the recipe's own layout is refused by `moekit check`"
    else:
        fit = fit_of(found.own.peak_bytes, found.question.capacity_bytes)
        yield f"the recipe's own layout: {_cost(found, found.own)}, {fit}"


def _cost(found: Searched, one: Found) -> str:
    return f"{one.seconds:,.3f} s a step, {_rate(found, one):,.1f} TFLOP/s, {one.peak_bytes / 2**30:.1f} GiB"


def _rate(found: Searched, one: Found) -> float:
    shape, grid = found.question.shape, found.question.grid
    assert shape.seq_length
    tokens = grid.global_batch * shape.seq_length
    return per_token(shape, shape.seq_length) * tokens / grid.world / one.seconds / 1e12


def _single_lines(found: Searched) -> Iterator[str]:
    yield ""
    yield "single changes of it, to be measured one by one: gains do not add (handbook 3.7)"
    if not found.alone:
        yield "  none fits"
        return
    yield from table([_STEP_HEAD, *(_step_row(found, one, found.own) for one in found.alone[:_SINGLE])], left=1)
    if len(found.alone) > _SINGLE:
        yield f"  {len(found.alone) - _SINGLE} slower ones are in `--json`"


_STEP_HEAD: tuple[str, ...] = ("change", "step, s", "to before", "GiB", "")


def _step_row(found: Searched, step: Step, before: Found | None) -> tuple[str, ...]:
    one = step.found
    to = "" if before is None else f"{one.seconds / before.seconds - 1:+.1%}"
    marks = ["changes training"] * step.changes_training
    fit = fit_of(one.peak_bytes, found.question.capacity_bytes)
    marks += [fit] * (fit != "fits")
    return ", ".join(step.changes), f"{one.seconds:,.3f}", to, f"{one.peak_bytes / 2**30:.1f}", ", ".join(marks)


def _survivor_lines(found: Searched) -> Iterator[str]:
    grid = found.question.grid
    varied = [
        knob
        for place, knob in enumerate(KNOBS)
        if len({grid.own[place], *(one.point[place] for one in found.answer.survivors)}) > 1
    ]
    rows = [("", "step, s", "TFLOP/s", "GiB", *(_HEADS.get(knob, knob) for knob in varied), "")]
    names: dict[str, str] = {}
    for one in found.answer.survivors:
        numbers = (f"{one.seconds:,.3f}", f"{_rate(found, one):,.1f}", f"{one.peak_bytes / 2**30:.1f}")
        values = [_short(shown_value(grid, knob, one.point[KNOBS.index(knob)]), names) for knob in varied]
        taken = ">" if one.point == found.chosen.point else ""
        rows.append((taken, *numbers, *values, "changes training" if found.trains_otherwise(one) else ""))
    yield from table(rows, left=0)
    yield from (f"  ({name}) {value}" for value, name in names.items())


def _short(value: str, names: dict[str, str]) -> str:
    """The value, or a letter for one too long for a column, put down in `names`."""
    return value if len(value) <= _LONGEST else f"({names.setdefault(value, chr(ord('a') + len(names)))})"


_LONGEST = 18
_LIBRARIES = {"deepep": "DeepEP", "hybridep": "HybridEP"}


def _way_lines(found: Searched) -> Iterator[str]:
    if not found.steps:
        yield "the recipe's own layout is as fast as any: nothing to change"
        return
    yield f"taken: {_cost(found, found.chosen)}, in these steps"
    before, rows = found.own, [_STEP_HEAD]
    for step in found.steps:
        rows.append(_step_row(found, step, before))
        before = step.found
    yield from table(rows, left=1)
    grid, place = found.question.grid, KNOBS.index("dispatcher")
    library = grid.dispatcher[found.chosen.point[place]]
    if found.chosen.point[place] != grid.own[place] and library in _LIBRARIES:
        yield f"  whether your image has {_LIBRARIES[library]} no rule knows: look before it is launched"
    if any(found.trains_otherwise(one) for one in found.answer.survivors):
        yield "  `changes training`: balancing evens out the tokens of a micro batch (handbook 3.3); such a layout is"
        yield "  taken only where no other fits"


def remedy_lines(found: Sequence[Step], own_seconds: float) -> Iterator[str]:
    """Single changes with which a layout fits, the cheapest first."""
    if not found:
        yield "  no single change makes it fit; `--search` walks all layouts"
        return
    yield "  remedies, each alone, as `moekit check` accepts them:"
    rows = [
        (
            ", ".join(step.changes),
            f"{step.found.seconds / own_seconds - 1:+.1%} time",
            f"{step.found.peak_bytes / 2**30:.1f} GiB",
            "changes training" if step.changes_training else "",
        )
        for step in _of_each_kind(found)[:_REMEDIES]
    ]
    yield from (f"  {line}" for line in table(rows, left=1))


_REMEDIES = 6


def _of_each_kind(found: Sequence[Step]) -> list[Step]:
    """The first of the changes of each knob."""
    kinds: dict[str, Step] = {}
    for step in found:
        kinds.setdefault(step.changes[0].partition(" -> ")[0], step)
    return list(kinds.values())
