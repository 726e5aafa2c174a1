"""Each layout of a published model passes every check on the machine it is made for, and is what its summary says."""

from __future__ import annotations

import re

import pytest

from moekit import share
from moekit.cluster.profile import find_cluster, shipped_clusters
from moekit.launch.script import environment
from moekit.recipe.check import problems_of
from moekit.recipe.load import load

NAMES = [name for name in share.shipped_recipes() if name.startswith("models/")]

WARNED = {
    "models/deepseek_v3_gb200": {"balance.enable_expert_bias", "balance.bias_update_rate"},
    "models/deepseek_v3_gb300": {"balance.enable_expert_bias", "balance.bias_update_rate"},
    "models/deepseek_v3_h100": {"balance.enable_expert_bias", "balance.bias_update_rate"},
    "models/deepseek_moe_16b": {"router.pre_softmax"},
    "models/qwen2_57b": {"router.pre_softmax"},
    "models/deepseek_v2_lite": {"router.pre_softmax"},
    "models/ling_flash": {"balance.enable_expert_bias", "balance.bias_update_rate"},
    "models/ling_mini": {"balance.enable_expert_bias", "balance.bias_update_rate", "router.num_groups"},
    "models/glm_4_5_air": {"balance.enable_expert_bias"},
    "models/moonlight": {"balance.enable_expert_bias"},
    "models/olmoe": {"router.pre_softmax"},
}
"""What is unwise in general, or at 0.19.2, and is how the model was made."""


@pytest.mark.parametrize("name", NAMES)
def test_it_passes_the_checks(name: str) -> None:
    loaded, cluster = load(name), find_cluster(share.made_for(name))
    found = problems_of(loaded, cluster)
    assert [problem for problem in found if problem.level == "error"] == []
    warned = {loaded.source.where(field) for field in WARNED.get(name, ())}
    assert {problem.where for problem in found} == warned


@pytest.mark.parametrize("name", NAMES)
def test_it_says_which_machine_it_is_made_for(name: str) -> None:
    assert share.made_for(name) in shipped_clusters()


@pytest.mark.parametrize("name", NAMES)
def test_its_summary_is_true(name: str) -> None:
    recipe, cluster = load(name).recipe, find_cluster(share.made_for(name))
    summary = recipe.summary or ""
    assert f"on {recipe.parallel.gpus} {cluster.gpu.upper()}" in summary
    said = re.search(r"in (bf16|MXFP8|blockwise FP8|FP8)", summary)
    formats = {None: "bf16", "mxfp8": "MXFP8", "blockwise": "blockwise FP8", "tensorwise": "FP8"}
    assert (said[1] if said else "bf16") == formats[recipe.precision.fp8_recipe]


@pytest.mark.parametrize("name", NAMES)
def test_its_source_is_named(name: str) -> None:
    """A figure and where it was published, or that there is none."""
    opening = (share.folder("recipes") / f"{name}.yaml").read_text().partition("\nbase:")[0]
    assert re.search(r"\n# (Published|Measured|The layout)", opening)
    assert re.search(r"Megatron-Bridge|Megatron-LM's examples|arXiv \d{4}\.\d{5}|ModelZoo", opening)


ROWS = {
    "deepseek_v2_lite": 102_400,
    "deepseek_moe_16b": 102_400,
    "deepseek_v3": 129_280,
    "ling": 157_184,
    "llama": 128_256,
    "qwen2_57b": 151_936,
    "qwen3": 151_936,
    "mixtral_8x7b": 32_000,
    "mixtral_8x22b": 32_768,
    "olmoe": 50_304,
    "gpt_oss": 201_088,
    "moonlight": 163_840,
    "glm_4_5_air": 151_552,
}
"""Rows of the released embeddings."""


@pytest.mark.parametrize("name", NAMES)
def test_the_vocabulary_is_padded_to_the_released_one(name: str) -> None:
    """Whatever the layout's tensor-parallel size: `--make-vocab-size-divisible-by` times that divides it."""
    recipe = load(name).recipe
    (rows,) = [rows for begin, rows in ROWS.items() if name.startswith(f"models/{begin}")]
    assert rows % ((recipe.model.make_vocab_size_divisible_by or 128) * (recipe.parallel.tensor_model or 1)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_hybridep_knows_its_nvlink_domain(name: str) -> None:
    """All ranks of an expert group lie in one domain of 72 GPUs."""
    recipe, cluster = load(name).recipe, find_cluster(share.made_for(name))
    variables = environment(recipe, cluster)
    ranks = variables.get("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN")
    if recipe.moe.flex_dispatcher_backend == "hybridep":
        assert ranks == str(recipe.parallel.expert_model)
        assert recipe.parallel.expert_model is not None
        assert recipe.parallel.expert_model <= int(variables["NVLINK_DOMAIN_SIZE"] or 0)
    else:
        assert ranks is None
