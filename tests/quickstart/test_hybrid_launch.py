"""The quickstart as a hybrid stack of attention and experts in turn: launched on a CPU like any other recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import Launch

from moekit.cluster.profile import find_cluster
from moekit.recipe.check import problems_of
from moekit.recipe.load import load
from moekit.watch.metrics import history

HYBRID = """
base: quickstart
model: {stack: hybrid, num_layers: 4, hybrid_layer_pattern: "*E*E"}
train: {exit_interval: 3}
monitor: null
"""


@pytest.mark.megatron
@pytest.mark.train
def test_it_trains(launch: Launch) -> None:
    launched = launch("hybrid", HYBRID)
    assert launched.wait() == 0, launched.text
    losses = [metrics["lm loss"] for metrics in history(launched.run.path).values()]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    installed = json.loads(launched.run.attempt(1).installed.read_text())
    assert "local_hybrid" in [part["name"] for part in installed]


def test_nothing_is_wrong_with_it(tmp_path: Path) -> None:
    file = tmp_path / "hybrid.yaml"
    file.write_text(HYBRID)
    assert problems_of(load(str(file)), find_cluster()) == []
