"""Whether a run is finished, from the files that its attempts leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moekit.launch.attempt import is_finished, next_attempt
from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError
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


def checkpoint(run: RunDir, step: int) -> Path:
    """A complete one, in PyTorch's own format."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder = run.checkpoints / f"iter_{step:07}"
    dcp.save({"weight": torch.ones(100)}, checkpoint_id=folder, no_dist=True)
    run.latest_checkpoint.write_text(str(step))
    return folder


def test_an_incomplete_checkpoint_is_passed_over(run: RunDir, recipe: Loaded) -> None:
    checkpoint(run, 100)
    (checkpoint(run, 200) / "__0_0.distcp").unlink()
    plan = next_attempt(recipe, run)
    assert (plan.resumes, plan.start, plan.end) == (True, 100, 300)
    assert plan.said == (
        "the checkpoint of iteration 200 is passed over: `__0_0.distcp` is missing",
        "`iter_0000200` lies in `checkpoints/incomplete/iter_0000200-1` now",
    )


def test_a_run_without_a_checkpoint_begins_at_the_beginning(run: RunDir, recipe: Loaded) -> None:
    assert not next_attempt(recipe, run).resumes
    attempt(run, range(1, recipe.recipe.checkpoint.save_interval + 1), code=1)  # killed in its first save
    assert (next_attempt(recipe, run).resumes, next_attempt(recipe, run).start) == (False, 0)


def test_a_checkpoint_that_is_gone_is_no_reason_to_begin_anew(run: RunDir, recipe: Loaded) -> None:
    interval = recipe.recipe.checkpoint.save_interval
    attempt(run, range(1, interval + 2), code=1)  # it came to the step after its first save
    with pytest.raises(MoekitError) as refused:
        next_attempt(recipe, run)
    (problem,) = refused.value.problems
    assert problem.what == "run `some` had saved a checkpoint, and none that is complete is left"
    assert problem.hint.startswith("bring one back there; or, to train from the beginning, remove the run's folder")
    save(run, interval)  # an empty folder
    with pytest.raises(
        MoekitError, match=f"is left: the checkpoint of iteration {interval} is passed over: it is empty"
    ):
        next_attempt(recipe, run)
    assert run.numbers() == [1]


def test_a_run_that_ended_well_had_saved(run: RunDir, recipe: Loaded) -> None:
    attempt(run, range(1, 3))
    with pytest.raises(MoekitError, match="none that is complete is left"):
        next_attempt(recipe, run)
