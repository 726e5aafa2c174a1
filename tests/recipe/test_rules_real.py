"""What the rules let pass, the real Megatron lets pass too, as far as it can be judged without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_rules import CLUSTER, FINE

from moekit.launch.rundir import run_arguments
from moekit.launch.script import environment
from moekit.megatron.flags import argv
from moekit.megatron.real import judge_all
from moekit.megatron.stages import Question
from moekit.recipe.load import load
from moekit.recipe.schema import Recipe

pytestmark = pytest.mark.megatron


def question(recipe: Recipe) -> Question:
    variables = {name: value for name, value in environment(recipe, CLUSTER).items() if value is not None}
    return Question(
        argv=argv(run_arguments(recipe, "run", "/shared", resume=False)),
        world_size=recipe.parallel.gpus or 1,
        transformer_engine=CLUSTER.transformer_engine,
        environment=variables,
    )


def test_megatron_refuses_nothing_that_the_rules_allow(tmp_path: Path) -> None:
    recipes = []
    for index, (base, change) in enumerate(FINE):
        path = tmp_path / f"{index}.yaml"
        path.write_text(f"base: {base}\n{change}\n")
        recipes.append(load(str(path)).recipe)
    refused = {
        change: [f"{verdict.stage}: {verdict.message}" for verdict in verdicts if verdict.answer == "refused"]
        for (_, change), verdicts in zip(FINE, judge_all([question(recipe) for recipe in recipes]), strict=True)
    }
    assert {change: said for change, said in refused.items() if said} == {}
