"""A hybrid stack trains on the wheel: the entry builds it of local layers, since a CPU has no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from job_runs import EXPERT_PARALLEL, TINY_MOE, read_metrics

HYBRID = ["--num-layers", "4", "--hybrid-layer-pattern", "*E*E"]


@pytest.mark.megatron
@pytest.mark.train
def test_a_hybrid_stack_trains(tmp_path: Path, launch: Callable[..., None]) -> None:
    argv = [*TINY_MOE, *EXPERT_PARALLEL, *HYBRID, "--train-iters", "6", "--eval-interval", "100", "--log-interval", "1"]
    launch(tmp_path, argv)
    losses = [values["lm loss"] for values in read_metrics(tmp_path / "attempts/1/metrics.jsonl").values()]
    assert losses[-1] < losses[0]
    assert "local_hybrid" in [part["name"] for part in json.loads((tmp_path / "attempts/1/installed.json").read_text())]
