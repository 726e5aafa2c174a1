"""The quickstart on nodes of a real Slurm: it trains, is told to save and end, and goes on."""

from __future__ import annotations

import json
import time

import pytest
from cluster import Cluster

from moekit.data.quickstart import prepare_python_docs, prepare_tokenizer
from moekit.launch.cluster import find_cluster
from moekit.launch.failure import exit_records
from moekit.launch.folders import claim, write
from moekit.launch.rundir import RunDir
from moekit.launch.script import slurm_files
from moekit.recipe.load import load
from moekit.watch.metrics import MetricsReader

pytestmark = [pytest.mark.slurm, pytest.mark.train]

TINY = """
base: quickstart
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 2, num_query_groups: 1,
        seq_length: 64, max_position_embeddings: 64}
moe: {ffn_hidden_size: 64}
train: {micro_batch_size: 2, global_batch_size: 4, iters: %d, eval_iters: 1}
schedule: {decay_iters: %d, warmup_iters: 1}
checkpoint: {save_interval: 100000}
log: {interval: 1}
"""
PATIENCE_S = 600.0
"""A shared machine may take ten times as long as an idle one."""


@pytest.fixture(scope="session")
def data(cluster: Cluster) -> None:
    prepare_python_docs(cluster.shared_root, print)
    prepare_tokenizer(cluster.shared_root, print)


def write_run(slurm: Cluster, name: str, recipe: str, **profile: object) -> RunDir:
    """A run's directory: two processes, each on a node of its own."""
    source = slurm.folder / f"{name}.recipe.yaml"
    source.write_text(recipe)
    path = slurm.profile(name, gpus_per_node=1, cpus_per_task=2, environment={"OMP_NUM_THREADS": "1"}, **profile)
    run = RunDir(slurm.shared_root / "runs" / name)
    claim(run.path)
    write(run.path, slurm_files(load(str(source)), name, find_cluster(str(path))))
    return run


def wait_for_step(slurm: Cluster, run: RunDir, job: int, attempt: int, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(seen.attempt == attempt and seen.step >= step for seen in MetricsReader(run.path).poll()):
        assert time.monotonic() < deadline
        assert slurm.job(job)["JobState"] in ("PENDING", "RUNNING"), run.attempt(attempt).train_log.read_text()
        time.sleep(0.5)


def exit_codes(run: RunDir, attempt: int) -> dict[int, int]:
    return {rank: record["code"] for rank, record in exit_records(run.attempt(attempt).path).items()}


@pytest.mark.usefixtures("data")
def test_the_quickstart_on_two_nodes_in_a_container(slurm: Cluster) -> None:
    run = write_run(slurm, "in_a_container", TINY % (4, 4), container="pyxis")
    job = slurm.submit(run.path)
    state = slurm.wait(job, timeout_s=PATIENCE_S)
    log = run.attempt(1).train_log.read_text()
    assert state == "COMPLETED", log
    assert exit_codes(run, 1) == {0: 0, 1: 0}
    assert run.latest_checkpoint.read_text() == "4"
    assert max(seen.step for seen in MetricsReader(run.path).poll()) == 4
    assert [path.name for path in (run.path / "jobs").iterdir()] == [str(job)]
    said = [json.loads(line) for line in slurm.record.read_text().splitlines()]
    assert {line["host"] for line in said if line.get("job") == job} == (
        {"n1", "n2"} if not slurm.lacks else set(slurm.nodes)
    )


@pytest.mark.usefixtures("data")
def test_a_signal_and_the_time_limit_save_and_end_and_the_next_job_goes_on(slurm: Cluster) -> None:
    run = write_run(slurm, "told", TINY % (9999, 9999) + "resilience: {exit_signal_handler: true}\n")

    job = slurm.submit(run.path)
    wait_for_step(slurm, run, job, attempt=1, step=2)
    slurm.call("scancel", "--batch", "--signal=TERM", str(job))
    assert slurm.wait(job, timeout_s=PATIENCE_S) == "COMPLETED", run.attempt(1).train_log.read_text()
    assert "SIGTERM is handed on to all nodes" in (run.path / f"slurm-{job}.log").read_text()
    first = int(run.latest_checkpoint.read_text())
    assert exit_codes(run, 1) == {0: 0, 1: 0}

    job = slurm.submit(run.path)
    wait_for_step(slurm, run, job, attempt=2, step=first + 2)
    # the limit's signal comes 5 minutes ahead of it: at once, where no more than those are left
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=6")
    assert slurm.wait(job, timeout_s=PATIENCE_S) == "COMPLETED", run.attempt(2).train_log.read_text()
    assert exit_codes(run, 2) == {0: 0, 1: 0}
    assert int(run.latest_checkpoint.read_text()) > first
