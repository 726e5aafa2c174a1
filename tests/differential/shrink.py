"""A disagreement as small as it gets: the fewest changes of the plainest seed that still show it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import combinations

from asking import Answers, ask
from generate import Case, Values, changed, seeds, text
from judged import DISAGREEMENTS, Kind, findings, needs_step, question, refusals
from tally import Tally

from moekit.recipe.values import order

PLAIN = "dense"
"""The seed that every disagreement is shrunk towards."""

Shrinking = Generator[list[Values], list[bool], Values]
"""Yields smaller recipes, takes for each whether the disagreement is still there, returns the smallest."""


def shrinking(case: Case) -> Shrinking:
    """First fewer changes of the case's own seed, then that seed's other fields as the plain seed has them."""
    changes = yield from _fewer_changes(case)
    values = changed(seeds()[case.seed], changes)
    others = [name for name in differences(values) if name not in changes]
    size = len(others)
    while others and size:
        chunks = [others[start : start + size] for start in range(0, len(others), size)]
        stays = yield [_plain(values, chunk) for chunk in chunks]
        gone = [chunk for chunk, stay in zip(chunks, stays, strict=True) if stay]
        together = [name for chunk in gone for name in chunk]
        if len(gone) > 1 and not (yield [_plain(values, together)])[0]:
            together = gone[0]
        values = _plain(values, together)
        others = [name for name in others if name not in together]
        size = min(size // 2 or len(gone[:1]), len(others))  # of single fields, until none goes
    return values


def _fewer_changes(case: Case) -> Generator[list[Values], list[bool], Values]:
    """The smallest part of the changes that shows it."""
    names = list(case.changes)
    parts = [set(part) for size in range(1, len(names)) for part in combinations(names, size)]
    if not parts:
        return case.changes
    smaller = [{name: value for name, value in case.changes.items() if name in part} for part in parts]
    stays = yield [changed(seeds()[case.seed], changes) for changes in smaller]
    return next((changes for changes, stay in zip(smaller, stays, strict=True) if stay), case.changes)


def differences(values: Values) -> Values:
    """What a recipe has otherwise than the plain seed, in the schema's order; None is unset here and set there."""
    plain = seeds()[PLAIN]
    names = sorted({**plain, **values}, key=order)
    return {name: values.get(name) for name in names if values.get(name) != plain.get(name)}


def _plain(values: Values, names: Sequence[str]) -> Values:
    """The recipe with these fields as the plain seed has them."""
    return changed(values, {name: seeds()[PLAIN].get(name) for name in names}) if names else values


def shrunk(cases: Sequence[Case], stays: Callable[[list[tuple[int, Values]]], list[bool]]) -> list[Values]:
    """Each case's smallest recipe, all shrunk side by side: `stays` is asked once a round, for (case, recipe) pairs."""
    running = {index: shrinking(case) for index, case in enumerate(cases)}
    found: dict[int, Values] = {}
    waiting: dict[int, list[Values]] = {}

    def advance(index: int, said: list[bool] | None) -> None:
        try:
            waiting[index] = next(running[index]) if said is None else running[index].send(said)
        except StopIteration as end:
            found[index] = end.value
            waiting.pop(index, None)

    for index in running:
        advance(index, None)
    while waiting:
        pairs = [(index, values) for index, several in waiting.items() for values in several]
        said = iter(stays(pairs))
        for index, count in [(index, len(several)) for index, several in waiting.items()]:
            advance(index, [next(said) for _ in range(count)])
    return [found[index] for index in range(len(cases))]


def minimal(tally: Tally, answers: Answers, jobs: int | None) -> dict[tuple[Kind, str], Values]:
    """Of each group of disagreements, what its smallest recipe has otherwise than the plain seed."""
    wanted = [(kind, group) for kind in DISAGREEMENTS for group, _ in tally.of(kind)]
    cases = [tally.smallest[key][0] for key in wanted]

    def stays(pairs: list[tuple[int, Values]]) -> list[bool]:
        return _still_there([(wanted[index], cases[index].profile, values) for index, values in pairs], answers, jobs)

    return dict(zip(wanted, map(differences, shrunk(cases, stays)), strict=True))


def page(tally: Tally, smallest: dict[tuple[Kind, str], Values]) -> str:
    """The smallest recipes in Markdown."""
    blocks = []
    for (kind, group), values in smallest.items():
        case, said = tally.smallest[kind, group]
        recipe = text(values).replace("\n", "\n    ").rstrip()
        head = f"### {kind}: {group} ({tally.groups[kind, group]})"
        blocks.append(f"{head}\n\n{said}\n\n    base: {PLAIN}  # {case.profile}\n    {recipe}\n")
    return "\n".join(blocks)


def _still_there(asked: list[tuple[tuple[Kind, str], str, Values]], answers: Answers, jobs: int | None) -> list[bool]:
    """Whether each recipe on its profile shows a finding of that kind and group.

    What our own answer already rules out, Megatron is not asked.
    """
    ours = [refusals(values, profile) for _, profile, values in asked]
    open_ = [
        index
        for index, ((kind, group), _, _) in enumerate(asked)
        if kind == "masked"
        or (kind == "false accept" and not ours[index])
        or any(group == f"{refusal.source} ({refusal.stage})" for refusal in ours[index])
    ]
    questions = []
    for index in open_:
        (_, group), profile, values = asked[index]
        questions.append(question(values, profile, group.startswith("step ") or needs_step(ours[index])))
    there = [False] * len(asked)
    for index, theirs in zip(open_, ask(questions, answers, jobs, len(open_)), strict=True):
        (kind, group), _, values = asked[index]
        kinds = ("masked", "false accept") if kind == "masked" else (kind,)
        found = findings(values, ours[index], theirs)
        there[index] = any(finding.kind in kinds and finding.group == group for finding in found)
    return there
