"""Parameters are those of released models, to the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plan_recipes import of_row, public_models, written

from moekit.plan.parameters import parameters
from moekit.plan.plan import plan_of
from moekit.plan.resolve import resolve
from moekit.problems import MoekitError
from moekit.recipe.load import load

MODELS = public_models()


@pytest.mark.parametrize("name", MODELS)
def test_a_public_model_has_as_many(name: str, tmp_path: Path) -> None:
    row = MODELS[name]
    counted = parameters(resolve(of_row(tmp_path, row)))
    biases = counted.router_biases
    assert counted.total + biases + row.get("other", 0) == row["elements"]
    assert counted.prediction + counted.prediction_router_biases == row.get("prediction", 0)
    if "active" in row:
        ours = (counted.active, counted.active_without_input, counted.active_without_embeddings)
        assert [count + biases for count in ours] == row["active"]


@pytest.mark.parametrize(("name", "total", "active"), [("first_moe", 6_858_278_912, 1_221_134_336),
                                                       ("dense", 1_219_037_184, 1_219_037_184)])  # fmt: skip
def test_the_handbooks_models(name: str, total: int, active: int) -> None:
    counted = parameters(resolve(load(name)))
    assert (counted.total, counted.active) == (total, active)
    assert sum(counted.by_module.values()) == total


SMALL: dict[str, Any] = {
    "model": {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
              "position_embedding_type": "rope"},
    "data": {"tokenizer_type": "NullTokenizer", "vocab_size": 100},
}  # fmt: skip


def small(folder: Path, **sections: dict[str, Any]) -> Any:
    fields = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {**SMALL, **sections}}
    return written(folder, fields)


def test_what_the_recipe_leaves_out_is_megatrons_and_listed(tmp_path: Path) -> None:
    shape = resolve(small(tmp_path))
    assert shape.dense is not None
    assert (shape.dense.width, shape.dense.matrices, shape.dense.bias, shape.norm_weights) == (256, 2, True, 2)
    assert (shape.rows, shape.vocabulary, shape.tied) == (128, 100, True)
    notes = {note.name: (note.value, note.certainty) for note in shape.notes}
    assert notes["ffn_hidden_size"] == ("256", "rule")
    assert notes["kv_channels"] == ("16", "rule")
    assert notes["padded_vocab_size"] == ("128", "rule")
    assert notes["normalization"] == ("LayerNorm", "default")
    assert "vocab_size" not in notes


def test_swiglus_width_is_two_thirds(tmp_path: Path) -> None:
    shape = resolve(small(tmp_path, model={"hidden_size": 768, "swiglu": True}))
    assert shape.dense is not None
    assert (shape.dense.width, shape.dense.matrices) == (2048, 3)


def test_rows_follow_tensor_parallelism(tmp_path: Path) -> None:
    assert resolve(small(tmp_path, parallel={"tensor_model": 4})).rows == 512


@pytest.mark.parametrize(("data", "size", "certainty"), [
    ({"tokenizer": "llama-3.2", "name": "fineweb-edu"}, 128_256, "rule"),
    ({"tokenizer": "python-docs", "name": "python-docs"}, 4_096, "rule"),
    ({"tokenizer": "qwen3", "name": "mine"}, 151_936, "assumed"),
    ({"tokenizer": "mine", "name": "mine"}, 128_256, "assumed"),
    ({}, 128_256, "assumed"),
])  # fmt: skip
def test_where_the_vocabulary_comes_from(data: dict[str, str], size: int, certainty: str, tmp_path: Path) -> None:
    fields = {"model": SMALL["model"], **({"data": data} if data else {})}
    found = plan_of(written(tmp_path, fields))
    assert found.shape.vocabulary == size
    assert found.vocabulary_is_assumed is (certainty == "assumed")
    told = plan_of(written(tmp_path, fields), 1_000)
    assert (told.shape.vocabulary, told.vocabulary_is_assumed) == (1_000, False)


LAYOUT = {"pipeline_model_layout": "Et|t*3|t*2|t*2mL", "pipeline_model": 2}


@pytest.mark.parametrize(("parallel", "model", "layers"), [
    ({"pipeline_model": 4}, {}, [["0-1"], ["2-3"], ["4-5"], ["6-7"]]),
    ({"pipeline_model": 2, "num_layers_per_virtual_pipeline_stage": 2}, {}, [["0-1", "4-5"], ["2-3", "6-7"]]),
    ({"pipeline_model": 2, "num_virtual_stages_per_pipeline_rank": 4}, {},
     [["0", "2", "4", "6"], ["1", "3", "5", "7"]]),
    ({"pipeline_model": 3, "decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 1}, {},
     [["0-1"], ["2-6"], ["7"]]),
    ({"pipeline_model": 5, "account_for_embedding_in_pipeline_split": True,
      "account_for_loss_in_pipeline_split": True}, {}, [["0"], ["1-2"], ["3-4"], ["5-6"], ["7"]]),
    (LAYOUT, {"mtp_num_layers": 1}, [["0", "4-5"], ["1-3", "6-7"]]),
])  # fmt: skip
def test_stages_hold_their_layers(
    parallel: dict[str, Any], model: dict[str, Any], layers: list[list[str]], tmp_path: Path
) -> None:
    stages = plan_of(small(tmp_path, parallel=parallel, model=model)).layout.stages
    assert [[held(stage) for stage in rank] for rank in stages] == layers


def held(stage: Any) -> str:
    last = stage.first_layer + len(stage.layers) - 1
    return f"{stage.first_layer}-{last}" if last > stage.first_layer else str(last)


def test_ranks_add_up_to_the_model() -> None:
    """Untied and without depths, nothing is held twice: stage by stage, each weight times those that share it."""
    found = plan_of(load("models/qwen3_235b_h100"))
    layout = found.layout
    assert (layout.tensor, layout.pipeline, layout.expert) == (2, 8, 32)
    experts = sum(gpu.experts for gpu in found.gpus) * layout.expert * layout.expert_tensor
    assert experts == found.parameters.experts
    twice = sum(gpu.dense for gpu in found.gpus) * layout.tensor
    alike = (
        found.parameters.by_module["router"] + found.parameters.by_module["norms"] + 94 * 2 * 128
    )  # of queries, keys
    assert twice - alike == found.parameters.total - found.parameters.experts


@pytest.mark.parametrize(("sections", "said"), [
    ({"model": {"hidden_size": None}}, "`model.hidden_size` is not set"),
    ({"model": {"num_attention_heads": 5}},
     "`model.hidden_size` = 64 cannot be divided by `model.num_attention_heads` = 5"),
    ({"parallel": {"pipeline_model": 3}}, "`model.num_layers` = 8 cannot be divided by `parallel.pipeline_model` = 3"),
    ({"moe": {"num_experts": 6}, "parallel": {"expert_model": 4}},
     "`moe.num_experts` = 6 cannot be divided by `parallel.expert_model` = 4"),
    ({"moe": {"num_experts": 4}, "router": {"topk": 8}}, "`router.topk` = 8 is more than `moe.num_experts` = 4"),
    ({"moe": {"num_experts": 4, "layer_freq": "[0,1]"}},
     "`moe.layer_freq` has 2 layers, and `model.num_layers` is 8"),
    ({"parallel": {"pipeline_model": 2, "pipeline_model_layout": "Et*3|t*4L"}},
     "`parallel.pipeline_model_layout` has 7 `t`, and `model.num_layers` is 8"),
    ({"parallel": {"gpus": 6, "tensor_model": 4}},
     "`parallel.gpus` = 6 cannot be divided by `tensor x context x pipeline` = 4"),
    ({"model": {"hybrid_layer_pattern": "D-D-D-D-", "multi_latent_attention": True}},
     "sparse attention (`D` in `model.hybrid_layer_pattern`) is not counted"),
    ({"model": {"position_embedding_type": None}}, "`model.max_position_embeddings` is not set"),
])  # fmt: skip
def test_sizes_that_make_no_model_are_refused(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(MoekitError) as refused:
        plan_of(small(tmp_path, **sections))
    (problem,) = refused.value.problems
    assert said in problem.what
    assert "asked.yaml" in problem.where


@pytest.mark.parametrize(("name", "twin", "vectors"), [
    ("settings/experts_latent_norm", "settings/experts_latent", 16 * 1024),
])  # fmt: skip
def test_what_only_the_handbooks_commit_has_is_assumed(name: str, twin: str, vectors: int) -> None:
    """A norm of the latent width in each of 16 layers."""
    found = plan_of(load(name))
    assert found.model_is_assumed
    assert not found.vocabulary_is_assumed
    assert found.parameters.total - plan_of(load(twin)).parameters.total == vectors


def test_latent_experts(tmp_path: Path) -> None:
    """Projections down and up, and experts of the latent width: against `moe_layer.py:264` by hand."""
    moe = {"num_experts": 4, "ffn_hidden_size": 96, "latent_size": 32}
    shape = {"hidden_size": 64, "swiglu": True, "disable_bias_linear": True}
    counted = parameters(resolve(small(tmp_path, moe=moe, model=shape)))
    assert counted.by_module["latent"] == 8 * 2 * 64 * 32
    assert counted.experts == 8 * 4 * 3 * 32 * 96


def test_repeated_depths_have_weights_once(tmp_path: Path) -> None:
    one = parameters(resolve(small(tmp_path, model={"mtp_num_layers": 1})))
    two = parameters(resolve(small(tmp_path, model={"mtp_num_layers": 2})))
    repeated = small(tmp_path, model={"mtp_num_layers": 2}, megatron={"extra": ["--mtp-use-repeated-layer"]})
    assert two.prediction == 2 * one.prediction
    assert parameters(resolve(repeated)).prediction == one.prediction
