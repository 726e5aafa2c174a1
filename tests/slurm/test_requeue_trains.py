"""A run that begins from another, and puts itself back into the queue: what is of its first start happens once."""

from __future__ import annotations

import os
import signal

import pytest
from cluster import Cluster
from test_job_trains import Run, data, process_of_rank, wait_for_step

from moekit.watch.metrics import MetricsReader

pytestmark = [pytest.mark.slurm, pytest.mark.train]

__all__ = ["data"]

SMALL = """
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 2, num_query_groups: 1,
        seq_length: 64, max_position_embeddings: 64}
schedule: {decay_iters: 100, warmup_iters: 1}
log: {interval: 1}
"""
DENSE = f"""
base: settings/quickstart_dense_save
{SMALL}
train: {{micro_batch_size: 2, global_batch_size: 4, iters: 2, exit_interval: null, eval_iters: 0}}
checkpoint: {{save_interval: 2}}
"""
UPCYCLED = f"""
base: settings/quickstart_one_expert
{SMALL}
moe: {{ffn_hidden_size: 128}}
train: {{micro_batch_size: 2, global_batch_size: 4, iters: 14, exit_interval: null, eval_iters: 0}}
checkpoint: {{from_run: dense_parent, save_interval: 4}}
resilience: {{requeue: true}}
"""


@pytest.mark.usefixtures("data")
def test_an_upcycled_run_is_converted_once(slurm: Cluster) -> None:
    parent = Run(slurm, "dense_parent", DENSE)
    assert parent.ends(parent.launch(), 1) == "COMPLETED"

    run = Run(slurm, "upcycled", UPCYCLED)
    job = run.launch()
    wait_for_step(slurm, run.files, job, attempt=1, step=5)
    os.kill(process_of_rank(0, run.files), signal.SIGKILL)
    assert run.ends(job, 2) == "COMPLETED"

    assert run.files.numbers() == [1, 2]
    assert slurm.job(job)["Restarts"] == "1"
    first, second = run.log(1), run.log(2)
    assert "moe_use_upcycling ............................... True" in first
    assert "moe_use_upcycling ............................... False" in second
    steps = [(seen.attempt, seen.step) for seen in MetricsReader(run.files.path).poll()]
    again = [step for attempt, step in steps if attempt == 2]
    assert again[0] in (5, 9)  # by how long the machine takes to kill it, it saves once or twice
    assert again == list(range(again[0], 15))
    assert {step for _, step in steps} == set(range(1, 15))
    for attempt in (1, 2):
        assert (run.files.attempt(attempt).tensorboard).is_dir()
