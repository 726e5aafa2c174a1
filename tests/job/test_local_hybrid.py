"""A hybrid stack of attention and experts in turn is the GPT of as many layers: the same bits, in local layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moekit.cluster.profile import find_cluster
from moekit.launch.judges import questions
from moekit.megatron.real import judge_all
from moekit.recipe.load import load

BASES = Path(__file__).parent.parent / "rules" / "bases"


@pytest.mark.megatron
def test_two_steps_and_all_parameters_are_those_of_the_gpt() -> None:
    asked = []
    for name in ("tiny_moe", "tiny_hybrid"):
        question = questions(load(str(BASES / f"{name}.yaml")), find_cluster())["first"]
        asked.append(replace(question, stages=(*question.stages, "step")))
    gpt, hybrid = ({verdict.stage: verdict for verdict in verdicts} for verdicts in judge_all(asked))
    assert gpt["build"].parameters == hybrid["build"].parameters is not None
    assert gpt["step"].losses
    assert (gpt["step"].losses, gpt["step"].grad_norms) == (hybrid["step"].losses, hybrid["step"].grad_norms)
