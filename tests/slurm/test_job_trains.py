"""The quickstart on nodes of a real Slurm: it trains, is told to save and end, and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from tiny import tiny

from moekit.data.quickstart import prepare_python_docs, prepare_tokenizer
from moekit.job.endings import exit_records, first_cause
from moekit.launch.rundir import RunDir
from moekit.watch.metrics import MetricsReader

pytestmark = [pytest.mark.slurm, pytest.mark.train]

PATIENCE_S = 600.0
"""A shared machine may take ten times as long as an idle one."""


@pytest.fixture(scope="session")
def data(cluster: Cluster) -> None:
    prepare_python_docs(cluster.shared_root, print)
    prepare_tokenizer(cluster.shared_root, print)


class Run:
    """A run launched by the real command: two processes, each on a node of its own."""

    def __init__(self, slurm: Cluster, name: str, recipe: str, **profile: object) -> None:
        self.slurm, self.name = slurm, name
        self.recipe = slurm.folder / f"{name}.recipe.yaml"
        self.recipe.write_text(recipe)
        environment = {"OMP_NUM_THREADS": "1"}
        self.profile = slurm.profile(name, gpus_per_node=1, cpus_per_task=2, environment=environment, **profile)
        self.files = RunDir(slurm.shared_root / "runs" / name)

    def moekit(self, *words: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "moekit", *words, "--profile", str(self.profile), "--json"]
        done = subprocess.run(command, env=self.slurm.env(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def launch(self) -> int:
        return int(self.moekit("launch", str(self.recipe), "--on", "slurm", "--name", self.name)["jobs"][0])

    def log(self, attempt: int) -> str:
        return self.files.attempt(attempt).train_log.read_text()

    def ends(self, job: int, attempt: int) -> str:
        state = self.slurm.wait(job, timeout_s=PATIENCE_S)
        assert exit_codes(self.files, attempt) == {0: 0, 1: 0}, self.log(attempt)
        return state


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
    run = Run(slurm, "in_a_container", tiny(4), container="pyxis")
    job = run.launch()
    assert run.ends(job, 1) == "COMPLETED"
    assert run.moekit("status", run.name)["state"] == "finished"
    assert run.files.latest_checkpoint.read_text() == "4"
    assert max(seen.step for seen in MetricsReader(run.files.path).poll()) == 4
    said = [json.loads(line) for line in slurm.record.read_text().splitlines()]
    assert len([line for line in said if line.get("job") == job]) == 2
    if not slurm.lacks:
        assert {line["host"] for line in said if line.get("job") == job} == {"n1", "n2"}


@pytest.mark.usefixtures("data")
def test_a_signal_and_the_time_limit_save_and_end_and_the_next_job_goes_on(slurm: Cluster) -> None:
    run = Run(slurm, "told", tiny(9999, "resilience: {exit_signal_handler: true, exit_signal: SIGUSR1}\n"))

    job = run.launch()
    wait_for_step(slurm, run.files, job, attempt=1, step=2)
    slurm.call("scancel", "--batch", "--signal=USR1", str(job))
    assert run.ends(job, 1) == "COMPLETED"
    assert "SIGUSR1 is handed on to all nodes" in (run.files.path / f"slurm-{job}.log").read_text()
    first = int(run.files.latest_checkpoint.read_text())

    job = int(run.moekit("resume", run.name)["jobs"][0])
    wait_for_step(slurm, run.files, job, attempt=2, step=first + 2)
    # the limit's signal comes 5 minutes ahead of it: at once, where no more than those are left
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=6")
    assert run.ends(job, 2) == "COMPLETED"
    assert int(run.files.latest_checkpoint.read_text()) > first


@pytest.mark.usefixtures("data")
def test_a_killed_rank_ends_the_job_on_all_nodes(slurm: Cluster) -> None:
    run = Run(slurm, "killed", tiny(9999))
    job = run.launch()
    wait_for_step(slurm, run.files, job, attempt=1, step=1)
    os.kill(process_of_rank(1, run.files), signal.SIGKILL)
    assert slurm.wait(job, timeout_s=PATIENCE_S) == "FAILED"
    assert set(exit_codes(run.files, 1)) == {0}
    assert run.moekit("status", run.name)["state"] == "failed"
    assert first_cause(run.files.attempt(1).path, 2).startswith("rank 1 was killed (SIGKILL)")


def process_of_rank(rank: int, run: RunDir) -> int:
    """A node's processes are this machine's too, under other numbers."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            entries = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_rank = {f"RANK={rank}".encode(), f"PYTHONPATH={run.path}/job".encode()} <= set(entries)
            if is_rank and any(word.endswith(b"job/entry.py") for word in words):
                return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")
