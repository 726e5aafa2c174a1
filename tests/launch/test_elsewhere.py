"""Runs where there is no Slurm: the body, on several nodes and as a Job that keeps what it made in a bucket."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moekit.cluster.profile import Cluster, find_cluster
from moekit.job.checkpoints import missing
from moekit.launch import elsewhere, hf_jobs
from moekit.launch.folders import write
from moekit.recipe.load import Loaded, load

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "slurm"))
from tiny import tiny  # noqa: E402

AWS = find_cluster("aws-p5")

TRAINER = """#!/bin/bash
# in place of python: retry.py and agree.py run, torchrun's words are written down
if [[ $1 == *.py ]]; then exec @PYTHON@ "$@"; fi
printf '%s\\n' "$@" >"argv.$RANK_OF"
echo "rank $RANK_OF: attempt $MOEKIT_ATTEMPT, $A_NAME, $LD_LIBRARY_PATH, $PYTHONPATH"
mkdir -p attempts/$MOEKIT_ATTEMPT/exit
[[ -z $SLEEPS ]] || { trap 'echo told to end; exit 3' TERM; touch asleep; while :; do sleep 0.05; done; }
echo '{"code": 0, "reason": "", "time": 1}' >"attempts/$MOEKIT_ATTEMPT/exit/rank$RANK_OF.json"
exit "${CODE:-0}"
"""
HOSTILE = "it's\"$(touch${IFS}p)`p`;é"


@pytest.fixture
def two_nodes(tmp_path: Path, recipe_of: Callable[..., Loaded]) -> tuple[Path, dict[str, str]]:
    """The files of a run of two nodes, and an environment whose python only writes down what it was asked."""
    text = f"parallel: {{gpus: 2, expert_model: 2}}\nruntime: {{environment: {{A_NAME: {json.dumps(HOSTILE)}}}}}\n"
    cluster = Cluster(
        name="two",
        gpus_per_node=1,
        gpu="h100",
        fabric="efa",
        container="none",
        shared_root=str(tmp_path / "shared"),
        library_path=("/opt/a", "/opt/b"),
    )
    files = tmp_path / "files"
    for name, content in elsewhere.node_files(recipe_of(text), "mine", cluster).items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text(content)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(TRAINER.replace("@PYTHON@", sys.executable))
    python.chmod(0o755)
    return files, {"PATH": f"{python.parent}:{os.environ['PATH']}", "SLEEPS": "", "LD_LIBRARY_PATH": "/image"}


def start(files: Path, env: dict[str, str], node: int, nodes: int = 2, **more: str) -> subprocess.Popen[str]:
    run = files.parent / "shared" / "runs" / "mine"
    return subprocess.Popen(
        ["bash", str(files / "node.sh"), str(run), str(node), str(nodes), "127.0.0.1"],
        env={**env, "RANK_OF": str(node), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_two_nodes_begin_together_and_go_on(two_nodes: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    files, env = two_nodes
    run = tmp_path / "shared" / "runs" / "mine"
    for attempt in ("1", "2"):
        second = start(files, env, 1)
        time.sleep(0.3)
        first = start(files, env, 0)
        (one, _), (other, _) = first.communicate(timeout=60), second.communicate(timeout=60)
        assert (first.returncode, second.returncode) == (0, 0), one + other
        line = f"attempt {attempt}, {HOSTILE}, /opt/a:/opt/b:/image, {run}/job\n"
        assert f"rank 0: {line}" in one
        assert (run / "attempts" / attempt / "node1.log").read_text() == f"rank 1: {line}"
        assert f"rank 0: {line}" in (run / "attempts" / attempt / "train.log").read_text()
        assert json.loads((run / "attempts" / attempt / "end.json").read_text())["kind"] == "ended"
        for node in (0, 1):
            words = (run / f"argv.{node}").read_text().splitlines()
            assert words[:4] == ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            assert f"--node-rank={node}" in words
            assert "--rdzv-endpoint=127.0.0.1:29511" in words
            assert words[words.index("job/entry.py") + 1 :] == (run / "argv.first").read_text().splitlines()
    assert not (tmp_path / "p").exists()


def test_another_recipes_run_stays(two_nodes: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    files, env = two_nodes
    run = tmp_path / "shared" / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("summary: another\n")
    process = start(files, env, 0, nodes=1)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "is a run of another recipe: give this one another name with --name" in said
    assert sorted(path.name for path in run.iterdir()) == ["recipe.yaml"]


def test_a_signal_is_handed_on(two_nodes: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    files, env = two_nodes
    process = start(files, env, 0, nodes=1, SLEEPS="y")
    run = tmp_path / "shared" / "runs" / "mine"
    deadline = time.monotonic() + 30
    while not (run / "asleep").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert "told to end" in said
    assert process.returncode == 3
    assert (run / "attempts" / "1" / "end.json").is_file()


@pytest.mark.parametrize("trained", [True, False])
def test_a_job_keeps_what_it_made_in_the_bucket(
    two_nodes: tuple[Path, dict[str, str]], tmp_path: Path, trained: bool
) -> None:
    """`hf_job.sh`, with a folder in place of the mounted bucket."""
    files, env = two_nodes
    (files / "hf_job.sh").write_text((ROOT / "moekit" / "launch" / "hf_jobs_body.sh").read_text())
    (files / "megatron.list").write_text("")
    (files / "bring.list").write_text("data/da.ta\ntokenizers/t\n")
    bucket, root = tmp_path / "bucket", tmp_path / "disk"
    (bucket / "data" / "da.ta").mkdir(parents=True)
    (bucket / "tokenizers" / "t").mkdir(parents=True)
    (bucket / "data" / "da.ta" / "data-args.txt").write_text("0.5 /fsx/m/data/da.ta/a 0.5 /fsx/m/data/da.ta/b\n")
    (bucket / "data" / "da.ta" / "data-args.json").write_text('{"train": ["/fsx/m/data/da.ta/a"]}\n')
    if trained:  # by an earlier Job
        (bucket / "runs/mine/checkpoints/iter_0000020").mkdir(parents=True)
        (bucket / "runs/mine/attempts/1").mkdir(parents=True)
        (bucket / "runs/mine/checkpoints/iter_0000040").mkdir(parents=True)
        (bucket / "runs/mine/checkpoints/latest_checkpointed_iteration.txt").write_text("40")
        shutil.copy(files / "recipe.yaml", bucket / "runs/mine/recipe.yaml")
    checkpoint = root / "runs/mine/checkpoints"
    trainer = tmp_path / "bin" / "python"
    saves = [
        f"rm -rf {checkpoint}/iter_0000040; mkdir -p {checkpoint}/iter_0000060",
        f"echo w >{checkpoint}/iter_0000060/w",
        f"printf 60 >{checkpoint}/latest_checkpointed_iteration.txt",
    ]
    trainer.write_text(trainer.read_text().replace('exit "${CODE', "\n".join([*saves, 'exit "${CODE'])))
    words = ["bash", str(files / "hf_job.sh"), "mine", str(root), str(bucket)]
    done = subprocess.run(words, env={**env, "RANK_OF": "0"}, capture_output=True, text=True, timeout=60)
    kept = bucket / "runs" / "mine"
    attempts = ["1", "2"] if trained else ["1"]
    assert sorted(path.name for path in (kept / "attempts").iterdir()) == attempts, done.stderr + done.stdout
    assert (root / "data/da.ta/data-args.txt").read_text() == f"0.5 {root}/data/da.ta/a 0.5 {root}/data/da.ta/b\n"
    assert json.loads((root / "data/da.ta/data-args.json").read_text()) == {"train": [f"{root}/data/da.ta/a"]}
    if trained:
        assert "bringing the checkpoint of step 40" in done.stderr
    assert "rank 0: attempt" in (kept / "attempts" / attempts[-1] / "train.log").read_text()
    assert (kept / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "60"
    # what the run prunes is pruned there; what was there before stays
    old = ["iter_0000020"] if trained else []
    assert sorted(path.name for path in (kept / "checkpoints").glob("iter_*")) == [*old, "iter_0000060"]
    assert (kept / "checkpoints/iter_0000060/w").read_text() == "w\n"
    assert (kept / "recipe.yaml").read_text() == (files / "recipe.yaml").read_text()


def test_a_bucket_that_lacks_something(two_nodes: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    files, env = two_nodes
    (files / "hf_job.sh").write_text((ROOT / "moekit" / "launch" / "hf_jobs_body.sh").read_text())
    (files / "megatron.list").write_text("")
    (files / "bring.list").write_text("data/gone\n")
    words = ["bash", str(files / "hf_job.sh"), "mine", str(tmp_path / "disk"), str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "hf_job.sh: the bucket has no data/gone\n")


def test_bodies_are_clean_bash() -> None:
    scripts = sorted((ROOT / "moekit" / "launch").glob("*.sh"))
    assert len(scripts) == 2
    assert subprocess.run(["shellcheck", *scripts], capture_output=True, text=True).stdout == ""


@pytest.mark.train
def test_a_job_trains_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """`hf_job.sh` and `node.sh` with the real Megatron on this CPU, each Job on a disk of its own."""
    from moekit.data.quickstart import prepare_python_docs

    bucket = tmp_path / "bucket"
    prepare_python_docs(bucket, lambda _: None)
    (tmp_path / "tiny.yaml").write_text(tiny(4, "resilience: {exit_signal_handler: true}"))
    loaded = load(str(tmp_path / "tiny.yaml"))
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for job, said in (("1", "step 4 is in the bucket"), ("2", "training is finished, at step 4")):
        root, files = tmp_path / f"disk{job}", tmp_path / f"files{job}"
        cluster = Cluster(
            name="hf-jobs", gpus_per_node=2, gpu="h200", fabric="none", container="none", shared_root=str(root)
        )
        write(files, {**hf_jobs.job_files(loaded, "tiny", cluster), "megatron.list": ""})
        words = ["bash", str(files / "hf_job.sh"), "tiny", str(root), str(bucket)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stderr
    kept = bucket / "runs" / "tiny"
    assert (kept / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "4"
    assert missing(kept / "checkpoints/iter_0000004") == ""
    assert [path.name for path in (kept / "attempts").iterdir()] == ["1"]
    assert "iteration        4/" in (kept / "attempts/1/train.log").read_text()
    assert '"step": 4' in (kept / "attempts/1/metrics.jsonl").read_text()
