"""The settings that record a run, made small enough for a CPU and put together: each leaves its files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import Launch
from test_cluster_recipes import DATA, EXPERTS, SMALL_MODEL

from moekit import share
from moekit.watch.metrics import history

pytestmark = [pytest.mark.megatron, pytest.mark.train, pytest.mark.timeout(4000)]

RECORDING = ("monitor", "trace", "trace_logits", "trace_hidden", "timers", "check_spikes")
NOT_ON_A_CPU = {"log": {"max_attention_logit": None}}
SOONER: dict[str, Any] = {"checkpoint": {"save_interval": 3}, "monitor": {"tokens_per_expert_interval": 2}}


def together(*trees: dict[str, Any]) -> str:
    """One recipe over first_moe with the sections of all, the last wins."""
    whole: dict[str, Any] = {"base": "first_moe"}
    for tree in trees:
        for section, fields in tree.items():
            if isinstance(fields, dict):
                whole.setdefault(section, {}).update(fields)
    return yaml.safe_dump(whole)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_recorded_is_there(launch: Launch) -> None:
    settings = [yaml.safe_load((share.folder("recipes") / f"settings/{name}.yaml").read_text()) for name in RECORDING]
    small = [yaml.safe_load(text) for text in (SMALL_MODEL, EXPERTS, DATA)]
    launched = launch("recorded", together(*settings, *small, NOT_ON_A_CPU, SOONER))
    assert launched.wait() == 0, launched.text
    run = launched.run

    steps = history(run.path)
    assert sorted(steps) == [1, 2, 3]
    assert {"params-norm", "num-zeros"} <= steps[3].keys()
    timed = re.search(
        r"^  forward-backward:\n     rank  0: .+\n     rank  1: ", run.attempt(1).train_log.read_text(), re.M
    )
    assert timed  # each rank by itself

    counts = lines(run.tokens_per_expert / "rank0.jsonl")
    assert [(record["iter"], record["layer"]) for record in counts] == [(2, 0), (2, 1)]
    routing = run.attempt(1).routing
    trace = lines(routing / "router_trace_rank0.jsonl")
    calls = [(record["step"], record["layer"]) for record in trace]
    assert calls == [(step, layer) for step in (0, 1) for _ in range(2) for layer in (0, 1)]  # two micro batches, once
    assert all({"top_indices", "logit_offset", "hs_offset"} <= record.keys() for record in trace)
    for name in ("hidden_states_rank0.bin", "logits_rank0.bin"):
        assert (routing / name).stat().st_size > 0
    assert (routing / "router_state_rank0.pt").is_file()
