"""Rules on the variables and versions around the training processes."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.problems import shortened
from moekit.recipe.names import VARIABLE, variable_problem
from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def variables_can_be_set(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A variable of the job's shell or of Slurm breaks the job itself, or is lost without a word; never noticed."""
    for variable in recipe.runtime.environment or {}:
        if reason := variable_problem(variable):
            name = f"runtime.environment.{variable}"
            yield Violation((name,), f"`{name}` {reason[0]}", reason[1])
    for secret in recipe.runtime.secrets or ():
        if not VARIABLE.fullmatch(secret) or variable_problem(secret):
            yield Violation(
                ("runtime.secrets",),
                f"`runtime.secrets` has `{shortened(secret)}`, which is no name of a secret variable",
                "it lists names such as `HF_TOKEN`; their values stay in your shell",
            )


RULES: tuple[Rule, ...] = (variables_can_be_set,)
