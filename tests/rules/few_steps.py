"""Three steps of the real trainer on this machine, to be compared with three others."""

from __future__ import annotations

from pathlib import Path

from cases import Case
from test_rules_real import question

from moekit.launch.cluster import find_cluster
from moekit.megatron.real import judge_all
from moekit.recipe.load import load


def few_steps(here: Path, *changes: tuple[str, str]) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Losses and gradient norms of each base with its change, exactly as Megatron has them."""
    recipes = [
        load(str(Case(base).write(here / f"{i}.yaml", change))).recipe for i, (base, change) in enumerate(changes)
    ]
    last = [
        found[-1] for found in judge_all([question(r, find_cluster(), ("parse", "validate", "step")) for r in recipes])
    ]
    assert {(verdict.stage, verdict.answer) for verdict in last} == {("step", "passed")}, last
    return [(verdict.losses, verdict.grad_norms) for verdict in last]
