"""The quickstart in two pipeline stages, with its profiler and its timers on: what `moekit profile` reads of it."""

from __future__ import annotations

import pytest
from launched import Launch

from moekit.profile import stages
from moekit.profile.traces import read

PROFILED = """
base: quickstart
train: {exit_interval: 6}
parallel: {pipeline_model: 2, expert_model: 1}
log: {interval: 1, timing_level: 2, timing_option: all}
profile: {enabled: true, use_pytorch_profiler: true, step_start: 3, step_end: 5, ranks: [0, 1]}
monitor: null
"""


@pytest.mark.megatron
@pytest.mark.train
def test_a_profiled_run(launch: Launch) -> None:
    launched = launch("profiled", PROFILED)
    assert launched.wait() == 0, launched.text
    profiled = read(str(launched.run.path), [], None)
    assert [(rank.name, rank.on_cpu, rank.steps) for rank in profiled.ranks] == [
        ("rank 0", True, 2),
        ("rank 1", True, 2),
    ]
    for rank in profiled.ranks:
        assert rank.skipped == 0
        assert sum(rank.share_ns.values()) == rank.whole_ns
        assert min(rank.share_ns.values()) >= 0
        assert all(rank.share_ns[family] for family in ("attention", "other GEMM", "permute and copy"))

    found = stages.read(launched.run)
    assert [(stage.number, stage.ranks) for stage in found.stages] == [(0, (0,)), (1, (1,))]
    assert found.steps == 4  # the first warms up, and Megatron's second report has both
    reports = list(stages.blocks(launched.run.attempt(1).train_log.open()))
    assert len(reports) == 6
    for stage in found.stages:
        assert stage.forward_ms > 0
        assert stage.backward_ms > 0
    last = found.stages[1]  # with the loss, in whose forward the head's matrix is the largest of the model
    assert last.both_ms < profiled.ranks[1].whole_ns / 1e6


@pytest.mark.megatron
@pytest.mark.train
def test_two_expert_parallel_ranks_send_tokens(launch: Launch) -> None:
    recipe = PROFILED.replace("{pipeline_model: 2, expert_model: 1}", "{pipeline_model: 1, expert_model: 2}")
    launched = launch("profiled_experts", recipe)
    assert launched.wait() == 0, launched.text
    for rank in read(str(launched.run.path), [], None).ranks:
        assert rank.share_ns["all-to-all"] > 0.005 * rank.whole_ns
