"""`moekit data index` on this machine: what it builds is what a training looks for. As a job: tests/slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moekit.cluster.profile import find_cluster
from moekit.data.index import submit
from moekit.launch.index import folder_of
from moekit.problems import MoekitError
from moekit.recipe.load import load

TINY = """
base: quickstart
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 2, num_query_groups: 1,
        seq_length: 64, max_position_embeddings: 64}
moe: {ffn_hidden_size: 64}
train: {micro_batch_size: 2, global_batch_size: 4, iters: 2, eval_iters: 1}
schedule: {decay_iters: 2, warmup_iters: 1}
checkpoint: {save_interval: 100000}
monitor: {tokens_per_expert_interval: 1}
log: {interval: 1}
"""


def moekit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moekit", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.train
def test_a_training_finds_the_index_and_builds_nothing(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    done = moekit(tmp_path, "data", "index", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    cache = tmp_path / "moekit-local/data/python-docs/cache"
    heading, index, _, following = done.stdout.splitlines()
    assert heading.startswith(f"tiny: index of 8 + 4 + 4 samples in {cache}: 8 files built, ")
    assert (index, following) == (f"  index       {cache}", "  next        moekit launch tiny.yaml")
    built = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(built) == 8

    again = moekit(tmp_path, "data", "index", "tiny.yaml", "--json")
    (said,) = json.loads(again.stdout)
    assert (said["recipe"], said["cache"], said["job"]) == ("tiny", str(cache), None)
    assert "it was there already" in said["said"]

    trained = moekit(tmp_path, "launch", "tiny.yaml")
    log = (tmp_path / "moekit-local/runs/tiny/attempts/1/train.log").read_text()
    assert trained.returncode == 0, log
    assert "Load the GPTDataset train indices" in log
    assert "Build and save the GPTDataset" not in log
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == built


def test_what_has_no_index_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    done = moekit(tmp_path, "data", "index", "first_moe_smoke", "--on", "local")
    assert done.returncode == 1
    assert "there is no index of the data of `first_moe_smoke` that could be built before a training" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_data_and_a_missing_partition_are_told_at_once(tmp_path: Path) -> None:
    from dataclasses import replace

    cluster = replace(find_cluster(), shared_root=str(tmp_path), image="/no.sqsh")
    with pytest.raises(MoekitError) as refused:
        submit([load("first_moe")], cluster)
    said = "\n".join(problem.what for problem in refused.value.problems)
    assert "there is no data set `fineweb-edu`" in said
    assert "there is no tokenizer" in said
    assert "profile `aws-p5` names no partition of CPU nodes, and an index takes no GPU" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_for_what_the_index_depends_on(tmp_path: Path) -> None:
    names = []
    for text in ("", "train: {iters: 7}\nschedule: {decay_iters: 7}\n", "model: {num_layers: 3}\n"):
        path = tmp_path / "same.yaml"
        path.write_text(f"base: quickstart\n{text}")
        names.append(folder_of(load(str(path)), tmp_path).path)
    assert names[0] == names[2] != names[1]
    assert names[0].parent == tmp_path / "data/python-docs/indexes"
    assert names[0].name.startswith("same-")
