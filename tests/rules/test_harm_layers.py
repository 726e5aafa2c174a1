"""Layers, positions and stages that Megatron takes without a word, and what it trains."""

from pathlib import Path

import pytest
from harm import few_steps

pytestmark = pytest.mark.megatron


def test_weights_of_zero_stay(here: Path) -> None:
    [learns, stays] = few_steps(here, ["", "model: {init_method_std: 0}"])
    assert all(norm > 0 for norm in learns.grad_norms or ())
    assert stays.grad_norms == (0.0, 0.0, 0.0)


def test_nothing_is_learnt_from_dropped_activations(here: Path) -> None:
    [stays] = few_steps(here, ["model: {hidden_dropout: 1}"])
    assert stays.grad_norms == (0.0, 0.0, 0.0)


def test_relative_positions_are_none(here: Path) -> None:
    changes = [f"model: {{position_embedding_type: {kind}}}" for kind in ("rope", "none", "relative")]
    [rope, none, relative] = few_steps(here, changes)
    assert relative.grad_norms == none.grad_norms
    assert relative.grad_norms != rope.grad_norms


def test_ends_of_one_stage_leave_layers_out(here: Path) -> None:
    ends = "parallel: {decoder_first_pipeline_num_layers: 3, decoder_last_pipeline_num_layers: 3}"
    [eight, three, ended] = few_steps(
        here, ["model: {num_layers: 8}", "model: {num_layers: 3}", f"model: {{num_layers: 8}}\n{ends}"]
    )
    assert ended.losses != eight.losses
    first, of_three = (ended.losses or ())[0], (three.losses or ())[0]
    assert abs(first - of_three) < 0.01  # not the same: initial weights follow the 8 that are said
