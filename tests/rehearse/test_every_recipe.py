"""Every shipped recipe trains in two real processes, made small: it saves, goes on, and logs what it asks for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.megatron.installed import find_judge
from moekit.megatron.ranks import Training
from moekit.megatron.real import judge_each
from moekit.recipe.load import load
from moekit.rehearse.plan import Part, Plan, plan
from moekit.rehearse.small import ITERATIONS, VOCABULARY
from moekit.rehearse.two import trained, training
from moekit.watch.metrics import history

NAMES = share.shipped_recipes()

Rehearsed = tuple[Plan, list[Part], Path]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rehearsed]:
    """Each recipe's plan, its parts and the directory of its run; Megatron is imported once."""
    folder = tmp_path_factory.mktemp("rehearsed")
    plans = {name: plan(load(name), find_cluster(share.made_for(name))) for name in NAMES}
    asked = {name: training(made, folder / str(number)) for number, (name, made) in enumerate(plans.items())}
    assert [question for question in asked.values() if isinstance(question, str)] == []
    trainings = [question for question in asked.values() if isinstance(question, Training)]
    judge = find_judge()
    assert judge
    found = {}
    for (name, made), question, verdicts in zip(
        plans.items(), trainings, judge_each(trainings, at_once=1), strict=True
    ):
        found[name] = (made, list(trained(question, verdicts, made, judge)), Path(question.starts[-1].run))
    return found


@pytest.mark.megatron
@pytest.mark.train
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_it_trains(name: str, rehearsed: dict[str, Rehearsed]) -> None:
    made, parts, run = rehearsed[name]
    assert [verdict.message for part in parts for verdict in part.verdicts if verdict.answer != "passed"] == []
    recipe = made.two.recipe
    starts = (2 if recipe.checkpoint.save else 1) + (recipe.checkpoint.from_run is not None)
    assert len(parts) == starts
    steps = history(run)
    ended = ITERATIONS * (2 if recipe.checkpoint.save else 1)
    first = (
        ITERATIONS if recipe.checkpoint.from_run and not (recipe.moe.use_upcycling or recipe.checkpoint.finetune) else 0
    )
    assert sorted(steps) == list(range(first + 1, first + ended + 1))
    multiple = recipe.model.make_vocab_size_divisible_by or 128
    vocabulary = -(-VOCABULARY // multiple) * multiple
    for step, said in steps.items():
        assert abs(said["lm loss"] - math.log(vocabulary)) < 0.5  # as of a model that has hardly begun
        assert ("mtp_1 loss" in said) == bool(recipe.model.mtp_num_layers)
        assert ("z_loss" in said) == bool(recipe.moe.num_experts and recipe.router.z_loss_coeff)
        for kind in (recipe.balance.type or ()) if recipe.moe.num_experts and recipe.balance.aux_loss_coeff else ():
            assert kind not in BALANCE or said[BALANCE[kind]] > 0
        if recipe.schedule.lr and (recipe.schedule.warmup_iters or 0) > ended and not recipe.checkpoint.from_run:
            assert said["learning-rate"] == pytest.approx(recipe.schedule.lr * step / recipe.schedule.warmup_iters)


BALANCE = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""What Megatron calls each balance's loss."""
