"""The search's answer against all layouts worked out one by one, its steps, and the recipe that it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml

from moekit.cli import app
from moekit.cluster.profile import find_cluster
from moekit.plan.desk import Wishes, question_of
from moekit.plan.report.search import search_lines
from moekit.plan.search.best import Question, search
from moekit.plan.search.child import changes_of
from moekit.plan.search.choice import Searched, searched
from moekit.plan.search.grid import KNOBS, RANKS
from moekit.plan.search.steps import alone, path
from moekit.problems import MoekitError
from moekit.recipe.check import problems_of
from moekit.recipe.load import load


@cache
def asked(name: str, profile: str = "aws-p5") -> Question:
    return question_of(Wishes(name, load(name), profile))


@cache
def answered(name: str, profile: str = "aws-p5") -> Searched:
    return searched(asked(name, profile))


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    app(["plan", *words], standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["first_moe", "dense", "settings/hybrid"])
def test_nothing_faster_is_missed(name: str) -> None:
    """All legal layouts, worked out; the fastest of each ranks that fits and that the rules accept."""
    question = asked(name)
    points = np.indices(question.grid.sizes).reshape(len(KNOBS), -1).T
    points = points[question.legal(points)]
    judged = [one for part in np.array_split(points, 40) for one in question.judged(part)]
    found = search(question, 12)
    assert found.layouts == len(points)
    assert found.judged <= len(points)
    fastest: dict[tuple[int, ...], float] = {}
    for one in sorted(judged, key=lambda one: one.seconds):
        if one.peak_bytes > question.room_bytes or one.point[:RANKS] in fastest:
            continue
        if question.refusal(one.point) is None:
            fastest[one.point[:RANKS]] = one.seconds
        if len(fastest) == 12:
            break
    assert [one.seconds for one in found.survivors] == pytest.approx([*fastest.values()], rel=1e-9)
    for one in found.survivors:
        assert one.peak_bytes <= question.room_bytes
        assert question.refusal(one.point) is None


def test_the_way_leads_to_the_layout_by_changes_that_megatron_takes() -> None:
    found = answered("settings/ep16")
    grid, at = found.question.grid, found.question.grid.own
    assert found.steps[-1].found.point == found.chosen.point
    for step in found.steps:
        turned = [knob for knob, old, new in zip(KNOBS, at, step.found.point, strict=True) if old != new]
        assert len(turned) == len(step.changes) >= 1
        assert found.question.refusal(step.found.point) is None
        at = step.found.point
    assert found.own is not None
    assert found.chosen.seconds < found.own.seconds
    for one in found.alone:
        assert sum(old != new for old, new in zip(grid.own, one.found.point, strict=True)) == 1
        assert found.question.refusal(one.found.point) is None
        assert one.found.peak_bytes <= found.question.room_bytes
    assert [one.found.seconds for one in found.alone] == sorted(one.found.seconds for one in found.alone)


def test_what_megatron_takes_only_together_is_one_step() -> None:
    """While upcycling, experts are cut as the dense layers are."""
    question = asked("upcycle")
    goal = list(question.grid.own)
    goal[KNOBS.index("tensor")] = question.grid.tensor.index(2)
    goal[KNOBS.index("expert_tensor")] = question.grid.expert_tensor.index(2)
    goal[KNOBS.index("expert")] = question.grid.expert.index(2)
    steps = [*path(question, tuple(goal))]
    assert {step.changes for step in steps} == {("tensor 1 -> 2", "expert tensor 1 -> 2"), ("expert 8 -> 2",)}


@pytest.mark.parametrize("method", ["aux_loss", "quantile_balancing"])
def test_a_micro_batch_changes_training_where_balancing_looks_at_one(method: str, tmp_path: Path) -> None:
    recipe = tmp_path / "asked.yaml"
    balance = {"type": method, "aux_loss_coeff": 1e-3 if method == "aux_loss" else None}
    recipe.write_text(yaml.safe_dump({"base": "first_moe", "balance": balance}))
    question = question_of(Wishes(str(recipe), load(str(recipe)), "aws-p5"))
    marked = [step for step in alone(question) if step.changes_training]
    assert marked
    assert all(step.changes[0].startswith("micro batch") for step in marked)
    assert {step.changes[0] for step in alone(question) if "micro batch" in step.changes[0]} == {
        step.changes[0] for step in marked
    }
    chosen = searched(question).chosen
    assert chosen.point[KNOBS.index("micro_batch")] == question.grid.own[KNOBS.index("micro_batch")]


def test_a_micro_batch_of_other_balancing_is_a_layout_like_others() -> None:
    assert asked("settings/balance_global").recipe.balance.type == ("global_aux_loss",)
    assert not any(step.changes_training for step in alone(asked("settings/balance_global")))


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("first_moe", "aws-p5"),
        ("models/moonlight", "h100-ib"),
        ("settings/group_limited", "h100-ib"),
        ("fp8", "h100-ib"),
        ("settings/capacity", "aws-p5"),
    ],
)
def test_capacity_groups_and_precision_are_never_touched(name: str, profile: str) -> None:
    found, own = answered(name, profile), load(name).recipe
    for one in (*found.answer.survivors, *(step.found for step in (*found.steps, *found.alone))):
        changes = changes_of(found.question.grid, own, found.question.target, one.point)
        sections = {field.partition(".")[0] for field in changes}
        assert sections <= {"parallel", "train", "memory", "moe", "overlap", "runtime"}
        allowed = {"dispatcher", "flex_dispatcher_backend", "enable_deepep", "deepep_num_sms", "hybridep_num_sms"}
        assert {f.partition(".")[2] for f in changes if f.startswith("moe.")} <= allowed | {"shared_expert_overlap"}
        assert {f for f in changes if f.startswith("train.")} <= {"train.micro_batch_size"}


@pytest.mark.parametrize(("name", "profile"), [("settings/ep16", "aws-p5"), ("models/qwen3_235b_h100", "h100-ib")])
def test_the_written_recipe_is_small_and_can_be_launched(
    name: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "faster.yaml"
    said = printed(capsys, name, "--profile", profile, "--search", "--write", str(file))
    assert "\ntaken: " in said
    text = file.read_text()
    assert len(text.splitlines()) < 40
    child = load(str(file))
    assert child.source.tree.entries["base"][1].text == name  # type: ignore[union-attr]
    assert [p for p in problems_of(child, find_cluster(profile)) if p.level == "error"] == []
    app(["launch", str(file), "--profile", profile, "--dry-run"], standalone_mode=False)
    assert "--expert-model-parallel-size" in capsys.readouterr().out
    with pytest.raises(MoekitError, match="exists"):
        printed(capsys, name, "--profile", profile, "--search", "--write", str(file))


def test_the_planned_child_is_what_the_search_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "faster.yaml"
    values = json.loads(printed(capsys, "settings/ep16", "--search", "--write", str(file), "--json"))
    again = json.loads(printed(capsys, str(file), "--json"))
    assert again["step"]["seconds"] == pytest.approx(values["chosen"]["seconds"], rel=1e-9)
    assert max(again["memory_bytes"]["needed"]) == pytest.approx(values["chosen"]["peak_bytes"], rel=1e-9)
    assert len(values["survivors"]) == 20


def test_hybridep_is_told_of_fewer_ranks() -> None:
    question = asked("models/qwen3_30b_gb200", "gb200")
    grid, place = question.grid, KNOBS.index("expert")
    point = (*grid.own[:place], grid.expert.index(4), *grid.own[place + 1 :])
    changes = changes_of(grid, question.recipe, question.target, point)
    told = {"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "4"}
    assert changes["runtime.environment"] == {**(question.recipe.runtime.environment or {}), **told}
    assert question.refusal(point) is None


@pytest.mark.parametrize("name", ["first_moe", "models/moonlight", "settings/offload"])
def test_a_search_fits_a_wide_terminal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, name, "--search").splitlines()
    assert max(len(line) for line in said) <= 160
    assert len([line for line in said if line.startswith("  >  ")]) == 1
    assert any(line.startswith("the recipe's own layout: ") for line in said)
    found = answered(name)
    place, grid = KNOBS.index("dispatcher"), found.question.grid
    is_new = found.chosen.point[place] != grid.own[place]
    library = {"deepep": "DeepEP", "hybridep": "HybridEP"}.get(grid.dispatcher[found.chosen.point[place]])
    noted = f"  whether your image has {library} no rule knows: look before it is launched"
    assert (noted in said) is bool(is_new and library)


def test_a_search_on_fewer_gpus_begins_where_ranks_divide_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.yaml"
    printed(capsys, "models/qwen3_235b_h100", "--profile", "h100-ib", "--gpus", "128", "--search", "--write", str(file))
    recipe = load(str(file)).recipe
    assert recipe.parallel.gpus == 128
    assert [p for p in problems_of(load(str(file)), find_cluster("h100-ib")) if p.level == "error"] == []


def test_tight_layouts_are_taken_where_no_other_fits() -> None:
    question = asked("dense")
    points = np.indices(question.grid.sizes).reshape(len(KNOBS), -1).T
    least = min(one.peak_bytes for one in question.judged(points[question.legal(points)]))
    found = searched(replace(question, capacity_bytes=least / 0.95))
    assert found.question.is_tight
    assert found.chosen.peak_bytes <= least / 0.95
    assert "  fits: needs up to " in "\n".join(search_lines(found))
    assert ", as none needs less: they are tight" in "\n".join(search_lines(found))
    assert not answered("dense").question.is_tight
    with pytest.raises(MoekitError, match="none of 1,800 layouts fits 8 GPUs"):
        searched(replace(question, capacity_bytes=least / 1.01))


def test_what_cannot_be_searched_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MoekitError, match="`--write` writes the layout"):
        printed(capsys, "first_moe", "--write", "x.yaml")
    with pytest.raises(MoekitError, match=r"`runtime\.device` is cpu"):
        printed(capsys, "quickstart", "--search")
    with pytest.raises(MoekitError, match=r"none of [0-9,]+ layouts fits 8 GPUs, of each of which [0-9.]+ GiB"):
        printed(capsys, "models/mixtral_8x22b", "--search", "--gpus", "8")
    with pytest.raises(MoekitError, match="global_batch_size = 512 does not divide over 1000 GPUs"):
        printed(capsys, "first_moe", "--search", "--gpus", "1000")
