"""The models have as many parameters as the released ones: by counting, and as the real Megatron builds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.launch.judges import questions
from moekit.megatron.real import judge_all
from moekit.megatron.stages import Parameters, Question
from moekit.megatron.verdict import Verdict
from moekit.plan.parameters import parameters
from moekit.plan.resolve import resolve
from moekit.recipe.load import Loaded, load


@dataclass(frozen=True)
class Released:
    """What is public of a model."""

    vocabulary: int
    """Rows of its embedding (config.json)."""
    parameters: int
    """Elements of its checkpoint's tensors, as the Hugging Face hub counts them."""
    source: str
    with_prediction: int | None = None
    """The same of a checkpoint with a prediction depth, which keeps embedding and output once more."""
    other: int = 0
    """Elements of the checkpoint that Megatron's model does not have, and `why`."""
    why: str = ""


RELEASED = {
    "mixtral_8x7b": Released(32_000, 46_702_792_704, "mistralai/Mixtral-8x7B-v0.1"),
    "mixtral_8x22b": Released(32_768, 140_630_071_296, "mistralai/Mixtral-8x22B-v0.1"),
    "qwen3_30b": Released(151_936, 30_532_122_624, "Qwen/Qwen3-30B-A3B"),
    "qwen3_235b": Released(151_936, 235_093_634_560, "Qwen/Qwen3-235B-A22B"),
    "olmoe": Released(
        50_304,
        6_919_161_856,
        "allenai/OLMoE-1B-7B-0924",
        other=16 * 2 * (2048 - 128),
        why="it normalizes queries and keys over all heads at once, Megatron over one",
    ),
    "gpt_oss_20b": Released(201_088, 20_914_757_184, "openai/gpt-oss-20b, in bf16"),
    "gpt_oss_120b": Released(201_088, 116_829_156_672, "openai/gpt-oss-120b, in bf16"),
    "deepseek_v3": Released(
        129_280,
        671_026_419_200,
        "microsoft/MAI-DS-R1, DeepSeek-R1 in bf16 without its depth; deepseek-ai/DeepSeek-R1 with it",
        with_prediction=684_489_845_504,
    ),
    "moonlight": Released(
        163_840,
        15_960_111_936,
        "moonshotai/Moonlight-16B-A3B",
        other=27 * 64,
        why="buffers of its attention and router, no parameters (inferred from the difference)",
    ),
    "deepseek_v2_lite": Released(102_400, 15_706_484_224, "deepseek-ai/DeepSeek-V2-Lite"),
    "deepseek_moe_16b": Released(102_400, 16_375_728_128, "deepseek-ai/deepseek-moe-16b-base"),
    "qwen2_57b": Released(151_936, 57_408_658_944, "no integer is public: our own count of Qwen/Qwen2-57B-A14B"),
    "qwen3_next": Released(151_936, 79_674_391_296, "Qwen/Qwen3-Coder-Next, the same without a depth"),
    "llama_3_2_1b": Released(128_256, 1_235_814_400, "meta-llama/Llama-3.2-1B"),
    "llama_3_8b": Released(128_256, 8_030_261_248, "meta-llama/Meta-Llama-3-8B"),
    "llama_3_70b": Released(128_256, 70_553_706_496, "meta-llama/Meta-Llama-3-70B"),
    "llama_3_1_405b": Released(128_256, 405_853_388_800, "meta-llama/Llama-3.1-405B"),
    "qwen3_8b": Released(151_936, 8_190_735_360, "Qwen/Qwen3-8B"),
    "ling_mini": Released(157_184, 16_255_643_392, "inclusionAI/Ling-mini-2.0"),
    "ling_flash": Released(157_184, 102_889_705_216, "inclusionAI/Ling-flash-2.0"),
    "glm_4_5_air": Released(
        151_552,
        106_852_251_264,
        "PrimeIntellect/INTELLECT-3, the same without a depth; zai-org/GLM-4.5-Air with it",
        with_prediction=110_468_824_832,
    ),
}
"""By shape. Moonlight and Qwen3-235B are quoted in many public repositories, the rest in model cards as well."""

SHAPES = share.folder("recipes") / "models" / "shapes"


@dataclass(frozen=True)
class Count:
    """Parameters of a whole model, as a checkpoint has them: with the router's biases, buffers in Megatron."""

    total: int
    """Prediction depths apart."""
    active: int
    biases: int
    prediction: int
    prediction_biases: int


def count(loaded: Loaded, vocabulary: int) -> Count:
    """What the planner counts, the router's biases among it."""
    of = parameters(resolve(loaded, vocabulary))
    biases, prediction = of.router_biases, of.prediction_router_biases
    return Count(of.total + biases, of.active + biases, biases, of.prediction + prediction, prediction)


def counted(shape: str) -> Count:
    return count(load(str(SHAPES / f"{shape}.yaml")), RELEASED[shape].vocabulary)


def test_every_shape_is_counted() -> None:
    shared = {"common", "dense", "qwen3"}
    assert {path.stem for path in SHAPES.glob("*.yaml")} - shared == set(RELEASED)


@pytest.mark.parametrize("shape", RELEASED)
def test_parameters_are_the_released_models(shape: str) -> None:
    released, ours = RELEASED[shape], counted(shape)
    assert ours.total + released.other == released.parameters
    if released.with_prediction:
        hidden = load(str(SHAPES / f"{shape}.yaml")).recipe.model.hidden_size or 0
        copies = 2 * released.vocabulary * hidden
        assert ours.total + ours.prediction + copies == released.with_prediction


@pytest.mark.parametrize("shape", RELEASED)
def test_a_shape_says_its_parameters(shape: str) -> None:
    ours = counted(shape)
    said = " ".join((SHAPES / f"{shape}.yaml").read_text().replace("\n#", " ").split())
    used = "" if shape in DENSE else f", of which a token uses {ours.active:,}"
    assert f": {ours.total:,} parameters{used}" in said
    assert (ours.active == ours.total) == (shape in DENSE)
    if ours.prediction:
        assert f"a prediction depth adds {ours.prediction:,}" in said


# As Megatron builds them: on one tensor- and pipeline-parallel rank, which holds it all but for other ranks' experts.

LATENT = ("deepseek_v2_lite", "deepseek_v3", "moonlight")
"""Those whose attention only Transformer Engine's layers have; with the common one, the rest of them is built."""
LATENT_FIELDS = (
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
)
DENSE = ("llama_3_2_1b", "llama_3_8b", "llama_3_70b", "llama_3_1_405b", "qwen3_8b")
DELTA = ("qwen3_next",)
"""Those of which no CPU builds the delta net and the norms; with attention in all layers, the rest of them is built."""
PREDICTION_FIELDS = ("mtp_num_layers", "mtp_loss_scaling_factor")


def built(shape: str, folder: Path, *, prediction: bool) -> tuple[Count, Question]:
    """What we count and what Megatron is asked, for a shape on 8 ranks, one eighth of its experts to each."""
    unset = (*(LATENT_FIELDS if shape in LATENT else ()), *(() if prediction else PREDICTION_FIELDS))
    unset += ("apply_layernorm_1p",) if shape in DELTA else ()
    path = folder / f"{shape}_{prediction}.yaml"
    path.write_text(
        f"base: models/shapes/{shape}\n"
        f"model: {{{', '.join(f'{name}: null' for name in unset)}}}\n"
        + ("megatron: {extra: null}\n" if shape in DELTA else "")
        + f"parallel: {{gpus: 8{'' if shape in DENSE else ', expert_model: 8'}}}\n"
        "train: {global_batch_size: 8}\n"
        f"data: {{tokenizer_type: NullTokenizer, tokenizer: null, vocab_size: {RELEASED[shape].vocabulary}}}\n"
    )
    loaded = load(str(path))
    return count(loaded, RELEASED[shape].vocabulary), questions(loaded, find_cluster())["first"]


WITH_DEPTH = [shape for shape in RELEASED if RELEASED[shape].with_prediction]
ASKED = [(shape, False) for shape in RELEASED] + [(shape, True) for shape in WITH_DEPTH]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], tuple[Count, list[Verdict]]]:
    folder = tmp_path_factory.mktemp("shapes")
    both = {one: built(one[0], folder, prediction=one[1]) for one in ASKED}
    answers = judge_all([question for _, question in both.values()])
    return {one: (ours, said) for (one, (ours, _)), said in zip(both.items(), answers, strict=True)}


@pytest.mark.megatron
@pytest.mark.parametrize(("shape", "prediction"), ASKED)
def test_megatron_builds_as_many(
    shape: str, prediction: bool, asked: dict[tuple[str, bool], tuple[Count, list[Verdict]]]
) -> None:
    ours, verdicts = asked[shape, prediction]
    assert verdicts[-1].stage == "build"
    assert verdicts[-1].answer != "refused", verdicts[-1]  # of biased experts the local layers prove the count alone
    theirs = verdicts[-1].parameters
    assert isinstance(theirs, Parameters)
    assert theirs.total == ours.total - ours.biases + ours.prediction - ours.prediction_biases
    if not prediction:
        assert theirs.active == ours.active - ours.biases
