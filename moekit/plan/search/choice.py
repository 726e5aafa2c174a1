"""A search of one recipe on one cluster, what of its answer is taken, and that as a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from moekit.plan.search.best import Answer, Found, Question, alike, search
from moekit.plan.search.child import PIPELINE, as_yaml, changes_of
from moekit.plan.search.grid import KNOBS, RANKS
from moekit.plan.search.steps import Step, alone, changes_training, path
from moekit.problems import error, shortened
from moekit.recipe.load import Loaded, file_and_variant
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import expert_tensor_ranks
from moekit.rehearse.edit import changed, differences
from moekit.writing import write_new

ALIKE = 0.01
"""Predicted times that differ by less are one: the layout with the fewest changes is taken. Runs of one layout differ
by more."""


@dataclass(frozen=True)
class Searched:
    """A search and what follows from it."""

    question: Question
    answer: Answer
    own: Found | None
    """The recipe's layout, fit or not; None where the rules refuse it."""
    chosen: Found
    steps: tuple[Step, ...]
    """The way to it."""
    alone: tuple[Step, ...]
    """Single changes of the recipe's layout."""
    seconds: float
    """That the search took."""

    def trains_otherwise(self, found: Found) -> bool:
        """Whether the model would learn otherwise under a layout."""
        return changes_training(self.question, found.point)


def dividing(loaded: Loaded) -> Loaded:
    """The recipe, its ranks lessened until they divide its GPUs: where a search on fewer of them begins.

    Raises:
        MoekitError: the global batch does not divide over them either way.
    """
    recipe = loaded.recipe
    gpus = recipe.parallel.gpus or 1
    tensor, expert_tensor = gcd(recipe.parallel.tensor_model or 1, gpus), gcd(expert_tensor_ranks(recipe), gpus)
    less: dict[str, Any] = {}
    for part in (
        {},
        {"parallel.pipeline_model": None, **{f"parallel.{name}": None for name in PIPELINE}},
        {"parallel.context": None},
        {"parallel.tensor_model": tensor, "parallel.expert_tensor": expert_tensor if recipe.moe.num_experts else None},
        {"parallel.expert_model": gcd(recipe.parallel.expert_model or 1, gpus // expert_tensor)},
        {"train.micro_batch_size": 1},
    ):
        less |= part
        new = changed(recipe, less)
        if _divides(new):
            return replace(loaded, recipe=new)
    batch = recipe.train.global_batch_size
    raise error(f"train.global_batch_size = {batch} does not divide over {gpus} GPUs in any layout", "change either")


def _divides(recipe: Recipe) -> bool:
    parallel, train = recipe.parallel, recipe.train
    gpus, tensor, pipeline = parallel.gpus or 1, parallel.tensor_model or 1, parallel.pipeline_model or 1
    ranks = tensor * pipeline * (parallel.context or 1)
    experts = (parallel.expert_model or 1) * expert_tensor_ranks(recipe) * pipeline
    if gpus % ranks or gpus % experts:
        return False
    return (train.global_batch_size or 1) % (gpus // ranks * (train.micro_batch_size or 1)) == 0


def searched(question: Question) -> Searched:
    """The layouts that are fastest, one of them taken, and the way to it.

    Raises:
        MoekitError: no layout fits, or the rules refuse all that do.
    """
    begin = time.perf_counter()
    answer = search(question)
    if not answer.fitting:
        question = replace(question, is_tight=True)
        answer = search(question)
    if not answer.survivors:
        raise _none(question, answer)
    chosen, grid = _chosen(question, answer), question.grid
    others = [one for one in answer.survivors if one.point[:RANKS] != chosen.point[:RANKS]]
    answer = replace(answer, survivors=sorted((chosen, *others), key=lambda one: one.seconds))
    own = question.judged(np.array([grid.own]))[0] if question.refusal(grid.own) is None else None
    steps, singles = tuple(path(question, chosen.point)), tuple(alone(question))
    return Searched(question, answer, own, chosen, steps, singles, time.perf_counter() - begin)


def _none(question: Question, answer: Answer) -> Exception:
    if answer.fitting:
        what, times = answer.refused.most_common(1)[0]
        return error(f"`check` refuses every layout that fits, {times} times: {what}", "`moekit check` says where")
    room, world = question.room_bytes / 2**30, question.grid.world
    return error(
        f"none of {answer.layouts:,} layouts fits {world} GPUs, of each of which {room:.1f} GiB can be used",
        "more GPUs (`--gpus N`), or a smaller model",
    )


def _chosen(question: Question, answer: Answer) -> Found:
    """Of the fastest that train alike, the one with the fewest changes; of none such, of all."""
    same = [one for one in answer.survivors if not changes_training(question, one.point)] or answer.survivors
    slower = same[0].seconds * (1 + ALIKE)
    near = [one for one in same if one.seconds <= slower]
    nearer = [other for one in near for other in alike(question, one, slower)]
    ordered = sorted((*near, *nearer), key=lambda one: (question.turned(one.point), one.seconds))
    return next(one for one in ordered if one in near or question.refusal(one.point) is None)


def write_child(found: Searched, written: Recipe, given: str, path: Path) -> None:
    """Write the chosen layout as a recipe whose base is `given`; `written` is what that says.

    Raises:
        MoekitError: the file is there already or cannot be written, or `given` is a run of a sweep.
    """
    from moekit.recipe.commands import schema_line

    if file_and_variant(given)[1] is not None:
        raise error(f"`{shortened(given)}` is a run of a sweep, which is no base", "write its fields into a recipe")
    question = found.question
    child = changed(question.recipe, changes_of(question.grid, question.recipe, question.target, found.chosen.point))
    base = os.path.relpath(given, path.parent) if Path(given).is_file() else given
    changes = {one.field: one.value for one in differences(written, child, {})}
    text = as_yaml(base, schema_line(path), _summary(found, given), changes, written)
    write_new(path, text, "choose another name")


def _summary(found: Searched, given: str) -> str:
    at = dict(zip(KNOBS, found.chosen.point, strict=True))
    grid = found.question.grid
    cut = grid.cuts[at["pipeline"]]
    ranks = f"tensor {grid.tensor[at['tensor']]}, pipeline {cut.pipeline}, expert {grid.expert[at['expert']]}"
    return f"{Path(given).stem} as `moekit plan --search` lays it over {grid.world} GPUs: {ranks}; not measured"


def as_values(found: Searched) -> Mapping[str, Any]:
    """All of it, for JSON."""
    answer, question = found.answer, found.question

    def layout(one: Found) -> dict[str, Any]:
        changes = changes_of(question.grid, question.recipe, question.target, one.point)
        plain = {name: json.loads(json.dumps(to, default=str)) for name, to in changes.items()}
        return {
            "seconds": one.seconds,
            "peak_bytes": one.peak_bytes,
            "changes_training": found.trains_otherwise(one),
            "changes": plain,
        }

    def step(one: Step) -> dict[str, Any]:
        return {**layout(one.found), "turned": list(one.changes), "changes_training": one.changes_training}

    return {
        "layouts": answer.layouts,
        "judged": answer.judged,
        "fitting": answer.fitting,
        "refused": dict(answer.refused),
        "own": layout(found.own) if found.own else None,
        "chosen": layout(found.chosen),
        "steps": [step(one) for one in found.steps],
        "alone": [step(one) for one in found.alone],
        "survivors": [layout(one) for one in answer.survivors],
    }
