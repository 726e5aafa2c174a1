"""Whether a run is finished, from the files that its attempts leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moekit.launch.attempt import is_finished
from moekit.launch.rundir import RunDir
from moekit.recipe.load import Loaded, load


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "runs" / "some"
    path.mkdir(parents=True)
    return RunDir(path)


@pytest.fixture
def recipe(tmp_path: Path) -> Loaded:
    """300 iterations in one process."""
    (tmp_path / "one.yaml").write_text("base: quickstart\nparallel: {gpus: 1, expert_model: 1}\n")
    return load(str(tmp_path / "one.yaml"))


def attempt(run: RunDir, steps: range, code: int = 0) -> None:
    folder = run.attempt(run.new_attempt()).path
    (folder / "exit").mkdir(exist_ok=True)
    (folder / "exit" / "rank0.json").write_text(json.dumps({"code": code, "reason": "", "time": 1.0}))
    lines = [json.dumps({"step": step, "time": 1.0, "metrics": {"lm loss": 1.0}}) for step in steps]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def save(run: RunDir, step: int) -> None:
    (run.checkpoints / f"iter_{step:07}").mkdir(parents=True)
    run.latest_checkpoint.write_text(str(step))


def test_the_last_step_and_its_checkpoint_are_the_end(run: RunDir, recipe: Loaded) -> None:
    assert not is_finished(recipe, run)
    attempt(run, range(1, 301))
    assert not is_finished(recipe, run)
    save(run, 300)
    assert is_finished(recipe, run)


def test_the_newest_attempt_counts(run: RunDir, recipe: Loaded) -> None:
    """One that failed in its last save, and one that went on from before it and was stopped by a signal."""
    save(run, 200)
    attempt(run, range(1, 301), code=1)
    attempt(run, range(201, 251))
    save(run, 250)
    assert not is_finished(recipe, run)
    attempt(run, range(251, 301))
    save(run, 300)
    assert is_finished(recipe, run)


def test_an_attempt_that_had_nothing_left_to_train(run: RunDir, recipe: Loaded) -> None:
    attempt(run, range(1, 301), code=1)  # in the validation after the last save
    save(run, 300)
    assert not is_finished(recipe, run)
    attempt(run, range(0))
    assert is_finished(recipe, run)


def test_without_a_step_nothing_is_finished(run: RunDir, recipe: Loaded) -> None:
    save(run, 0)
    attempt(run, range(0))
    assert not is_finished(recipe, run)


def test_an_exit_interval_is_an_end(run: RunDir, tmp_path: Path) -> None:
    text = "base: quickstart\nparallel: {gpus: 1, expert_model: 1}\ntrain: {exit_interval: 80}\n"
    (tmp_path / "exit.yaml").write_text(text)
    attempt(run, range(1, 81))
    save(run, 80)
    assert is_finished(load(str(tmp_path / "exit.yaml")), run)
