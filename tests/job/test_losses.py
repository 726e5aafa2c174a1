"""`gpt.py` against the `pretrain_gpt.py` of a checkout: the same losses, to the last bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_runs import EXPERT_PARALLEL, PIPELINE_PARALLEL, TINY_MOE, read_metrics

GOLDEN = Path(__file__).parent / "data" / "losses.json"
RUNS = {"expert_parallel": EXPERT_PARALLEL, "pipeline_parallel": PIPELINE_PARALLEL}
LENGTH = ["--train-iters", "6", "--eval-interval", "3"]
# Arithmetic that every x86-64 processor does alike, whatever vector instructions it has beyond the first.
ANY_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}


@pytest.mark.megatron
@pytest.mark.train
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_the_checkout(tmp_path: Path, launch: Callable[..., None], name: str) -> None:
    """Recorded by this very test, with MOEKIT_RECORD_LOSSES=<folder of a checkout's scripts>: see the golden file."""
    scripts = os.environ.get("MOEKIT_RECORD_LOSSES")
    env = ANY_PROCESSOR | ({"MOEKIT_MEGATRON": scripts} if scripts else {})
    launch(tmp_path, [*TINY_MOE, *RUNS[name], *LENGTH], env=env)
    kept = ("lm loss", "lm loss validation", "grad-norm")
    metrics = read_metrics(tmp_path / "attempts/1/metrics.jsonl")
    losses: dict[str, Any] = {
        str(step): {key: value for key, value in values.items() if key in kept} for step, values in metrics.items()
    }
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if scripts:
        GOLDEN.write_text(json.dumps(golden | {name: losses}, indent=1) + "\n")
    else:
        assert losses == golden[name]
