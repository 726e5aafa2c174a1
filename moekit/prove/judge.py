"""The verdict over two runs that exist: are they what the proof is about, and do its checks hold. No effects.

Runs that cannot show anything are refused, with everything that is wrong with them; that is no failed proof.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moekit.problems import MoekitError, Problem
from moekit.prove import alike, compare
from moekit.prove.compare import Check, Pair
from moekit.prove.runs import Run
from moekit.recipe.schema import Recipe


@dataclass(frozen=True)
class Result:
    """What a proof came to."""

    proof: str
    runs: tuple[Run, Run]
    pairs: list[Pair]
    """The steps that were compared."""
    checks: list[Check]
    alignment: str
    """Which steps belong together, and why."""

    @property
    def holds(self) -> bool:
        """Whether every check holds."""
        return all(check.holds for check in self.checks)


def one_expert(dense: Run, moe: Run) -> Result:
    """Judge a dense run that went on, and the MoE of one expert that began from the same checkpoint.

    Raises:
        MoekitError: they differ in what must be the same, have too few steps, or the MoE began from its own weights.
    """
    _refuse(alike.of_one_checkpoint(dense, moe), alike.one_expert(dense, moe))
    pairs, alignment = _behind_the_checkpoint(dense, moe, compare.ONE_EXPERT_STEPS)
    checks = compare.one_expert(pairs, router_weights(moe.loaded.recipe))
    return Result("one-expert", (dense, moe), pairs, checks, alignment)


def slices(dense: Run, moe: Run) -> Result:
    """Judge a dense run that went on, and the MoE whose experts are slices of the same checkpoint's layers.

    Raises:
        MoekitError: as `one_expert`; or the slices do not make up the dense layer.
    """
    _refuse(alike.of_one_checkpoint(dense, moe), alike.slices(dense, moe))
    pairs, alignment = _behind_the_checkpoint(dense, moe, 1)
    precision = moe.loaded.recipe.precision
    weights = "bf16" if precision.bf16 or precision.fp16 else "fp32"
    return Result("slices", (dense, moe), pairs, compare.slices(pairs, weights), alignment)


def deterministic(first: Run, second: Run) -> Result:
    """Judge two runs of one recipe in deterministic mode.

    Raises:
        MoekitError: their recipes or software differ, they are not in that mode, or have too few steps.
    """
    _refuse(alike.in_deterministic_mode((first, second)))
    return twice("deterministic", first, second)


def twice(proof: str, first: Run, second: Run) -> Result:
    """Compare two runs of one recipe, in whichever mode.

    Raises:
        MoekitError: their recipes or software differ, or they have too few steps.
    """
    _refuse(alike.twice(first, second))
    pairs = compare.align(first.steps, second.steps)
    _refuse(alike.enough(pairs, compare.DETERMINISTIC_STEPS, (first, second)))
    return Result(
        proof, (first, second), pairs, compare.same(pairs), "step n is iteration n of both runs, which begin alike"
    )


def router_weights(recipe: Recipe) -> int:
    """The router's weights of an MoE with one expert: its MoE layers x hidden size."""
    layers, pattern = recipe.model.num_layers or 0, recipe.moe.layer_freq
    return (sum(pattern.is_moe(layers)) if pattern else layers) * (recipe.model.hidden_size or 0)


def _behind_the_checkpoint(dense: Run, moe: Run, wanted: int) -> tuple[list[Pair], str]:
    """The first `wanted` steps of both behind the checkpoint they begin from."""
    start = min(dense.steps) - 1
    pairs = compare.align(dense.steps, moe.steps, start)[:wanted]
    _refuse(alike.enough(pairs, wanted, (dense, moe)))
    _refuse(alike.schedule(pairs, dense, moe))
    parent = moe.loaded.recipe.checkpoint.from_run
    return pairs, (
        f"step n is iteration {start} + n of `{dense.name}`, which goes on from `{parent}` without its optimizer "
        f"state, and iteration n of `{moe.name}`, upcycled from it: both with a new optimizer, the schedule from its "
        "beginning, and the same data"
    )


def _refuse(*found: Iterable[Problem]) -> None:
    """Refuse with everything that was found, if anything was."""
    problems = [problem for several in found for problem in several]
    if problems:
        raise MoekitError(*problems)
