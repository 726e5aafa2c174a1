"""What Megatron never notices, and the rules refuse: each such case has a run that shows why.

Of `harm: ignored`, three steps of the real trainer with the refused field and without it: the same losses and gradients
to the bit, so the field says nothing of what is trained. Other cases name a test function of `test_harm_*.py`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from cases import BROKEN, HERE, Case, label
from test_rules_real import question

from moekit.cluster.profile import find_cluster
from moekit.megatron.real import judge_all
from moekit.megatron.stages import Question
from moekit.megatron.verdict import Verdict
from moekit.recipe.load import load
from moekit.recipe.schema import Recipe

pytestmark = pytest.mark.megatron

IGNORED = [case for case in BROKEN if case.harm == "ignored"]


def without(recipe: Recipe, fields: set[str]) -> Recipe:
    """The recipe with some fields, or variables of its environment, unset."""
    for name in fields:
        section, _, field = name.partition(".")
        field, _, variable = field.partition(".")
        said = getattr(getattr(recipe, section), field)
        new = {key: value for key, value in said.items() if key != variable} if variable else None
        values = {key: value for key, value in vars(getattr(recipe, section)).items() if key != field}
        recipe = replace(recipe, **{section: type(getattr(recipe, section))(**values, **{field: new})})
    return recipe


def two_questions(case: Case, here: Path) -> list[Question]:
    """Three steps of the recipe as it is, and without what is refused of it."""
    recipe, cluster = load(str(case.write(here / "broken.yaml", case.broken))).recipe, find_cluster(case.profile)
    refused = {violation.fields[0] for violation in case.function(recipe, cluster)}
    return [question(r, cluster, ("parse", "validate", "step")) for r in (recipe, without(recipe, refused))]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Verdict, Verdict]]:
    """The last verdict on each of the two, all asked at once."""
    here = tmp_path_factory.mktemp("ignored")
    for name in ("bases", "profiles"):
        (here / name).symlink_to(HERE / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        asked = [question for case in IGNORED for question in two_questions(case, here)]
    last = [verdicts[-1] for verdicts in judge_all(asked)]
    return dict(zip(IGNORED, zip(last[::2], last[1::2], strict=True), strict=True))


@pytest.mark.parametrize("case", IGNORED, ids=label)
def test_what_is_ignored_changes_no_bit(case: Case, answers: dict[Case, tuple[Verdict, Verdict]]) -> None:
    with_it, without_it = answers[case]
    assert (with_it.stage, with_it.answer) == ("step", "passed"), with_it
    assert (without_it.stage, without_it.answer) == ("step", "passed"), without_it
    assert with_it.losses
    assert (with_it.losses, with_it.grad_norms) == (without_it.losses, without_it.grad_norms)


def test_every_other_harm_is_a_test() -> None:
    trees = [ast.parse(path.read_text()) for path in HERE.glob("test_harm_*.py")]
    tests = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {case.harm for case in BROKEN if case.harm} - {"ignored"} <= tests
