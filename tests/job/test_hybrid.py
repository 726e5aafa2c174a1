"""A hybrid stack trains on the wheel, which a CPU sees with local layers in it (`moekit/megatron/local_hybrid.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from job_runs import EXPERT_PARALLEL, TINY_MOE, read_metrics

HYBRID = ["--num-layers", "4", "--hybrid-layer-pattern", "*E*E", "--spec", "local_hybrid_stack", "stack"]


@pytest.mark.megatron
@pytest.mark.train
def test_a_hybrid_stack_trains(tmp_path: Path, launch: Callable[..., None]) -> None:
    argv = [*TINY_MOE, *EXPERT_PARALLEL, *HYBRID, "--train-iters", "6", "--eval-interval", "100", "--log-interval", "1"]
    launch(tmp_path, argv, env={"PYTHONPATH": str(Path(__file__).parent / "data")})
    losses = [values["lm loss"] for values in read_metrics(tmp_path / "attempts/1/metrics.jsonl").values()]
    assert losses[-1] < losses[0]
