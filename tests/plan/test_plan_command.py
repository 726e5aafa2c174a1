"""`moekit plan`: what it prints, what it marks, what it refuses; and the tables beside it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from plan_recipes import of_row, public_models

from moekit import share
from moekit.cli import app
from moekit.plan.flops import conventions, per_token
from moekit.plan.parameters import parameters
from moekit.plan.plan import plan_of
from moekit.plan.resolve import resolve
from moekit.plan.serving import least_activated_share
from moekit.plan.upcycling import choices, dense_twin
from moekit.problems import MoekitError
from moekit.recipe.load import load


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    app(["plan", *words], standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", share.shipped_recipes())
def test_every_shipped_recipe_has_a_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, name)
    on_cpu = load(name).recipe.runtime.device == "cpu"
    assert ("memory and time are modelled on GPUs" in said) is on_cpu
    assert ("memory of each GPU, modelled, GiB" in said) is not on_cpu
    assert (" TFLOP/s  " in said) is not on_cpu
    assert max(len(line) for line in said.splitlines()) <= 160
    plan = plan_of(load(name))
    assert sum(plan.parameters.by_module.values()) == plan.parameters.total
    assert f"{plan.parameters.total:,}" in said


def test_a_plan_takes_no_second(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.process_time()
    printed(capsys, "models/deepseek_v3_h100")
    assert time.process_time() - begin < 1


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(printed(capsys, "first_moe", "--json"))
    assert values["parameters"]["total"] == 6_858_278_912
    assert values["parameters"]["active"] == 1_221_134_336
    assert values["certainty"]["total"] == "exact"
    assert values["per_gpu"][0]["total"] == 6_858_278_912 - 7 * values["per_gpu"][0]["experts"]
    assert values["parameters_of_a_layer"]["*E"]["experts"] == 64 * 6_291_456
    assert values["tokens_per_step"] == 2_097_152
    assert values["flops_per_step"] == pytest.approx(8.119e9 * 2_097_152, rel=1e-3)
    assert values["flops_per_token"] == sum(values["flops_per_token_by_term"].values())
    assert "kv_channels" in [note["name"] for note in values["not_said"]]


def test_what_rests_on_an_assumption_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assumed = printed(capsys, "models/qwen3_30b_h100").splitlines()
    (total,) = [line for line in assumed if line.startswith("  total")]
    (rest,) = [line for line in assumed if line.startswith("  active less embedding and output")]
    assert total.endswith("30,532,122,624  assumed")
    assert rest.endswith("2,730,702,848  exact")
    assert any(line.startswith("  assumed  vocab_size = 151,936") for line in assumed)
    told = printed(capsys, "models/qwen3_30b_h100", "--vocab-size", "151936")
    assert "assumed" not in told.partition("memory of each GPU")[0]
    assert "30,532,122,624  exact" in told


def test_explained_parameters_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "settings/layout_dense_first", "--explain", "parameters").splitlines()
    numbers = [int(line.partition(", the output")[0].split()[-1].replace(",", "")) for line in said[1:-1]]
    (total,) = [int(line.split()[-1].replace(",", "")) for line in said if " total " in line]
    assert sum(numbers) == total == parameters(resolve(load("settings/layout_dense_first"))).total


def test_explained_operations_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "first_moe", "--explain", "flops").splitlines()
    millions = [float(line.split()[-2].replace(",", "")) for line in said[1:]]
    assert sum(millions[:-1]) == pytest.approx(millions[-1], abs=0.05)
    assert millions[-1] == pytest.approx(8_119, abs=5)


GIGA = [
    ("Qwen3-30B-A3B", {}, 4096, "megatron", 23.01),
    ("DeepSeek-V3", {"mtp_num_layers": None}, 4096, "megatron", 249.81),
    ("DeepSeek-V3", {}, 4096, "megatron", 259.99),
    ("DeepSeek-V3", {}, 4096, "without_prediction", 249.81),
    ("Llama-3-8B", {}, 8192, "megatron", 51.47),
    ("Llama-3-70B", {}, 8192, "megatron", 449.2),
    ("Llama-3.1-405B", {}, 8192, "megatron", 2524.0),
    ("gpt-oss-120b", {"window_size": "128,0", "window_attn_skip_freq": 2}, 4096, "megatron", 27.2),
    ("gpt-oss-120b", {"window_size": "128,0", "window_attn_skip_freq": 2}, 4096, "every_gate", 34.3),
    ("gpt-oss-120b", {"window_size": "128,0", "window_attn_skip_freq": 2}, 4096, "every_gate_windowed", 32.6),
]
"""Billions of operations a token, as published figures of TFLOP/s and tokens/s imply them."""


@pytest.mark.parametrize(("name", "model", "seq_length", "convention", "giga"), GIGA)
def test_operations_are_those_published(
    name: str, model: dict[str, Any], seq_length: int, convention: str, giga: float, tmp_path: Path
) -> None:
    row = public_models()[name]
    row["model"] |= model
    found = {one.name: one.per_token for one in conventions(resolve(of_row(tmp_path, row)), seq_length)}
    assert found[convention] / 1e9 == pytest.approx(giga, rel=2e-3)


@pytest.mark.parametrize(("name", "giga"), [("dense", 8.12), ("first_moe", 8.12), ("models/qwen3_235b_h100", 148.03)])
def test_operations_of_recipes(name: str, giga: float) -> None:
    assert per_token(resolve(load(name)), 4096) / 1e9 == pytest.approx(giga, rel=2e-3)


@pytest.mark.parametrize(("llama", "seq_length", "more"), [("Llama-3-8B", 8192, 0.125), ("Llama-3-70B", 8192, 0.071)])
def test_attention_to_all_tokens_is_more(llama: str, seq_length: int, more: float, tmp_path: Path) -> None:
    """By how much Megatron-LM's examples/llama are above its own log's count."""
    found = conventions(resolve(of_row(tmp_path, public_models()[llama])), seq_length)
    by_name = {one.name: one.per_token for one in found}
    assert by_name["full_attention"] / by_name["megatron"] - 1 == pytest.approx(more, abs=1e-3)


def test_the_sparsest_moe_a_pool_serves() -> None:
    """Handbook 4: 0.058 at DeepSeek-V3's width and depth on H800; its own experts are sparser."""
    assert least_activated_share(7168, 61) == pytest.approx(0.058, abs=5e-4)
    experts = resolve(load("models/deepseek_v3_h100")).experts
    assert experts is not None
    assert experts.activated_share == 9 / 256
    assert least_activated_share(7168, 61) > experts.activated_share


def test_the_least_share_grows_with_width_and_depth() -> None:
    assert least_activated_share(2 * 7168, 61) == pytest.approx(2 * least_activated_share(7168, 61))
    assert least_activated_share(7168, 2 * 61) == pytest.approx(2 * least_activated_share(7168, 61))


def test_upcycling_gives_the_handbooks_moe() -> None:
    """Of the dense model: eight slices, eight copies of each, is first_moe."""
    (moe,) = [one for one in choices(resolve(load("dense"))) if (one.granularity, one.experts) == (8, 64)]
    assert (moe.total, moe.active, moe.topk, moe.expert_width) == (6_858_278_912, 1_221_134_336, 8, 1024)
    assert all(one.experts % one.granularity == 0 for one in choices(resolve(load("dense"))))


def test_an_moes_dense_twin() -> None:
    assert parameters(dense_twin(resolve(load("first_moe")))).total == 1_219_037_184
    assert parameters(dense_twin(resolve(load("upcycle")), 8)).total == 1_219_037_184


def test_the_table_of_upcycling(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "upcycle", "--upcycle")
    assert said.startswith("experts from a dense model of 1,219,037,184 parameters, feed-forward width 8,192\n")
    assert "          8       64      8  1,024   6,858,278,912     5.63  1,221,134,336       8.12      0.125" in said
    listed = json.loads(printed(capsys, "dense", "--upcycle", "--json"))
    assert len(listed) == 20


@pytest.mark.parametrize("words", [("--upcycle", "--explain", "flops"), ("--search", "--explain", "time")])
def test_two_tables_at_once_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(MoekitError, match="are different tables"):
        app(["plan", "dense", *words], standalone_mode=False)
