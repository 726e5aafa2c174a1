"""The recipes of published models, made small enough for two processes on a CPU, take steps with the real trainer.

What a CPU has none of is unset by name: Transformer Engine's attention, number formats, kernels and recomputation, and
all ranks but the experts'. What is left is the model's own: its router, balance, activation, biases, window, shared
experts, prediction depth, capacity; its schedule and data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import Launch

from moekit import share
from moekit.launch.rundir import run_arguments
from moekit.megatron.flags import argv
from moekit.recipe.load import load
from moekit.watch.metrics import history

TRAINED = (
    *("deepseek_v3_h100", "glm_4_5_air", "gpt_oss_20b", "mixtral_8x22b_folded", "mixtral_8x7b", "moonlight", "olmoe"),
    *("qwen3_235b_128k", "qwen3_30b_h100"),
)
"""Made small, every other layout has the same arguments as one of these."""

SMALL: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 3,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 64,
        "transformer_impl": "local",
        "no_rope_fusion": True,
        "no_masked_softmax_fusion": True,
        "no_persist_layer_norm": True,
        "no_gradient_accumulation_fusion": True,
    },
    "moe": {"num_experts": 8, "ffn_hidden_size": 32, "dispatcher": "alltoall"},
    "router": {"topk": 2},
    "parallel": {
        "gpus": 2,
        "expert_model": 2,
        "expert_tensor": 1,
        "tensor_model": 1,
        "pipeline_model": 1,
        "context": 1,
        "distributed_backend": "gloo",
    },
    "train": {"micro_batch_size": 2, "global_batch_size": 8, "exit_interval": 3},
    "data": {"name": "python-docs", "tokenizer": "python-docs"},
    "runtime": {"device": "cpu"},
}
SMALLER = {
    "model.num_query_groups": 2,
    "model.kv_channels": 16,
    "model.window_size": "15,0",
    "model.make_vocab_size_divisible_by": 128,
    "moe.layer_freq": "([0]*1+[1]*2)",
    "moe.shared_expert_intermediate_size": 64,
    "router.num_groups": 4,
    "router.group_topk": 2,
}
"""Where a model has these at all."""
UNSET = (
    *("model.multi_latent_attention", "model.q_lora_rank", "model.kv_lora_rank", "model.qk_head_dim"),
    *("model.qk_pos_emb_head_dim", "model.v_head_dim", "model.rope_type", "model.mscale", "model.mscale_all_dim"),
    *("moe.permute_fusion", "moe.flex_dispatcher_backend", "moe.hybridep_num_sms"),
    *("router.fusion", "router.padding_for_quantization"),
    *("parallel.sequence", "parallel.pipeline_model_layout", "parallel.num_virtual_stages_per_pipeline_rank"),
    *("parallel.account_for_embedding_in_pipeline_split", "parallel.account_for_loss_in_pipeline_split"),
    *("parallel.decoder_first_pipeline_num_layers", "parallel.decoder_last_pipeline_num_layers"),
    *("precision.fp8_format", "precision.fp8_recipe", "precision.fp8_param_gather"),
    "precision.reuse_grad_buf_for_mxfp8_param_ag",
    *("optimizer.use_precision_aware_optimizer", "optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype"),
    *("overlap.moe_expert_parallel_comm", "overlap.delay_wgrad_compute", "runtime.environment"),
)


LOSS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""What Megatron calls each balance's loss."""


def shrunk(name: str) -> str:
    """A recipe that has a shipped one for its base."""
    recipe = load(name).recipe
    text: dict[str, Any] = {"base": name, **{section: dict(fields) for section, fields in SMALL.items()}}
    changes: dict[str, Any] = {**SMALLER, **dict.fromkeys(UNSET)}
    if recipe.model.swiglu:
        text["model"]["no_bias_swiglu_fusion"] = True
    if recipe.model.multi_latent_attention:
        changes["model.rotary_scaling_factor"] = None
    if recipe.memory.recompute_granularity == "selective":
        changes |= {"memory.recompute_granularity": None, "memory.recompute_modules": None}
    for field, value in changes.items():
        section, _, key = field.partition(".")
        if getattr(getattr(recipe, section), key) is not None:
            text.setdefault(section, {})[key] = value
    return yaml.safe_dump(text, sort_keys=False)


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """What the trainer gets of a recipe made small."""

    def words(name: str) -> tuple[str, ...]:
        file = tmp_path / "small.yaml"
        file.write_text(shrunk(name))
        return tuple(argv(run_arguments(load(str(file)).recipe, "small", "/shared", resume=False)))

    return words


def test_what_trains_stands_for_all(arguments: Callable[[str], tuple[str, ...]]) -> None:
    trained = {arguments(f"models/{name}") for name in TRAINED}
    assert len(trained) == len(TRAINED)
    names = [name for name in share.shipped_recipes() if name.startswith("models/")]
    assert [name for name in names if arguments(name) not in trained] == []


@pytest.mark.megatron
@pytest.mark.train
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", TRAINED)
def test_the_model_trains(name: str, launch: Launch) -> None:
    recipe = load(f"models/{name}").recipe
    launched = launch(f"small_{name}", shrunk(f"models/{name}"))
    assert launched.wait() == 0, launched.text
    steps = history(launched.run.path)
    assert sorted(steps) == [1, 2, 3]
    assert recipe.schedule.lr
    for step, said in steps.items():
        assert abs(said["lm loss"] - math.log(4096)) < 0.5  # as of a model that has hardly begun
        assert said["learning-rate"] == pytest.approx(recipe.schedule.lr * step / 100)
        assert said[LOSS[(recipe.balance.type or ("",))[0]]] > 0
        assert ("mtp_1 loss" in said) == (recipe.model.mtp_num_layers is not None)
        assert ("z_loss" in said) == (recipe.router.z_loss_coeff is not None)
