"""Files that inherit, names that are shipped, and where each value comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from moekit import share
from moekit.problems import MoekitError
from moekit.recipe.load import field_that_says, fields_by_option, load
from moekit.recipe.sizes import Sizes, sizes
from moekit.recipe.values import origins, plain_values


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_child_of_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        a="router:\n  topk: 8\n  dtype: fp32\n",
        b="base: a.yaml\nrouter:\n  topk: 4\n",
        c="base: b.yaml\nrouter:\n  dtype: null\n",
    )
    loaded = load("c.yaml")
    assert (loaded.recipe.router.topk, loaded.recipe.router.dtype) == (4, None)
    assert loaded.name == "c"
    assert loaded.recipe.base == "b.yaml"
    assert loaded.source.where("router.topk") == "b.yaml:3"
    assert loaded.source.where("router.dtype") == "c.yaml:3"
    assert loaded.source.where("router.fusion") == "c.yaml:3"  # its section
    assert loaded.source.where("moe.num_experts") == "c.yaml"
    rows = origins(loaded)
    assert rows[0] == ("megatron.version", "0.19.2", "moekit")
    assert rows[1:] == [("router.topk", 4, "b.yaml:3"), ("router.dtype", None, "c.yaml:3")]


def test_a_base_is_found_from_its_childs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write(tmp_path, top="summary: top\n")
    write(tmp_path / "deep", middle="base: ../top.yaml\n")
    write(tmp_path / "deep" / "er", low="base: ../middle.yaml\n")
    monkeypatch.chdir(tmp_path / "deep")
    loaded = load("er/low.yaml")
    assert loaded.recipe.summary == "top"
    assert loaded.source.where("summary") == "../top.yaml:1"


@pytest.mark.parametrize("name", share.shipped_recipes())
def test_shipped_names_are_files_from_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = share.folder("recipes") / f"{name}.yaml"
    assert load(name).recipe == load(str(path)).recipe
    write(tmp_path, mine=f"base: {name}\n")
    assert load("mine.yaml").recipe.model == load(name).recipe.model


def test_a_file_here_is_taken_before_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dense").write_text("summary: mine\n")
    assert load("dense").recipe.summary == "mine"


def test_a_child_may_be_called_like_its_shipped_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, dense="base: dense\nsummary: mine\n")
    assert load("dense.yaml").recipe.summary == "mine"
    assert load("dense.yaml").recipe.model.num_layers == 16


def test_problems_of_all_files_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, a="model:\n  num_layers: many\n", b="base: a.yaml\nrouter:\n  topkk: 8\n")
    with pytest.raises(MoekitError) as refused:
        load("b.yaml")
    assert sorted(problem.where for problem in refused.value.problems) == ["a.yaml:2", "b.yaml:3"]


def test_an_overridden_mistake_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, a="model:\n  num_layers: many\n", b="base: a.yaml\nmodel:\n  num_layers: 2\n")
    assert load("b.yaml").recipe.model.num_layers == 2


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("moe_router_topk", "router.topk"),
        ("moe-router-topk", "router.topk"),
        ("--moe-router-topk", "router.topk"),
        ("num_experts", "moe.num_experts"),
        ("lr", "schedule.lr"),
        ("topk", "router.topk"),
        ("interval", "log.interval"),
        ("name", None),  # of an optimizer and of data
        ("nothing", None),
        ("save", "checkpoint.save"),
    ],
)
def test_where_a_key_belongs(key: str, field: str | None) -> None:
    assert field_that_says(key) == field


def test_each_option_has_one_field() -> None:
    assert fields_by_option()["--moe-router-topk"] == "router.topk"
    assert fields_by_option()["--data-args-path"] == "data.name"


def test_sizes() -> None:
    moe, dense = sizes(load("first_moe").recipe), sizes(load("dense").recipe)
    assert dense == Sizes(8, 1, 1, 1, 1, 1, 8, 512, 4096)
    assert moe == Sizes(8, 1, 1, 1, 8, 1, 8, 512, 4096)
    assert (moe.data, moe.expert_data, moe.accumulation_steps, moe.tokens_per_step) == (8, 1, 8, 2_097_152)


def test_sizes_of_a_whole_layout() -> None:
    size = Sizes(64, 2, 4, 2, 8, 1, 1, 256, 4096)
    assert (size.model_ranks, size.data) == (16, 4)
    assert (size.expert_ranks, size.expert_data) == (32, 2)
    assert size.accumulation_steps == 64


def test_an_expert_is_cut_like_a_dense_layer_unless_it_says_otherwise(tmp_path: Path) -> None:
    write(tmp_path, x="base: first_moe\nparallel: {tensor_model: 2, expert_tensor: null}\n")
    size = sizes(load(str(tmp_path / "x.yaml")).recipe)
    assert size is not None
    assert (size.tensor, size.expert_tensor) == (2, 2)


@pytest.mark.parametrize("unset", ["model: {seq_length: null}", "parallel: {gpus: null}", "train: null"])
def test_no_sizes_without_what_makes_them(unset: str, tmp_path: Path) -> None:
    write(tmp_path, x=f"base: dense\n{unset}\n")
    assert sizes(load(str(tmp_path / "x.yaml")).recipe) is None


def test_plain_values_are_flat_and_of_json() -> None:
    values = plain_values(load("first_moe").recipe)
    assert values["balance.type"] == ["aux_loss"]
    assert values["balance.aux_loss_coeff"] == [1e-3]
    assert values["runtime.environment.NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "1"
    assert values["model.swiglu"] is True
    assert "base" not in values
    assert None not in values.values()


def test_what_is_unset_is_shown_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, x="base: dense\nruntime:\n  environment:\n    NVTE_ALLOW_NONDETERMINISTIC_ALGO: null\n")
    rows = {name: (value, where) for name, value, where in origins(load("x.yaml"))}
    assert rows["runtime.environment.NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == (None, "x.yaml:4")


def test_a_name_without_its_folder_is_led_there() -> None:
    with pytest.raises(MoekitError) as refused:
        load("router_sigmoid")
    assert refused.value.problems[0].hint == "did you mean `settings/router_sigmoid`?"
