"""A chain of three jobs trains the real Megatron to its end, on an index that a job on CPUs built before."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster
from tiny import tiny

from moekit.launch.rundir import RunDir
from moekit.watch.metrics import MetricsReader

pytestmark = [pytest.mark.slurm, pytest.mark.train]

RECIPE = tiny(400, "resilience: {exit_signal_handler: true}\n")
PATIENCE_S = 600.0


def test_a_chain_of_three_finishes_a_training(slurm: Cluster, tmp_path: Path) -> None:
    recipe = tmp_path / "chained.yaml"
    recipe.write_text(RECIPE)
    profile = slurm.profile("chained", gpus_per_node=2, cpus_per_task=2, cpu_partition="cpu", fabric="none")
    command = [sys.executable, "-m", "moekit", "launch", str(recipe), "--on", "slurm", "--profile", str(profile)]
    options = ["--chain", "3", "--index-first", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, env=slurm.env())
    assert done.returncode == 0, done.stderr
    jobs = [int(job) for job in json.loads(done.stdout)["jobs"]]
    run = RunDir(slurm.shared_root / "runs/chained")

    # the first job is ended before its time, as by a time limit: it saves, and the second goes on
    _wait_for_step(slurm, run, jobs[0], 2)
    (log,) = (run.path / "index").glob("slurm-*.log")
    assert "8 files built" in log.read_text()
    slurm.call("scancel", "--batch", "--signal=TERM", str(jobs[0]))
    assert slurm.wait(jobs[0], timeout_s=PATIENCE_S) == "COMPLETED", run.attempt(1).train_log.read_text()
    first = int(run.latest_checkpoint.read_text())
    assert 2 <= first < 400
    assert slurm.wait(jobs[1], timeout_s=PATIENCE_S) == "COMPLETED", run.attempt(2).train_log.read_text()
    assert slurm.wait(jobs[2], timeout_s=PATIENCE_S) == "COMPLETED"

    assert run.latest_checkpoint.read_text() == "400"
    assert run.numbers() == [1, 2]
    steps = {(seen.attempt, seen.step) for seen in MetricsReader(run.path).poll()}
    assert {step for _, step in steps} == set(range(1, 401))
    assert min(step for attempt, step in steps if attempt == 2) == first + 1
    assert (run.path / f"slurm-{jobs[2]}.log").read_text() == "moekit: training is finished, at step 400\n"
    for attempt in (1, 2):  # Megatron found the index, and built nothing
        text = run.attempt(attempt).train_log.read_text()
        assert "Load the GPTDataset train indices" in text
        assert "Build and save the GPTDataset" not in text
    assert not slurm.call("squeue", "-h", "-t", "PENDING,RUNNING", "-j", ",".join(map(str, jobs))).stdout.strip()


def test_an_index_is_built_in_the_container(slurm: Cluster, tmp_path: Path) -> None:
    recipe = tmp_path / "contained.yaml"
    recipe.write_text(RECIPE.replace("seq_length: 64", "seq_length: 32"))
    fields = {"gpus_per_node": 2, "cpus_per_task": 2, "cpu_partition": "cpu", "container": "pyxis"}
    profile = slurm.profile("contained", **fields)
    command = [sys.executable, "-m", "moekit", "launch", str(recipe), "--on", "slurm", "--profile", str(profile)]
    done = subprocess.run(
        [*command, "--index-first", "--json"], capture_output=True, text=True, timeout=300, env=slurm.env()
    )
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    found = slurm.call("squeue", "-h", "-t", "all", "-n", "contained-index", "-o", "%A").stdout
    state = slurm.wait(int(found), timeout_s=PATIENCE_S)
    slurm.call("scancel", job)
    log = (slurm.shared_root / f"runs/contained/index/slurm-{int(found)}.log").read_text()
    assert state == "COMPLETED", log
    assert "8 files built" in log
    asked = [json.loads(line) for line in slurm.record.read_text().splitlines()]
    assert [line["options"]["container-workdir"] for line in asked if line.get("job") == int(found)] == [
        str(slurm.shared_root / "runs/contained/index")
    ]


def _wait_for_step(slurm: Cluster, run: RunDir, job: int, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(seen.step >= step for seen in MetricsReader(run.path).poll()):
        assert time.monotonic() < deadline
        state = slurm.job(job)["JobState"]
        assert state in ("PENDING", "RUNNING"), f"{state}: {run.attempt(1).train_log.read_text()}"
        time.sleep(0.2)
