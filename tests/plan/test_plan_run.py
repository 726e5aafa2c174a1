"""What `moekit plan` says of memory, time, load and pictures, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from moekit.cli import app
from moekit.plan.bars import SHADES, Chart, lines, svg
from moekit.problems import MoekitError


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    app(["plan", *words], standalone_mode=False)
    return capsys.readouterr().out


def valued(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(printed(capsys, *words, "--json"))
    return values


def changed(folder: Path, base: str, **fields: Any) -> str:
    path = folder / "asked.yaml"
    path.write_text(yaml.safe_dump({"base": base, **fields}))
    return str(path)


NO_RECOMPUTE = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}


def test_the_handbooks_moe_fits_with_recomputation_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Handbook 2.5: micro batch 8 ran out of memory on 80 GB, and full recomputation made it fit."""
    assert "\n  fits: the fullest GPU needs " in printed(capsys, "first_moe")
    said = printed(capsys, changed(tmp_path, "first_moe", memory=NO_RECOMPUTE))
    assert "\n  does not fit: the fullest GPU needs " in said
    remedies = said.partition("remedies, each alone")[2].partition("\n\n")[0]
    assert "recompute none -> " in remedies
    (micro,) = [line for line in remedies.splitlines() if "micro batch 8 -> " in line]
    assert micro.endswith("changes training")


def test_remedies_are_layouts_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = valued(capsys, changed(tmp_path, "first_moe", memory=NO_RECOMPUTE))
    assert values["memory_bytes"]["fit"] == "does not fit"
    assert values["remedies"]
    assert all(one["needed_bytes"] < values["memory_bytes"]["capacity"] for one in values["remedies"])
    assert [one["seconds"] for one in values["remedies"]] == sorted(one["seconds"] for one in values["remedies"])
    assert valued(capsys, "first_moe")["remedies"] == []


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    values = valued(capsys, "models/deepseek_v3_h100", "--profile", "h100-ib")
    held, step = values["memory_bytes"], values["step"]
    for stage, needed in enumerate(held["needed"]):
        parts = [held["terms"][kind] for kind in ("static", "activations", "moment", "outside")]
        whole = sum(size[stage] for part in parts for size in part.values())
        assert needed == pytest.approx(whole, rel=1e-9)
    assert len(held["needed"]) == 8
    assert sum(step["terms"].values()) == pytest.approx(step["seconds"])
    per_token = values["flops_per_token"] * step["tokens_per_s_per_gpu"]
    assert step["tflops_per_gpu"] == pytest.approx(per_token / 1e12)
    assert values["run"]["gpu_hours"] == pytest.approx(values["run"]["hours"] * 1024)
    assert set(values["certainty_of_models"].values()) <= {"exact but for buffers", "modelled", "calibrated", "assumed"}


def test_a_run_costs_what_the_cluster_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "dear.yaml"
    fields = {"name": "dear", "gpus_per_node": 8, "gpu": "h100", "fabric": "ib", "container": "none"}
    fields |= {"shared_root": str(tmp_path), "price_per_gpu_hour": 2.5}
    profile.write_text(yaml.safe_dump(fields))
    run = valued(capsys, "first_moe", "--profile", str(profile))["run"]
    assert run["cost"] == pytest.approx(2.5 * run["gpu_hours"])
    assert "the cost, at 2.5 a GPU-hour" in printed(capsys, "first_moe", "--profile", str(profile))
    assert "the cost" not in printed(capsys, "first_moe")


def test_what_preflight_measured_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "slow.yaml"
    fields = {"name": "slow", "gpus_per_node": 8, "gpu": "h100", "fabric": "ib", "container": "none"}
    profile.write_text(yaml.safe_dump({**fields, "shared_root": str(tmp_path)}))
    before = valued(capsys, "settings/ep16", "--profile", str(profile))["step"]["seconds"]
    (tmp_path / "preflight").mkdir()
    (tmp_path / "preflight/slow.json").write_text(json.dumps({"alltoall_busbw_gbps": {"2": 20.0}}))
    assert valued(capsys, "settings/ep16", "--profile", str(profile))["step"]["seconds"] > 1.2 * before
    assert "measured here" in printed(capsys, "settings/ep16", "--profile", str(profile), "--explain", "time")


def test_uneven_experts_need_more(capsys: pytest.CaptureFixture[str]) -> None:
    name = "models/qwen3_30b_h100"
    even, uneven = valued(capsys, name), valued(capsys, name, "--rank-imbalance", "2")
    assert uneven["step"]["seconds"] > even["step"]["seconds"]
    assert max(uneven["memory_bytes"]["needed"]) > max(even["memory_bytes"]["needed"])
    said = printed(capsys, "settings/ep16", "--rank-imbalance", "2")
    assert "the busiest expert rank at 2.00 times the mean, as told" in said


def test_a_maxvio_is_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    values = valued(capsys, "first_moe", "--maxvio", "7")
    assert values["busiest_rank_over_mean"] == {"most": 8.0, "least": 1.0}
    assert values["step"]["least_seconds"] < values["step"]["seconds"]
    assert "at the best placement, where the busiest rank is at 1.00" in printed(capsys, "first_moe", "--maxvio", "7")


def counted(folder: Path, per_rank: list[list[int]]) -> Path:
    """A run's counts as Megatron writes them: one step, one layer, each rank its own experts."""
    folder.mkdir()
    for rank, tokens in enumerate(per_rank):
        line = {"iter": 10, "block": "decoder", "layer": 0, "tpe": [tokens]}
        (folder / f"rank{rank}.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def test_counts_of_a_run_say_which_rank_is_busiest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = counted(tmp_path / "tokens_per_expert", [[300] * 8, *([[100] * 8] * 7)])
    values = valued(capsys, "first_moe", "--counts", str(counts))
    assert values["busiest_rank_over_mean"]["most"] == pytest.approx(300 / 125)
    assert values["step"]["seconds"] > valued(capsys, "first_moe")["step"]["seconds"]
    spread = valued(capsys, "settings/ep16", "--counts", str(tmp_path))
    assert spread["busiest_rank_over_mean"]["most"] == pytest.approx(300 / 125)


def test_counts_of_another_recipe_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = counted(tmp_path / "tokens_per_expert", [[100] * 48, [100] * 48])
    with pytest.raises(MoekitError, match="the counts are those of another recipe"):
        printed(capsys, "first_moe", "--counts", str(counts))


def test_charts_are_told_apart_and_add_up() -> None:
    chart = Chart(
        "memory", "GiB", ["weights", "other"], {"stage 0": [10.0, 30.0], "stage 1": [20.0, 0.0]}, 80.0, "h100"
    )
    drawn = lines(chart, 94)
    bar = drawn[2]
    assert bar.count(SHADES[1]) == 3 * bar.count(SHADES[0]) == 27
    assert bar.endswith("40.0")
    assert drawn[-1].strip() == "└ 80.0 h100"
    picture = ElementTree.fromstring(svg(chart, chart))
    wide = [
        float(one.get("width", 0)) for one in picture.iter() if one.tag.endswith("rect") and one.get("height") == "18"
    ]
    assert wide[1] == pytest.approx(3 * wide[0], abs=0.2)
    assert len(wide) == 8


def test_pictures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plan.svg", "plan.html"):
        printed(capsys, "models/deepseek_v3_h100", "--profile", "h100-ib", "--report", str(tmp_path / name))
    picture = ElementTree.parse(tmp_path / "plan.svg").getroot()
    text = "".join(picture.itertext())
    assert "memory of each GPU, modelled, GiB" in text
    assert "stage 7" in text
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 1
    assert "TFLOP/s" in page
    with pytest.raises(MoekitError, match=r"is no \.html or \.svg"):
        printed(capsys, "first_moe", "--report", str(tmp_path / "plan.png"))
    with pytest.raises(MoekitError, match="cannot write"):
        printed(capsys, "first_moe", "--report", str(tmp_path / "no/plan.svg"))


@pytest.mark.parametrize(
    ("what", "sought"), [("memory", "second moments"), ("time", "grouped gemm"), ("traffic", "saved")]
)
def test_terms_are_explained(what: str, sought: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "models/deepseek_v3_h100", "--profile", "h100-ib", "--explain", what)
    assert sought in said
    assert max(len(line) for line in said.splitlines()) <= 160


def test_a_layout_on_other_gpus_and_another_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    values = valued(capsys, "first_moe", "--gpus", "16", "--micro-batch", "4")
    assert values["layout"]["world"] == 16
    assert values["step"]["tokens_per_s_per_gpu"] * 16 * values["step"]["seconds"] == pytest.approx(512 * 4096)


REFUSED = [
    ({"moe": {"num_experts": 60}}, [], "`moe.num_experts` = 60 cannot be divided by `parallel.expert_model` = 8"),
    ({"router": {"topk": 65}}, [], "`router.topk` = 65 is more than `moe.num_experts` = 64"),
    ({"parallel": {"pipeline_model": 3}}, [], "cannot be divided by"),
    ({}, ["--gpus", "1000"], "train.global_batch_size = 512 is no multiple of 8000"),
    ({}, ["--rank-imbalance", "2", "--maxvio", "1"], "`--rank-imbalance` and `--maxvio` both say"),
    ({}, ["--counts", "nowhere/at/all"], "nowhere/at/all"),
    ({}, ["--profile", "nowhere"], "there is no cluster profile `nowhere`"),
]


@pytest.mark.parametrize(("fields", "words", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_what_cannot_be_is_refused(
    fields: dict[str, Any], words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MoekitError) as refused:
        printed(capsys, changed(tmp_path, "first_moe", **fields), *words)
    assert said in str(refused.value)
    assert len(refused.value.problems) == 1


def test_what_check_refuses_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = changed(tmp_path, "first_moe", overlap={"delay_wgrad_compute": True})
    wanted = "`moekit check` refuses this recipe on aws-p5: `overlap.delay_wgrad_compute` needs"
    assert wanted in printed(capsys, recipe)
    assert "refuses" not in printed(capsys, "first_moe")


def test_a_load_of_experts_that_are_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MoekitError, match="`--maxvio` is about experts, and the model has none"):
        printed(capsys, "dense", "--maxvio", "1")
