"""Which runs a proof takes for trained, and which it trains anew."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from made_runs import DENSE, DETERMINISTIC, SOFTWARE, dense_steps, make_run, metrics
from typer.testing import CliRunner

from moekit.cli import app
from moekit.launch.flat import flat_yaml
from moekit.launch.rundir import RunDir, run_dir
from moekit.problems import MoekitError
from moekit.prove import train
from moekit.prove.train import DETERMINISTIC as TWICE
from moekit.prove.train import ONE_EXPERT, Part, installed
from moekit.recipe.load import load

CONTINUED = ONE_EXPERT[1]


def finished(root: Path, software: dict[str, str | None]) -> RunDir:
    """A run of quickstart_deterministic that came to its end, by some software."""
    steps = {n: metrics(n) for n in range(1, 13)}
    run = make_run(
        root, TWICE[0].name, DETERMINISTIC, steps, "summary: the quickstart in deterministic mode", [software]
    )
    (run / "recipe.yaml").write_text(flat_yaml(load(TWICE[0].recipe).recipe))
    (run / "attempts/1/exit").mkdir()
    for rank in range(2):
        (run / f"attempts/1/exit/rank{rank}.json").write_text(json.dumps({"code": 0, "reason": "", "time": 1.0}))
    return RunDir(run)


def here() -> dict[str, str | None]:
    return {**SOFTWARE, **{name: version for name, version in installed().items() if name != "moekit"}}


@pytest.mark.megatron
def test_what_this_software_trained_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path, here())
    assert train.train(TWICE[:1], tmp_path, again=False) == 0
    assert "quickstart_deterministic: trained already, in " in capsys.readouterr().err


@pytest.mark.megatron
def test_a_local_build_of_torch_is_the_same_version(tmp_path: Path) -> None:
    finished(tmp_path, {**here(), "torch": f"{here()['torch']}+cpu"})
    assert train.train(TWICE[:1], tmp_path, again=False) == 0


@pytest.mark.megatron
@pytest.mark.parametrize(("name", "was"), [("torch", "2.12.0"), ("megatron", "0.18.0"), ("transformer_engine", "2.9")])
def test_what_other_software_trained_is_not(name: str, was: str, tmp_path: Path) -> None:
    finished(tmp_path, {**here(), name: was})
    with pytest.raises(MoekitError, match=re.escape(f"it was trained with {name} {was}, and ")) as refused:
        train.train(TWICE[:1], tmp_path, again=False)
    assert "`--again` removes the runs of this proof" in refused.value.problems[0].hint


def test_a_run_of_another_recipe_is_not_taken(tmp_path: Path) -> None:
    make_run(tmp_path, CONTINUED.name, DENSE, dense_steps(), "train: {seed: 1}")
    with pytest.raises(MoekitError, match="run `quickstart_dense_continued` is of another recipe than settings/"):
        train.train((CONTINUED,), tmp_path, again=False)
    train._remove(run_dir(tmp_path, CONTINUED.name))
    assert not (tmp_path / "runs" / CONTINUED.name).exists()
    train._remove(run_dir(tmp_path, CONTINUED.name))  # what is not there is gone


@pytest.mark.parametrize("parts", [train.ONE_EXPERT, train.SLICES], ids=["one_expert", "slices"])
def test_runs_go_on_from_the_one_that_is_trained_first(parts: tuple[Part, ...]) -> None:
    dense, *others = parts
    assert load(dense.recipe).recipe.checkpoint.from_run is None
    assert {load(part.recipe).recipe.checkpoint.from_run for part in others} == {dense.name}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["one-expert", "--runs", "a", "b", "--again"], "`--again` trains, and `--runs` judges what was trained"),
        (["deterministic", "--runs", "a", "b", "--again"], "`--again` trains, and `--runs` judges what was trained"),
        (["deterministic", "--without", "a", "b"], "`--without` is for runs that are given"),
    ],
)
def test_options_that_exclude_each_other(words: list[str], said: str) -> None:
    with pytest.raises(MoekitError, match=re.escape(said)):
        CliRunner().invoke(app, ["prove", *words], catch_exceptions=False)
