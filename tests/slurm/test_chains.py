"""Jobs that wait for others, on a real Slurm, with an interpreter that stands in for the trainer: which run when, and
that none is left in the queue."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import checkpoint_double
import pytest
from cluster import Cluster

pytestmark = pytest.mark.slurm

TRAINER = f"""#!{sys.executable}
import json, os, pathlib, sys
run = pathlib.Path.cwd()
if "job/index.py" in " ".join(sys.argv):  # the index job, in index/
    run.parent.joinpath("index.seen").write_text(" ".join(sys.argv[1:]))
    sys.exit("index" in run.parent.name and 3 or 0)
if "fails" in run.name:
    sys.exit(5)
latest = run / "checkpoints/latest_checkpointed_iteration.txt"
step = int(latest.read_text()) if latest.exists() else 0
(run / "order").open("a").write(f"{{os.environ['SLURM_JOB_ID']}} {{step}}\\n")
sys.path.insert(0, {str(Path(checkpoint_double.__file__).parent)!r})
import checkpoint_double
checkpoint_double.save(run / "checkpoints", step + 2)
exits = run / "attempts" / os.environ["MOEKIT_ATTEMPT"] / "exit"
exits.mkdir()
for rank in range(8):
    (exits / f"rank{{rank}}.json").write_text(json.dumps({{"code": 0, "reason": "ok", "time": 0}}) + "\\n")
"""
PARENT = """
base: first_moe_smoke
train: {iters: 4, exit_interval: null}
schedule: {decay_iters: 4, wsd_decay_iters: 1, warmup_iters: 1}
checkpoint: {save: true, save_interval: 2}
"""
CHILD = PARENT + "megatron: {extra: [--no-one-logger]}\n"


@pytest.fixture
def profile(slurm: Cluster) -> Path:
    trainer = slurm.shared_root / "trainer"
    trainer.write_text(TRAINER)
    trainer.chmod(0o755)
    return slurm.profile("chains", python=str(trainer), cpus_per_task=2, cpu_partition="cpu")


def recipe(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def launched(slurm: Cluster, profile: Path, *words: str | Path) -> dict[str, list[int]]:
    """The jobs of a launch, by run."""
    done = slurm.moekit("launch", *words, "--profile", profile, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    runs = said if isinstance(said, list) else [said]
    return {run["run"]: [int(job) for job in run["jobs"]] for run in runs}


def nothing_waits(slurm: Cluster, *jobs: int) -> bool:
    listed = ",".join(map(str, jobs))
    return not slurm.call("squeue", "-h", "-t", "PENDING,RUNNING", "-j", listed).stdout.strip()


def test_a_run_waits_for_the_one_it_begins_from(slurm: Cluster, profile: Path, tmp_path: Path) -> None:
    child = recipe(tmp_path, "child", PARENT.replace("save_interval: 2", "save_interval: 2, from_run: parent"))
    parent = recipe(tmp_path, "parent", PARENT)
    # the child is named first, and still comes second
    jobs = launched(slurm, profile, child, parent)
    assert list(jobs) == ["parent", "child"]
    (first,), (second,) = jobs["parent"], jobs["child"]
    assert slurm.wait(second) == "COMPLETED"
    ended, began = slurm.job(first)["EndTime"], slurm.job(second)["StartTime"]
    assert slurm.job(first)["JobState"] == "COMPLETED"
    assert ended <= began


def test_a_failed_first_job_leaves_nothing_pending(slurm: Cluster, profile: Path, tmp_path: Path) -> None:
    text = PARENT.replace("save_interval: 2", "save_interval: 2, from_run: it_fails")
    paths = [recipe(tmp_path, "it_fails", PARENT), recipe(tmp_path, "behind", text)]
    more = recipe(tmp_path, "further", text.replace("it_fails", "behind"))
    jobs = launched(slurm, profile, *paths, more, "--chain", "2")
    first, *rest = [job for several in jobs.values() for job in several]
    assert len(rest) == 5
    assert slurm.wait(first) == "FAILED"
    assert slurm.wait(jobs["it_fails"][1]) == "FAILED"  # the second link tries again
    for job in jobs["behind"] + jobs["further"]:
        assert slurm.wait(job, timeout_s=30) == "CANCELLED"
    assert nothing_waits(slurm, first, *rest)
    assert not (slurm.shared_root / "runs/behind/attempts").exists()


def test_a_run_waits_for_one_that_is_running_already(slurm: Cluster, profile: Path, tmp_path: Path) -> None:
    waits = slurm.shared_root / "waits"
    waits.write_text("#!/bin/bash\nexec sleep 600\n")
    waits.chmod(0o755)
    slow = slurm.profile("slow", python=str(waits), cpus_per_task=2)
    (first,) = launched(slurm, slow, recipe(tmp_path, "running", PARENT))["running"]
    slurm.wait(first, "RUNNING")
    child = recipe(tmp_path, "waiting", PARENT.replace("save_interval: 2", "save_interval: 2, from_run: running"))
    (second,) = launched(slurm, profile, child)["waiting"]
    assert slurm.job(second)["Dependency"].startswith(f"afterok:{first}")
    slurm.call("scancel", str(first))
    assert slurm.wait(second, timeout_s=60) == "CANCELLED"

    # once it has ended without a checkpoint, there is nothing to wait for
    done = slurm.moekit("launch", child, "--name", "too_late", "--profile", profile)
    assert done.returncode == 1
    assert "run `running` has no complete checkpoint" in done.stderr


def test_a_chain_ends_once_training_is_finished(slurm: Cluster, profile: Path, tmp_path: Path) -> None:
    jobs = launched(slurm, profile, recipe(tmp_path, "long", PARENT), "--chain", "3")["long"]
    assert len(jobs) == 3
    assert [slurm.wait(job) for job in jobs] == ["COMPLETED"] * 3
    run = slurm.shared_root / "runs/long"
    assert (run / "order").read_text().splitlines() == [f"{jobs[0]} 0", f"{jobs[1]} 2"]  # one after another
    assert (run / f"slurm-{jobs[2]}.log").read_text() == "moekit: training is finished, at step 4\n"
    assert nothing_waits(slurm, *jobs)
    listed = slurm.moekit("status", "long", "--profile", profile)
    assert listed.stdout.startswith("long: finished"), listed.stdout


def test_a_chain_must_be_able_to_go_on(slurm: Cluster, profile: Path, tmp_path: Path) -> None:
    path = recipe(tmp_path, "unsaved", "base: first_moe_smoke\n")
    done = slurm.moekit("launch", path, "--profile", profile, "--chain", "2")
    assert done.returncode == 1
    assert "`unsaved` saves no checkpoint, and each job of a chain goes on from the last one" in done.stderr
    assert not (slurm.shared_root / "runs/unsaved").exists()


def test_a_failed_index_job_leaves_nothing_pending(slurm: Cluster, profile: Path, tmp_path: Path) -> None:
    (slurm.shared_root / "data/some").mkdir(parents=True)
    (slurm.shared_root / "data/some/data-args.txt").write_text("x\n")
    text = PARENT + ("data: {name: some, mock_data: null, tokenizer_type: NullTokenizer, vocab_size: 128256}\n")
    names = [recipe(tmp_path, name, text) for name in ("index_a", "index_b")]
    jobs = launched(slurm, profile, *names)  # of the same data: so the index first, once for both
    for (job,) in jobs.values():
        assert slurm.wait(job, timeout_s=60) == "CANCELLED"
    seen = (slurm.shared_root / "runs/index_a/index.seen").read_text()
    assert seen.startswith("../job/index.py --num-layers") or "--num-layers" in seen
    assert not (slurm.shared_root / "runs/index_b/index").exists()
    index = slurm.call("squeue", "-h", "-t", "all", "-n", "index_a-index", "-o", "%T %P").stdout.split()
    assert index == ["FAILED", "cpu"]
