"""The real Megatron judges the handbook's first two models and what is wrong with their variants."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moekit.megatron.real import _until_it_ends, judge, judge_all
from moekit.megatron.stages import STAGES, Parameters, Question
from moekit.megatron.table import check, load
from moekit.megatron.verdict import Verdict
from moekit.problems import MoekitError

# Handbook 2.4: the dense model on one node of eight GPUs, with the decay length that WSD needs.
DENSE_OPTIONS = """
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --vocab-size 128256
    --num-attention-heads 32 --group-query-attention --num-query-groups 4
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 8 --global-batch-size 512
    --lr 5e-4 --min-lr 5e-5 --lr-decay-style WSD --lr-wsd-decay-iters 954 --lr-warmup-iters 100
    --train-iters 4768 --exit-interval 120
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
    --bf16 --split 100,0,0 --data-path data --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer
"""
# Handbook 2.5: its feed-forward layers replaced.
MOE_OPTIONS = """
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --num-experts 64 --moe-ffn-hidden-size 1024 --moe-router-topk 8
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --moe-router-dtype fp32 --moe-per-layer-logging
"""
DENSE = DENSE_OPTIONS.split()
MOE = [*DENSE, *MOE_OPTIONS.split()]


def edit(base: list[str], changes: str = "", without: str = "") -> list[str]:
    """`base` with options replaced or added, and others left out with their values."""
    options: dict[str, list[str]] = {}
    name = ""
    for word in [*base, *changes.split()]:
        if word.startswith("--"):
            name, options[word] = word, []
        else:
            options[name].append(word)
    return [word for name, values in options.items() if name not in without.split() for word in (name, *values)]


RECOMPUTE = "--recompute-granularity --recompute-method --recompute-num-layers"
CONFIG = "core/transformer/transformer_config.py"

REFUSED = {
    "misspelt": (
        edit(MOE, "--moe-router-topkk 8"),
        ("parse", "unrecognized arguments: --moe-router-topkk 8", ""),
    ),
    "bad choice": (
        edit(DENSE, "--lr-decay-style WSDD"),
        (
            "parse",
            "argument --lr-decay-style: invalid choice: 'WSDD' (choose from 'constant', 'linear', 'cosine', "
            "'inverse-square-root', 'WSD')",
            "",
        ),
    ),
    "EP does not divide the experts": (
        edit(MOE, "--num-experts 60"),
        ("validate", "Number of experts should be a multiple of expert model parallel_size.", "training/arguments.py"),
    ),
    "min-lr above lr": (
        edit(DENSE, "--min-lr 1e-2"),
        ("validate", "assert args.min_lr <= args.lr", "training/arguments.py"),
    ),
    "TP 2 without CUDA_DEVICE_MAX_CONNECTIONS": (
        edit(DENSE, "--tensor-model-parallel-size 2"),
        (
            "validate",
            "Using tensor model parallelism or context parallelism require setting the environment variable "
            "CUDA_DEVICE_MAX_CONNECTIONS to 1",
            "training/arguments.py",
        ),
    ),
    "softmax with expert bias": (
        edit(MOE, "--moe-router-enable-expert-bias"),
        ("config", "Expert bias for aux-loss-free routing only supports 'sigmoid'", CONFIG),
    ),
    "top-1 without pre-softmax": (
        edit(MOE, "--moe-router-topk 1"),
        ("config", "Please use --moe-router-pre-softmax when topk is 1.", CONFIG),
    ),
    "EP overlap with full recompute": (
        edit(MOE, "--overlap-moe-expert-parallel-comm"),
        ("config", "disable full recomputation when enabling overlap_moe_expert_parallel_comm", CONFIG),
    ),
    "delayed FP8 with recomputed activations": (
        edit(
            MOE,
            "--fp8-format hybrid --fp8-recipe delayed --recompute-granularity selective --recompute-modules moe_act",
            without="--recompute-method --recompute-num-layers",
        ),
        ("config", "Delayed scaling does not support moe_act and layernorm recompute for fp8.", CONFIG),
    ),
    "WSD without its decay length": (
        edit(DENSE, without="--lr-wsd-decay-iters"),
        ("schedule", "assert self.wsd_decay_steps is not None", "core/optimizer_param_scheduler.py"),
    ),
    "EP larger than the world": (
        edit(MOE, "--expert-model-parallel-size 16"),
        (
            "groups",
            "world_size (8) is not divisible by expert_tensor_model_pipeline_parallel size (16)",
            "core/parallel_state.py",
        ),
    ),
    "a layer pattern one short": (
        edit(MOE, "--moe-layer-freq ([0]*1+[1]*14)"),
        ("build", "Invalid length of moe_layer_pattern: 15, expected 16", "core/models/gpt/gpt_layer_specs.py"),
    ),
}

ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
NOT_JUDGED = {
    "sequence parallel": edit(DENSE, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "context parallel": edit(DENSE, "--context-parallel-size 2"),
    "latent MoE": edit(MOE, "--moe-latent-size 512"),
    "flex dispatcher": edit(MOE, "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"),
    "layernorm-1p": edit(DENSE, "--apply-layernorm-1p"),
    "vocabulary": edit(DENSE, without="--vocab-size"),
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Verdict]]:
    """Every case of this file, judged by one Megatron."""
    questions = {
        "dense": Question(DENSE, 8),
        "moe": Question(MOE, 8),
        "fp8": Question(edit(MOE, "--fp8-format e4m3 --fp8-recipe blockwise"), 8),
        "mtp": Question(edit(MOE, "--mtp-num-layers 1"), 8),
        "TP 2": Question(edit(DENSE, "--tensor-model-parallel-size 2"), 8, environment=ONE_CONNECTION),
        "old engine": Question(edit(DENSE, "--log-max-attention-logit"), 8, transformer_engine="2.8.0"),
        "no engine": Question(DENSE, 8, transformer_engine=None),
        "parse only": Question(edit(MOE, "--num-experts 60"), 8, stages=("parse",)),
    }
    questions |= {name: Question(argv, 8) for name, (argv, _) in REFUSED.items()}
    questions |= {name: Question(argv, 8, environment=ONE_CONNECTION) for name, argv in NOT_JUDGED.items()}
    return dict(zip(questions, judge_all(list(questions.values())), strict=True))


pytestmark = pytest.mark.megatron


def test_the_two_models_pass_every_stage_with_the_handbooks_counts(verdicts: dict[str, list[Verdict]]) -> None:
    for name, counts in {
        "dense": Parameters(1_219_037_184, 0, 1_219_037_184),
        "moe": Parameters(6_858_278_912, 6_442_450_944, 1_221_134_336),
    }.items():
        assert [(verdict.stage, verdict.answer) for verdict in verdicts[name]] == [(s, "passed") for s in STAGES]
        assert verdicts[name][-1].parameters == counts


def test_multi_token_prediction_adds_a_layer_and_its_projection(verdicts: dict[str, list[Verdict]]) -> None:
    last = verdicts["mtp"][-1]
    experts, projection, attention = 64 * 3 * 2048 * 1024, 2 * 2048 * 2048, (2 * 2048 + 2 * 256) * 2048
    router, norms = 64 * 2048, 5 * 2048
    assert last.answer == "passed"
    assert last.parameters == Parameters(
        6_858_278_912 + experts + projection + attention + router + norms,
        6_442_450_944 + experts,
        1_221_134_336 + experts // 8 + projection + attention + router + norms,
    )


@pytest.mark.parametrize("name", REFUSED)
def test_the_stage_that_refuses(name: str, verdicts: dict[str, list[Verdict]]) -> None:
    stage, message, file = REFUSED[name][1]
    *before, last = verdicts[name]
    assert [verdict.answer for verdict in before] == ["passed"] * STAGES.index(stage)
    assert (last.stage, last.answer, last.place.partition(":")[0]) == (stage, "refused", file)
    assert last.message.startswith(message)


@pytest.mark.parametrize("feature", NOT_JUDGED)
def test_what_a_cpu_cannot_build_is_not_judged(feature: str, verdicts: dict[str, list[Verdict]]) -> None:
    *before, last = verdicts[feature]
    assert {verdict.answer for verdict in before} == {"passed"}
    assert (last.stage, last.answer, last.feature) == ("build", "not_judged", feature)
    assert last.parameters is None


def test_what_is_counted_but_not_judged(verdicts: dict[str, list[Verdict]]) -> None:
    last = verdicts["fp8"][-1]
    assert (last.answer, last.feature, last.message) == (
        "not_judged",
        "FP8",
        "its kernels are Transformer Engine's",
    )
    assert last.parameters == verdicts["moe"][-1].parameters


def test_the_pretended_machine_decides(verdicts: dict[str, list[Verdict]]) -> None:
    assert [verdict.answer for verdict in verdicts["TP 2"]] == ["passed"] * len(STAGES)
    old, none = verdicts["old engine"][-1], verdicts["no engine"][-1]
    assert (old.stage, old.message) == (
        "validate",
        "--log-max-attention-logit is only supported with TE >= 2.9.0.",
    )
    assert (none.stage, none.message) == ("config", "apply_rope_fusion is not available. Please install TE >= 1.4.")


def test_only_the_stages_asked_for_run(verdicts: dict[str, list[Verdict]]) -> None:
    assert verdicts["parse only"] == [Verdict("parse", "passed")]


def test_a_stage_that_never_ends_is_not_judged() -> None:
    def work() -> Iterator[Verdict]:
        yield Verdict("parse", "passed")
        time.sleep(60)

    found = _until_it_ends(work, ["parse", "validate"], 0.5)
    assert [(fields["stage"], fields["answer"], fields["feature"]) for fields in found] == [
        ("parse", "passed", ""),
        ("validate", "not_judged", "time"),
    ]


def test_a_bare_assert_has_names(verdicts: dict[str, list[Verdict]]) -> None:
    names = {name: verdicts[name][-1].names for name in REFUSED}
    assert names["min-lr above lr"] == ("min_lr", "lr")
    assert names["WSD without its decay length"][0] == "wsd_decay_steps"
    assert names["softmax with expert bias"] == ("moe_router_enable_expert_bias", "moe_router_score_function")
    assert "expert_model_parallel_size" in names["EP larger than the world"]
    assert names["misspelt"] == ()


def test_answers_stream_and_are_counted() -> None:
    seen: list[int] = []
    questions = [Question(DENSE, 8, stages=("parse",)), Question(["--nothing"], 8, stages=("parse",))]
    assert [verdicts[0].answer for verdicts in judge_all(questions, progress=seen.append)] == ["passed", "refused"]
    assert seen == [1, 2]


def test_the_tables_check_agrees_about_the_parser() -> None:
    table = load("0.19.2")
    for argv, (stage, _, _) in REFUSED.values():
        assert bool(check(argv, table)) == (stage == "parse")


def test_a_megatron_that_does_not_import_is_refused(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").touch()
    with pytest.raises(MoekitError, match=r"the real Megatron does not import: .*No module named 'megatron"):
        judge(DENSE, 8, megatron=str(tmp_path))
