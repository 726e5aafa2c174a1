"""Sweep files: what they hold, how their runs are called, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.launch.flat import flat_yaml
from moekit.launch.run_files import run_files
from moekit.launch.several import load_all
from moekit.problems import MoekitError
from moekit.recipe.check import problems_of
from moekit.recipe.jsonschema import schema
from moekit.recipe.load import Loaded, load, load_each
from moekit.recipe.values import differences, plain_values

RATES = """
base: dense
summary: of the sweep
train: {exit_interval: 60}
sweep:
  low: {summary: the low one, schedule: {lr: 1.0e-4}}
  same:
  high: {schedule: {lr: 1.0e-3}, moe: {num_experts: 64, ffn_hidden_size: 1024}, router: {topk: 8}}
"""
LADDER = """
base: first_moe
ladder:
  start:
  seven: {summary: one less, router: {topk: 7}}
  fused: {moe: {permute_fusion: true}}
"""


def sweep(folder: Path, text: str, name: str = "s") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return str(path)


def changes(runs: list[Loaded]) -> dict[str, list[tuple[str, object, object]]]:
    return {run.name: differences(run.variant.below, run) for run in runs if run.variant}


def test_variants_of_a_sweep_each_change_the_files_recipe(tmp_path: Path) -> None:
    runs = load_each(sweep(tmp_path, RATES))
    assert [run.name for run in runs] == ["s-low", "s-same", "s-high"]
    assert changes(runs)["s-low"] == [("summary", None, "the low one"), ("schedule.lr", 5e-4, 1e-4)]
    assert changes(runs)["s-same"] == []
    assert [name for name, _, _ in changes(runs)["s-high"]] == [
        *("moe.num_experts", "moe.ffn_hidden_size", "router.topk", "schedule.lr")
    ]
    assert {run.recipe.train.exit_interval for run in runs} == {60}
    assert [run.recipe.summary for run in runs] == ["the low one", None, None]
    assert {(run.group, run.compared_with) for run in runs} == {("s", None)}


def test_a_rung_goes_on_from_the_one_before(tmp_path: Path) -> None:
    runs = load_each(sweep(tmp_path, LADDER))
    assert [(run.name, run.compared_with) for run in runs] == [
        ("s-start", None),
        ("s-seven", "s-start"),
        ("s-fused", "s-seven"),
    ]
    assert changes(runs)["s-fused"] == [("summary", "one less", None), ("moe.permute_fusion", None, True)]
    assert runs[2].recipe.router.topk == 7


def test_a_control_stands_beside_each_run_with_experts(tmp_path: Path) -> None:
    runs = load_each(
        sweep(
            tmp_path,
            RATES + "  forced: {benchmark: true, moe: {num_experts: 8}, router: {topk: 2},"
            " balance: {force_load_balancing: true}}\ncontrol: forced_balance\n",
        )
    )
    assert [run.name for run in runs] == ["s-low", "s-same", "s-high", "s-high-forced_balance", "s-forced"]
    control = runs[3]
    assert control.compared_with == "s-high"
    assert [name for name, _, _ in changes(runs)[control.name] if name != "summary"] == [
        *("benchmark", "balance.force_load_balancing")
    ]
    assert control.source.where("balance.force_load_balancing").endswith("settings/forced_balance.yaml:10")


def test_a_variant_is_an_ordinary_recipe(tmp_path: Path) -> None:
    path = sweep(tmp_path, LADDER)
    run = load(f"{path}:fused")
    assert run.name == "s-fused"
    assert run.source.where("moe.permute_fusion") == f"{path}:6"
    assert run.source.where("router.topk") == f"{path}:5"
    assert plain_values(run.recipe) == plain_values(load_each(path)[2].recipe)
    assert load_each(path, "other")[1].name == "other-seven"
    assert load_each(path, "other")[1].compared_with == "other-start"
    (one,) = load_each(f"{path}:fused", "other")
    assert (one.name, one.group, one.compared_with) == ("other", "s", "s-seven")
    provenance = json.loads(run_files(run, run.name, "/s")["provenance.json"])
    assert (provenance["group"], provenance["compared_with"]) == ("s", "s-seven")


def test_a_file_whose_name_has_a_colon_is_a_file(tmp_path: Path) -> None:
    path = sweep(tmp_path, "base: dense\n", name="a:b")
    assert load(path).name == "a:b"


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        (LADDER + "sweep: {a: }\n", ":3", "a file has `sweep` or `ladder`, not both"),
        ("sweep:\n", ":1", "`sweep` must be `name: fields` lines"),
        ("sweep: [a]\n", ":1", "`sweep` must be `name: fields` lines"),
        ("sweep: {}\n", ":1", "`sweep` must be `name: fields` lines"),
        ("ladder: {a: yes}\n", ":1", "`ladder.a` must be a section of the fields it changes"),
        ("sweep: {a: {base: dense}}\n", ":1", "`sweep.a` has a `base`"),
        ("sweep: {a: {sweep: {b: }}}\n", ":1", "`sweep.a` has a `sweep`"),
        ("sweep: {a b: }\n", ":1", "a run cannot be named `s-a b`"),
        ("sweep: {a: , a: }\n", ":1", "`a` is given twice"),
        ("sweep: {a: }\ncontrol: forced\n", ":2", "`control` must be `forced_balance`, not `forced`"),
        ("sweep: {a: }\ncontrol: [x]\n", ":2", "`control` must be `forced_balance`"),
        (LADDER + "  again: {router: {topk: 7}}\n", ":7", "`again` is the same recipe as `s-fused`"),
        (RATES + "  once_more:\n", ":9", "`once_more` is the same recipe as `s-same`"),
        ("sweep:\n  a: {moe: {num_expert: 4}}\n", ":2", "unknown field `moe.num_expert`"),
        ("sweep:\n  a:\n    train: {lr: 1}\n", ":3", "unknown field `train.lr`"),
        ("routr: {}\nsweep:\n  a:\n", ":1", "unknown section `routr`"),
        ("control: forced_balance\nbase: dense\n", ":1", "unknown section `control`"),
    ],
)
def test_what_is_refused(text: str, where: str, said: str, tmp_path: Path) -> None:
    path = sweep(tmp_path, text)
    with pytest.raises(MoekitError) as refused:
        load_all([path], None, find_cluster())
    problem = next(problem for problem in refused.value.problems if said in problem.what)
    assert problem.where == f"{path}{where}"


def test_one_fault_of_a_shared_line_is_told_once(tmp_path: Path) -> None:
    path = sweep(tmp_path, LADDER + "parallel: {expert_model: 7}\n")
    with pytest.raises(MoekitError) as refused:
        load_all([path], None, find_cluster())
    assert len([p for p in refused.value.problems if p.where == f"{path}:7" and "64" in p.what]) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("S", "is a sweep of 3 runs"),
        ("S:fusd", "has no `fusd`"),
        ("first_moe:fused", "`first_moe` is one recipe and no sweep: nothing in it is called `fused`"),
    ],
)
def test_one_recipe_is_asked_for(given: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(MoekitError, match=said):
        load(given.replace("S", sweep(tmp_path, LADDER)))


def test_no_recipe_is_built_on_a_sweep(tmp_path: Path) -> None:
    sweep(tmp_path, LADDER)
    with pytest.raises(MoekitError, match=r"s\.yaml` is a sweep, which no recipe is built on"):
        load(sweep(tmp_path, "base: s.yaml\n", name="child"))


def test_two_runs_of_a_launch_have_two_names(tmp_path: Path) -> None:
    with pytest.raises(MoekitError, match="would both be the run `dense`"):
        load_all(["dense", "dense"], None, find_cluster())
    with pytest.raises(MoekitError, match="names one run or one sweep"):
        load_all(["dense", "fp8"], "x", find_cluster())


# Shipped sweeps

SHIPPED = [(name, run) for name in share.shipped_sweeps() for run in load_each(name)]


@pytest.mark.parametrize(("name", "run"), SHIPPED, ids=lambda value: value.name if isinstance(value, Loaded) else "")
def test_a_shipped_sweeps_run_is_fit_for_megatron(name: str, run: Loaded, tmp_path: Path) -> None:
    assert problems_of(run, find_cluster()) == []
    (tmp_path / "flat.yaml").write_text(flat_yaml(run.recipe))
    assert plain_values(load(str(tmp_path / "flat.yaml")).recipe) == plain_values(run.recipe)


@pytest.mark.megatron
def test_megatron_refuses_none_of_them() -> None:
    words = [sys.executable, "-m", "moekit", "check", "--real", "--json", *share.shipped_sweeps()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout)) == len(SHIPPED)


def test_a_ladder_changes_one_thing_a_rung() -> None:
    for run in load_each("sweeps/first_moe_ladder"):
        assert run.variant
        sections = {name.partition(".")[0] for name, _, _ in differences(run.variant.below, run)}
        assert len(sections - {"summary", "benchmark"}) <= (4 if run.variant.key.startswith("overlap") else 3)


# Editors


def test_editors_know_sweeps() -> None:
    validator = jsonschema.Draft7Validator(schema())
    for text in (RATES, LADDER, LADDER + "control: forced_balance\n"):
        validator.validate(yaml.safe_load(text))
    for text, said in (
        ("sweep: {a: {routr: {topk: 8}}}", "'routr' was unexpected"),
        ("sweep: {a: {router: {topkk: 8}}}", "'topkk' was unexpected"),
        ("sweep: {a: {base: dense}}", "'base' was unexpected"),
        ("ladder: {}", "non-empty"),
        ("sweep: {a: }\ncontrol: forced", "is not one of"),
    ):
        errors = [error.message for error in validator.iter_errors(yaml.safe_load(text))]
        assert len(errors) == 1, errors
        assert said in errors[0]
