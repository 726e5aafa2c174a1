"""`job/index.py` asks for the same samples as a training would. That a training then builds nothing:
tests/slurm/test_chain_training.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import moekit
from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.launch.judges import questions
from moekit.recipe.load import load

COUNTS = """
import copy, json, sys
from moekit.megatron import stages
stages.load()
import index
from megatron.training import global_vars
from megatron.training.training import get_train_valid_test_num_samples, update_train_iters

def counted(args):
    global_vars.unset_global_variables()
    global_vars.set_args(args)
    counts = list(get_train_valid_test_num_samples())
    return [counts, args.split, args.seq_length, args.seed]

for name, fields in json.load(sys.stdin):
    question = stages.Question(**fields)
    stages.pretend(question)
    run = stages.Run(question)
    stages.parse(run)
    ours = copy.deepcopy(run.args)
    index.complete(ours)
    stages.validate(run)
    update_train_iters(run.args)
    print(json.dumps([name, counted(ours), counted(run.args)]))
"""


@pytest.mark.megatron
def test_an_index_is_for_the_samples_that_a_training_asks_for(tmp_path: Path) -> None:
    """Of every shipped recipe with data of its own, by Megatron's own validation."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for name in share.shipped_recipes():
        loaded, cluster = load(name), find_cluster(share.made_for(name))
        recipe = loaded.recipe
        if recipe.data.name and recipe.megatron.version == "0.19.2" and recipe.runtime.device != "cpu":
            asked.append((name, asdict(questions(loaded, cluster)["first"])))
    (dense,) = [fields for name, fields in asked if name == "dense"]
    by_samples = [_in_samples(word) for word in dense["argv"]]
    asked.append(("by_samples", {**dense, "argv": by_samples}))
    path = f"{Path(moekit.__file__).parent / 'job'}"
    done = subprocess.run(
        [sys.executable, "-c", COUNTS],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [name for name, _, _ in told] == [name for name, _ in asked]
    for name, ours, megatrons in told:
        assert ours == megatrons, name


def _in_samples(word: str) -> str:
    """An option that counts iterations, as the one that counts samples: a shorter training, but a training."""
    counted = ("--train-iters", "--lr-decay-iters", "--lr-warmup-iters", "--lr-wsd-decay-iters")
    return word.replace("-iters", "-samples") if word in counted else word
