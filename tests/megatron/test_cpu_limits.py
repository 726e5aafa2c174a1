"""What a CPU cannot do is known by the options that ask for it."""

from __future__ import annotations

import pytest

from moekit.megatron.cpu_limits import _LIMITS, cpu_limits
from moekit.megatron.table import check, load, parse_values

TABLE = load("0.19.2")

ON_A_CPU = """--transformer-impl local --no-rope-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --no-persist-layer-norm --position-embedding-type rope"""

ASKED_FOR = {
    "sequence parallel": ["--tensor-model-parallel-size 2 --sequence-parallel"],
    "context parallel": ["--context-parallel-size 2"],
    "multi-latent attention": ["--multi-latent-attention"],
    "latent MoE": ["--moe-latent-size 512"],
    "flex dispatcher": ["--moe-token-dispatcher-type flex", "--moe-enable-deepep"],
    "layernorm-1p": ["--apply-layernorm-1p"],
    "experimental attention": ["--experimental-attention-variant gated_delta_net"],
    "Mamba or latent attention in a hybrid stack": [
        "--hybrid-layer-pattern ME*E",
        "--hybrid-override-pattern *E/*E",
    ],
    "CUDA graphs": ["--cuda-graph-impl local", "--enable-cuda-graph", "--external-cuda-graph"],
    "MoE with tensor parallel": ["--num-experts 8 --tensor-model-parallel-size 2"],
    "FP8": ["--fp8-format hybrid"],
    "FP4": ["--fp4-format e2m1"],
    "Transformer Engine's operation fuser": ["--use-transformer-engine-op-fuser"],
    "attention logit limits": ["--qk-clip", "--log-max-attention-logit"],
    "activation offloading": [
        "--fine-grained-activation-offloading",
        "--cpu-offloading-num-layers 4",
        "--moe-paged-stash",
    ],
    "activation dumps": ["--save-activations-interval 2", "--save-dgrads-interval 2"],
    "delayed weight gradients": ["--delay-wgrad-compute"],
    "fully sharded data parallel": ["--use-megatron-fsdp", "--use-torch-fsdp2"],
    "MoE permute and router fusion": ["--moe-permute-fusion", "--moe-router-fusion"],
}
LEFT_ON = {
    "Transformer Engine's layers": "--transformer-impl local",
    "rotary embedding fusion": "--no-rope-fusion",
    "masked softmax fusion": "--no-masked-softmax-fusion",
    "gradient accumulation fusion": "--no-gradient-accumulation-fusion",
    "persistent layer norm": "--no-persist-layer-norm",
}


def features(argv: list[str]) -> list[str]:
    assert check(argv, TABLE) == []
    return [limit.feature for limit in cpu_limits(parse_values(argv, TABLE))]


def test_what_runs_on_a_cpu_meets_no_limit() -> None:
    moe = (
        "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16"
    )
    switched_off = "--tensor-model-parallel-size 1 --sequence-parallel --context-parallel-size 1 --cuda-graph-impl none"
    assert features([*ON_A_CPU.split(), *moe.split(), *switched_off.split()]) == []
    assert features([*ON_A_CPU.split(), *moe.split(), "--hybrid-layer-pattern", "*E*-"]) == []


@pytest.mark.parametrize("feature", ASKED_FOR)
def test_each_feature_a_cpu_lacks_is_found(feature: str) -> None:
    for options in ASKED_FOR[feature]:
        assert features([*ON_A_CPU.split(), *options.split()]) == [feature]


@pytest.mark.parametrize("feature", LEFT_ON)
def test_what_megatron_does_unless_told_not_to_is_found(feature: str) -> None:
    assert features(" ".join(ON_A_CPU.split()).replace(LEFT_ON[feature], "").split()) == [feature]


BIASED = "grouped experts with a bias"


def test_grouped_experts_with_a_bias_are_another_kernel_with_transformer_engine_only() -> None:
    experts = ["--num-experts", "8", "--moe-grouped-gemm"]
    assert features([*ON_A_CPU.split(), *experts]) == []
    with_engine = ON_A_CPU.replace("--transformer-impl local", "").split()
    assert features([*with_engine, *experts]) == [BIASED, "Transformer Engine's layers"]
    assert features([*with_engine, *experts, "--disable-bias-linear"]) == ["Transformer Engine's layers"]


def test_every_limit_is_tested() -> None:
    assert {limit.feature for limit, _ in _LIMITS} == ASKED_FOR.keys() | LEFT_ON.keys() | {BIASED}
