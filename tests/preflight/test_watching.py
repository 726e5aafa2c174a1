"""The network of a launch, followed in its log while it is written."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_double import nccl_text

import moekit.job
from moekit.job.endings import ending

JOB = Path(moekit.job.__file__).parent


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    (tmp_path / "preflight.json").write_text('{"fabric": "efa"}')
    folder = tmp_path / "attempts" / "1"
    folder.mkdir(parents=True)
    return folder


def watch(attempt: Path, *nodes: str) -> tuple[subprocess.Popen[bytes], subprocess.Popen[str]]:
    """Something that stands in for srun, and its watcher."""
    step = subprocess.Popen(["sleep", "60"])
    command = [sys.executable, "-m", "preflight.watching", str(step.pid), "attempts/1", *nodes]
    env = {"PYTHONPATH": str(JOB)}
    return step, subprocess.Popen(command, cwd=attempt.parents[1], env=env, stderr=subprocess.PIPE, text=True)


def ends(step: subprocess.Popen[bytes], watcher: subprocess.Popen[str]) -> tuple[int | None, str]:
    """What became of the step once the watcher has ended, and what it said."""
    try:
        _, said = watcher.communicate(timeout=30)
        time.sleep(0.1)
        return step.poll(), said
    finally:
        watcher.kill()
        step.kill()
        step.wait()


def test_a_fabric_that_is_taken_lets_the_training_be(attempt: Path) -> None:
    (attempt / "train.log").write_text(nccl_text("n1", "Libfabric") + nccl_text("n2", "AWS Libfabric"))
    assert ends(*watch(attempt, "n1", "n2")) == (None, "")
    assert not (attempt / "refused.json").exists()


def test_sockets_stop_it_and_the_missing_version_is_named(attempt: Path) -> None:
    """The log grows while it is read, and a line comes in two pieces."""
    step, watcher = watch(attempt, "n1", "n2")
    text = nccl_text("n1", "Socket") + nccl_text("n2", "Libfabric")
    with (attempt / "train.log").open("w") as log:
        for at in (0, 40, len(text) // 2):
            log.write(text[at : {0: 40, 40: len(text) // 2}.get(at)])
            log.flush()
            time.sleep(0.4)
        code, said = ends(step, watcher)
    assert code == -15
    assert said.startswith(
        "the launch is stopped: n1: NCCL uses TCP sockets where the fabric is efa: version EFA_1.4 is"
    )
    refused = json.loads((attempt / "refused.json").read_text())
    assert (refused["by"], list(refused["bad"])) == ("network", ["n1"])
    how = ending(attempt, 16, srun_code=143)
    assert (how.kind, "EFA_1.4" in how.sentence) == ("refused", True)


def test_a_step_that_is_logged_ends_the_waiting(attempt: Path) -> None:
    (attempt / "metrics.jsonl").write_text('{"step": 1}\n')
    assert ends(*watch(attempt, "n1", "n2")) == (None, "")


def test_one_node_is_not_watched(attempt: Path) -> None:
    (attempt / "train.log").write_text(nccl_text("n1", "Socket"))
    assert ends(*watch(attempt, "n1")) == (None, "")
