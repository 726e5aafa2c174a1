"""Runs that come back, on a real Slurm: by themselves, by hand, or not at all; and what is said of them."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from test_runs import Moekit, jobs_of, make_profile, moekit, run_of, state_of, until  # noqa: F401  # a fixture among them

pytestmark = pytest.mark.slurm

TRAINER = """#!/bin/bash
# In the place of Python: what an attempt does, its run's name says.
folder=attempts/$MOEKIT_ATTEMPT
mkdir -p "$folder/exit"
end() { for ((r = 0; r < 8; r++)); do
    echo "{\\"code\\": $1, \\"reason\\": \\"$2\\", \\"time\\": 1.0}" >"$folder/exit/rank$r.json"; done; exit "$1"; }
save() { mkdir -p checkpoints; cp -r ../../complete "checkpoints/$(printf iter_%07d "$1")"
    echo "$1" >checkpoints/latest_checkpointed_iteration.txt; }
reach() { echo "{\\"step\\": $1, \\"time\\": 1.0, \\"metrics\\": {}}" >"$folder/metrics.jsonl"; }
case $(basename "$PWD"):$MOEKIT_ATTEMPT in
    returns:1) save 10; reach 12; end 1 "RuntimeError: once" ;;
    returns:*) until [[ -e go ]]; do sleep 0.1; done; save 4768; reach 4768; end 0 ;;
    repeats:4) save 20; reach 20; end 0 ;;
    repeats:*) [[ $MOEKIT_ATTEMPT != 1 ]] || save 10; reach 12; end 1 "ValueError: always" ;;
    suspect:1) save 10; reach 12
        echo "Rank 0, node any, device 0, iteration #12: First rerun: unexpected result is reproducible"
        end 16 "SystemExit: 16" ;;
    saves*) reach 5; trap 'save 50; reach 50; end 0' TERM; touch ready; while sleep 0.1; do :; done ;;
    waits*) reach 5; touch ready; sleep 600 ;;
    *) reach 1; end 1 "RuntimeError: no" ;;
esac
"""
RECIPE = """base: first_moe
checkpoint: {save: true, save_interval: 100}
resilience: {exit_signal_handler: true, requeue: REQUEUE}
"""


@pytest.fixture
def profile(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = make_profile(slurm, "requeue", TRAINER)
    monkeypatch.setenv("MOEKIT_PROFILE", str(path))
    return path


def launch(moekit: Moekit, folder: Path, name: str, requeue: bool = True) -> int:  # noqa: F811
    """Launch a run; its job."""
    (folder / f"{name}.yaml").write_text(RECIPE.replace("REQUEUE", str(requeue).lower()))
    return int(json.loads(moekit("launch", f"{name}.yaml", "--json").stdout)["jobs"][0])


def wait_for(path: Path, timeout_s: float = 60) -> None:
    """A requeued job waits 6 s for its credentials' end; one that is told to start before that fails."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.1)


def why(moekit: Moekit, name: str) -> dict[str, Any]:  # noqa: F811
    said: dict[str, Any] = json.loads(moekit("why", name, "--json").stdout)
    return said


def test_a_job_comes_back_by_itself(slurm: Cluster, moekit: Moekit, tmp_path: Path) -> None:  # noqa: F811
    job = launch(moekit, tmp_path, "returns")
    until(slurm, "returns", "pending")
    while "attempt 1" not in (shown := moekit("status", "returns").stdout):
        assert shown.startswith("returns: pending"), shown
    assert re.match(r"returns: pending again, after attempt 1, expected to start .* \(BeginTime\)", shown), shown
    waiting = moekit("why", "returns").stdout
    assert re.search(rf"^1 .* 0-12 +{job} +n1 +rank 0: RuntimeError: once +job {job} waits$", waiting, re.MULTILINE)
    assert "decision    attempt 1 ended at step 12: rank 0: RuntimeError: once; goes on from step 10" in waiting
    wait_for(run_of(slurm, "returns").attempt(2).path / "decision.json")
    said = why(moekit, "returns")
    assert [(one["running"], one["from_step"], one["job"]) for one in said["attempts"]] == [
        (False, 0, str(job)),
        (True, 10, str(job)),
    ]
    assert (said["state"], said["decision"], said["next"]) == ("running", None, "moekit logs -f returns")
    assert said["attempts"][0]["then"] == "attempt 2 goes on from step 10"
    (run_of(slurm, "returns").path / "go").touch()
    assert slurm.wait(job) == "COMPLETED"
    said = why(moekit, "returns")
    assert (said["state"], said["next"], said["attempts"][-1]["kind"]) == ("finished", None, "ended")
    assert jobs_of(slurm, "returns") == [str(job)]


def test_what_comes_again_stops_until_a_person_says_so(slurm: Cluster, moekit: Moekit, tmp_path: Path) -> None:  # noqa: F811
    job = launch(moekit, tmp_path, "repeats")
    for attempt in (2, 3):
        wait_for(run_of(slurm, "repeats").attempt(attempt).path / "decision.json")
    assert slurm.wait(job) == "FAILED"
    sentence = "attempt 3 ended at step 12: rank 0: ValueError: always; 3 attempts in a row ended so, at the same step"
    assert f"  cause       {sentence}\n" in moekit("status", "repeats").stdout
    said = why(moekit, "repeats")
    assert (said["decision"]["action"], said["decision"]["sentence"]) == ("stop", sentence)
    assert said["next"] == "moekit resume repeats --anyway, once the cause is gone"
    refused = moekit("resume", "repeats", code=1).stderr
    assert f"run `repeats` does not go on: {sentence}" in refused
    assert "`moekit resume repeats --anyway` goes on from step 10 all the same" in refused
    assert "does not go on" in moekit("resume", "repeats", "--anew", code=1).stderr
    assert jobs_of(slurm, "repeats") == [str(job)]
    assert len(json.loads(moekit("resume", "repeats", "--anyway", "--json").stdout)["jobs"]) == 1
    assert (run_of(slurm, "repeats").attempt(3).path / "forgiven").exists()
    wait_for(run_of(slurm, "repeats").attempt(4).path / "decision.json")
    assert why(moekit, "repeats")["attempts"][2]["then"] == "attempt 4 goes on from step 10, by hand in spite of it"
    moekit("cancel", "repeats", code=None)


def test_a_suspicious_node_is_left_by_hand_too(slurm: Cluster, moekit: Moekit, tmp_path: Path) -> None:  # noqa: F811
    job = launch(moekit, tmp_path, "suspect", requeue=False)
    slurm.wait(job)
    (node,) = why(moekit, "suspect")["exclude"]
    assert f"  excluded    {node}\n" in moekit("status", "suspect").stdout
    shown = moekit("resume", "suspect").stdout
    assert f"  excluded    {node}\n" in shown
    again = int(jobs_of(slurm, "suspect")[-1])
    assert slurm.job(again)["ExcNodeList"] == node
    slurm.wait(again)
    attempts = why(moekit, "suspect")["attempts"]
    assert attempts[0]["then"] == f"attempt 2 goes on from step 10, without {node}"
    assert node not in attempts[1]["nodes"]


def test_what_was_told_to_save_and_end_does_not_come_back(slurm: Cluster, moekit: Moekit, tmp_path: Path) -> None:  # noqa: F811
    job = launch(moekit, tmp_path, "saves_and_ends")
    wait_for(run_of(slurm, "saves_and_ends").path / "ready")
    assert "told to save and end" in moekit("cancel", "saves_and_ends", "--save").stdout
    assert slurm.wait(job) == "COMPLETED"
    assert (run_of(slurm, "saves_and_ends").attempt(1).path / "cancelled").exists()
    said = why(moekit, "saves_and_ends")
    assert (said["state"], said["checkpoint"], said["decision"]["action"]) == ("completed", 50, "resume")
    assert said["next"] == "moekit resume saves_and_ends"


def test_a_job_that_waits_to_come_back_is_cancelled(slurm: Cluster, moekit: Moekit, tmp_path: Path) -> None:  # noqa: F811
    job = launch(moekit, tmp_path, "no_more")
    wait_for(run_of(slurm, "no_more").attempt(1).path / "end.json")
    slurm.wait(job, "PENDING")
    assert f"job {job} cancelled, and there is no checkpoint" in moekit("cancel", "no_more").stdout
    assert slurm.wait(job) == "CANCELLED"
    (attempt,) = why(moekit, "no_more")["attempts"]
    assert attempt["cause"] == "rank 0: RuntimeError: no"  # and not that its job was cancelled later
    assert "moekit resume no_more --anew" in moekit("why", "no_more").stdout


def test_slurms_word_is_the_cause_where_it_ended_the_job(slurm: Cluster, moekit: Moekit, tmp_path: Path) -> None:  # noqa: F811
    job = launch(moekit, tmp_path, "waits_on_a_node", requeue=False)
    wait_for(run_of(slurm, "waits_on_a_node").path / "ready")
    (attempt,) = why(moekit, "waits_on_a_node")["attempts"]
    assert attempt["running"]
    (node,) = attempt["nodes"]
    slurm.kill(node)
    assert slurm.wait(job) == "NODE_FAIL"
    slurm.start(node)
    slurm.ready()
    assert "  cause       NODE_FAIL: a node failed\n" in moekit("status", "waits_on_a_node").stdout
    launch(moekit, tmp_path, "waits_for_a_person")
    wait_for(run_of(slurm, "waits_for_a_person").path / "ready")
    assert "cancelled" in moekit("cancel", "waits_for_a_person").stdout
    until(slurm, "waits_for_a_person", "cancelled")
    (attempt,) = why(moekit, "waits_for_a_person")["attempts"]
    assert attempt["cause"].startswith("CANCELLED: somebody ended its job"), attempt
    moekit("resume", "waits_for_a_person", "--anew")
    wait_for(run_of(slurm, "waits_for_a_person").attempt(2).path / "decision.json")
    first, _ = why(moekit, "waits_for_a_person")["attempts"]
    assert first["cause"].startswith("CANCELLED: somebody ended its job"), first
    moekit("cancel", "waits_for_a_person")


def test_a_job_that_comes_back_once_its_end_was_put_down(slurm: Cluster, moekit: Moekit, tmp_path: Path) -> None:  # noqa: F811
    """As an administrator may do it."""
    job = launch(moekit, tmp_path, "waits_again")
    wait_for(run_of(slurm, "waits_again").path / "ready")
    moekit("cancel", "waits_again")
    until(slurm, "waits_again", "cancelled")
    assert json.loads((run_of(slurm, "waits_again").submissions / "1.json").read_text())["phase"] == "ended"
    slurm.call("scontrol", "requeue", str(job))
    assert state_of(slurm, "waits_again") == "pending"
    assert f"has a job already: {job} is pending" in moekit("resume", "waits_again", code=1).stderr
    moekit("cancel", "waits_again")
    until(slurm, "waits_again", "cancelled")
