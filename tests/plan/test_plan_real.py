"""Counts are the real Megatron's: each rank's parameters on the meta device, and a step's operations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plan_recipes import of_row, public_models, written

from moekit.megatron.flags import arguments, argv
from moekit.plan.plan import plan_of
from moekit.recipe.load import Loaded, load

pytestmark = pytest.mark.megatron

BASE: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "swiglu": True,
              "max_position_embeddings": 32, "position_embedding_type": "rope", "normalization": "RMSNorm",
              "disable_bias_linear": True, "untie_embeddings_and_output_weights": True},
    "train": {"micro_batch_size": 1, "global_batch_size": 8, "iters": 1},
    "data": {"tokenizer_type": "NullTokenizer", "vocab_size": 1000, "mock_data": True},
    "parallel": {"gpus": 8},
}  # fmt: skip
MOE: dict[str, dict[str, Any]] = {
    "moe": {"num_experts": 8, "ffn_hidden_size": 96, "dispatcher": "alltoall"}, "router": {"topk": 2}
}  # fmt: skip


def differing(*changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    fields = {name: dict(section) for name, section in BASE.items()}
    for change in changes:
        for name, section in change.items():
            fields.setdefault(name, {}).update(section)
    return fields


BUILT = {
    "dense, Megatron's defaults": differing({"model": {
        "swiglu": None, "normalization": None, "disable_bias_linear": None, "position_embedding_type": None,
        "untie_embeddings_and_output_weights": None}}),
    "swiglu's own width": differing({"model": {"hidden_size": 192}}),
    "grouped queries, their norms and biases": differing({"model": {
        "group_query_attention": True, "num_query_groups": 2, "kv_channels": 32, "qk_layernorm": True,
        "add_qkv_bias": True}}),
    "tensor 2": differing({"parallel": {"tensor_model": 2}, "model": {"disable_bias_linear": None}}),
    "tensor 2, sinks": differing({"parallel": {"tensor_model": 2}, "model": {"softmax_type": "learnable"}}),
    "pipeline 4, tied": differing({"parallel": {"pipeline_model": 4},
                                   "model": {"untie_embeddings_and_output_weights": None}}),
    "pipeline 2 of 2, interleaved": differing({"parallel": {
        "pipeline_model": 4, "num_layers_per_virtual_pipeline_stage": 1}}),
    "uneven stages": differing({"model": {"num_layers": 9}, "parallel": {
        "pipeline_model": 4, "decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 2}}),
    "embedding and loss are layers": differing({"model": {"num_layers": 6}, "parallel": {
        "pipeline_model": 4, "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True}}),
    "tensor 2, experts whole": differing(MOE, {"parallel": {
        "tensor_model": 2, "sequence": True, "expert_model": 4, "expert_tensor": 1}}),
    "tensor 2, experts cut as well": differing(MOE, {"parallel": {
        "tensor_model": 2, "sequence": True, "expert_model": 2, "expert_tensor": 2, "pipeline_model": 2}}),
    "experts on 4 ranks": differing(MOE, {"parallel": {"expert_model": 4}}),
    "dense first, gated shared expert": differing(MOE, {"parallel": {"expert_model": 4, "pipeline_model": 2}, "moe": {
        "layer_freq": "([0]*3+[1]*5)", "shared_expert_intermediate_size": 128, "shared_expert_gate": True}}),
    "alternating, biases": differing(MOE, {
        "moe": {"layer_freq": 2}, "model": {"disable_bias_linear": None, "quick_geglu": True, "swiglu": None,
                                            "no_bias_swiglu_fusion": True},
        "parallel": {"expert_model": 2}}),
    "experts as wide as a dense layer": differing(MOE, {"moe": {"ffn_hidden_size": None}}),
    "a prediction depth on the last of 4": differing(MOE, {
        "model": {"mtp_num_layers": 1}, "parallel": {"pipeline_model": 4, "expert_model": 2}}),
    "a prediction depth, tied": differing({"model": {
        "mtp_num_layers": 2, "untie_embeddings_and_output_weights": None}, "parallel": {"pipeline_model": 2}}),
    "a layout, the depth apart": differing(MOE, {
        "model": {"mtp_num_layers": 1},
        "parallel": {"pipeline_model": 4, "pipeline_model_layout": "Ett|ttt|tt|t|||m|L", "expert_model": 2}}),
    "hybrid, a segment each": differing(MOE, {
        "model": {"stack": "hybrid", "hybrid_layer_pattern": "*E*-|*E*-"},
        "parallel": {"pipeline_model": 2, "expert_model": 4}}),
}  # fmt: skip
"""What Megatron's local layers can build."""

COUNTED = {
    "latent attention": differing(MOE, {"model": {
        "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 48, "mtp_num_layers": 1}}),
    "latent attention, queries whole": differing(MOE, {"model": {"multi_latent_attention": True}}),
    "latent experts": differing(MOE, {"moe": {"latent_size": 32, "shared_expert_intermediate_size": 64}}),
    "Mamba": differing(MOE, {"model": {
        "stack": "hybrid", "hybrid_layer_pattern": "M*MEM-ME", "num_layers": 8,
        "group_query_attention": True, "num_query_groups": 2, "hidden_size": 128}}),
    "a hybrid prediction depth": differing(MOE, {"model": {
        "stack": "hybrid", "hybrid_layer_pattern": "*E*-/*E/*E"}}),
    "delta nets in a hybrid stack": differing(MOE, {
        "model": {"stack": "hybrid", "hybrid_layer_pattern": "G*G-GEGE"}}),
}  # fmt: skip
"""What only Transformer Engine's layers have: operations alone are asked for."""

SHIPPED = ["dense", "first_moe", "models/qwen3_30b_h100", "models/deepseek_v3_h100", "models/gpt_oss_20b",
           "models/glm_4_5_air", "settings/hybrid", "settings/mtp", "settings/experts_shared_gated"]  # fmt: skip


def words(loaded: Loaded, vocabulary: int) -> list[str]:
    said = argv(arguments(loaded.recipe))
    return said if "--vocab-size" in said else [*said, "--vocab-size", str(vocabulary)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("plan")
    plans, questions = {}, []
    asked = {
        name: (written(folder, fields, f"recipe_{index}"), True) for index, (name, fields) in enumerate(BUILT.items())
    }
    asked |= {
        name: (written(folder, fields, f"counted_{index}"), False)
        for index, (name, fields) in enumerate(COUNTED.items())
    }
    asked |= {name: (load(name), False) for name in SHIPPED}
    for name, (loaded, is_built) in asked.items():
        plans[name] = plan_of(loaded)
        layout = plans[name].layout
        ranks = [rank * (layout.world // layout.pipeline) for rank in range(layout.pipeline)] if is_built else []
        said = words(loaded, plans[name].shape.vocabulary)
        questions.append({"argv": said, "world": layout.world, "ranks": ranks})
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("real_ranks.py"))],
        input=json.dumps(questions), capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: (plans[name], answer) for name, answer in zip(asked, found, strict=True)}


@pytest.mark.parametrize("name", BUILT)
def test_each_rank_has_what_megatron_builds(name: str, answers: dict[str, tuple[Any, dict[str, Any]]]) -> None:
    plan, answer = answers[name]
    assert "refused" not in answer, answer["refused"]
    ours = [[gpu.total, gpu.experts] for gpu in plan.gpus]
    assert ours == list(answer["ranks"].values())
    if plan.layout.pipeline == plan.layout.tensor == 1:
        elsewhere = plan.gpus[0].experts * (plan.layout.expert * plan.layout.expert_tensor - 1)
        assert plan.parameters.total + plan.parameters.prediction == plan.gpus[0].total + elsewhere


@pytest.mark.parametrize("name", [*BUILT, *COUNTED, *SHIPPED])
def test_a_step_has_megatrons_operations(name: str, answers: dict[str, tuple[Any, dict[str, Any]]]) -> None:
    plan, answer = answers[name]
    assert "refused" not in answer, answer["refused"]
    assert plan.flops_per_token * plan.tokens_per_step == pytest.approx(answer["flops"], rel=1e-12)


def test_a_delta_nets_operations_are_megatrons(tmp_path: Path) -> None:
    """Of Qwen3-Next, whose depth Megatron counts as one more layer of the pattern."""
    row = public_models()["Qwen3-Next-80B-A3B"]
    row["model"] |= {"seq_length": 4096, "max_position_embeddings": 4096}
    row |= {"train": {"micro_batch_size": 1, "global_batch_size": 8, "iters": 1}, "parallel": {"gpus": 8}}
    loaded = of_row(tmp_path, row)
    question = {"argv": words(loaded, row["vocabulary"]), "world": 8, "ranks": []}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("real_ranks.py"))],
        input=json.dumps([question]), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    plan = plan_of(loaded)
    assert plan.flops_per_token is not None
    assert plan.flops_per_token * 8 * 4096 == pytest.approx(json.loads(done.stdout.splitlines()[-1])[0]["flops"])


def test_defaults_are_the_parsers() -> None:
    """Every default that the planner states is what Megatron's parser says."""
    script = (
        "import json, os\nos.environ.update(WORLD_SIZE='1', RANK='0')\n"
        "from moekit.megatron import stages\nfrom moekit.plan.given import DEFAULTS\nstages.load()\n"
        "import megatron.training.arguments as a\nfrom argparse import ArgumentParser\n"
        "parser = a.add_megatron_arguments(ArgumentParser(allow_abbrev=False))\n"
        "said = vars(parser.parse_known_args([])[0])\n"
        "print(json.dumps({name: [said.get(name, 'none'), value] for name, value in DEFAULTS.items()}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert [name for name, (theirs, ours) in json.loads(done.stdout.splitlines()[-1]).items() if theirs != ours] == []
