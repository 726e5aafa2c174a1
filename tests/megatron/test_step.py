"""Two iterations of Megatron's own trainer: what it refuses only then, and what its losses tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_real import edit
from tiny_moe import TINY_MOE

from moekit.megatron.real import judge_all
from moekit.megatron.stages import STAGES, Question
from moekit.megatron.verdict import Verdict

pytestmark = pytest.mark.megatron

ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
PASSED = {
    "as it is": TINY_MOE,
    "once more": TINY_MOE,
    "another seed": edit(TINY_MOE, "--seed 7"),
    "groups that nothing reads": edit(TINY_MOE, without="--group-query-attention"),
    "no groups": edit(TINY_MOE, without="--group-query-attention --num-query-groups"),
    "recomputed": edit(TINY_MOE, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "no token comes back": edit(TINY_MOE, "--moe-router-load-balancing-type quantile_balancing"),
    "nor behind a shared expert": edit(
        TINY_MOE,
        "--moe-router-load-balancing-type quantile_balancing "
        "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap",
    ),
    "pipeline": edit(TINY_MOE, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4"),
    "fp16": edit(TINY_MOE, "--fp16", without="--bf16"),
    "dense": edit(
        TINY_MOE,
        without=" ".join(word for word in TINY_MOE if word.startswith(("--moe", "--num-experts", "--expert"))),
    ),
    "counts, traces and logs": edit(
        TINY_MOE,
        "--save-tokens-per-expert-interval 1 --moe-routing-trace-path x --moe-per-layer-logging --log-interval 1 "
        "--log-params-norm --tensorboard-dir x --wandb-project x",
    ),
}
REFUSED = {
    "topk above the experts": (
        edit(TINY_MOE, "--moe-router-topk 9"),
        ("selected index k out of range", "core/transformer/moe/moe_utils.py"),
        {"topk"},
    ),
    "query groups that do not divide the heads": (
        edit(TINY_MOE, "--num-query-groups 3"),
        ("shape '[64, 2, 3, 48]' is invalid for input of size 20480", "core/transformer/attention.py"),
        {"num_query_groups_per_partition"},
    ),
    "MoE and TP 2 without sequence parallel": (
        edit(TINY_MOE, f"{TENSOR_PARALLEL} --expert-model-parallel-size 4"),
        (
            "During training, performance may degrade if MoE and tensor parallelism",
            "core/transformer/moe/moe_layer.py",
        ),
        {"sequence_parallel"},
    ),
    "no evaluation interval": (
        edit(TINY_MOE, without="--eval-interval"),
        ("TypeError: unsupported operand type(s) for //: 'int' and 'NoneType'", "training/training.py"),
        {"train_iters", "eval_interval"},
    ),
    "gradients saved nowhere": (
        edit(TINY_MOE, "--save-wgrads-interval 1", without="--save --save-interval --load"),
        ("assert save_dir is not None", "training/checkpointing.py"),
        {"save_dir"},
    ),
}
NOT_JUDGED = {
    "multi-latent attention": edit(
        TINY_MOE, "--multi-latent-attention", without="--group-query-attention --num-query-groups"
    ),
    "FP8": edit(TINY_MOE, "--fp8-format hybrid"),
    "size": edit(TINY_MOE, "--hidden-size 2048"),
    "checkpoint": edit(TINY_MOE, "--moe-use-upcycling"),
    "a package": edit(TINY_MOE, "--optimizer muon"),
    "CUDA graphs": edit(TINY_MOE, "--optimizer-cuda-graph"),
    "mixed number formats": edit(TINY_MOE, "--fp32-residual-connection"),
    "fused Adam": edit(TINY_MOE, "--adam-beta1 1.5"),
    "name FP8GlobalStateManager": edit(TINY_MOE, "--recompute-granularity selective --recompute-modules moe layernorm"),
}


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Verdict]]:
    """The verdicts of every case, of the step alone."""
    cases = PASSED | {name: argv for name, (argv, _, _) in REFUSED.items()} | NOT_JUDGED
    questions = [Question(argv, 8, environment=ONE_CONNECTION, stages=("step",)) for argv in cases.values()]
    return dict(zip(cases, judge_all(questions), strict=True))


@pytest.mark.parametrize("name", PASSED)
def test_what_trains(name: str, steps: dict[str, list[Verdict]]) -> None:
    [verdict] = steps[name]
    assert (verdict.stage, verdict.answer) == ("step", "passed"), verdict
    assert verdict.losses is not None
    assert verdict.grad_norms is not None
    assert len(verdict.losses) == (0 if name == "pipeline" else 3)
    assert len(verdict.grad_norms) == (0 if name == "fp16" else 3)  # it skips until the loss scale is found


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_a_step_refuses(name: str, steps: dict[str, list[Verdict]]) -> None:
    (message, file), names = REFUSED[name][1:]
    [verdict] = steps[name]
    assert (verdict.answer, verdict.place.partition(":")[0]) == ("refused", file), verdict
    assert verdict.message.startswith(message)
    assert names <= set(verdict.names)
    assert verdict.losses is None


@pytest.mark.parametrize("feature", NOT_JUDGED)
def test_what_a_cpu_cannot_train(feature: str, steps: dict[str, list[Verdict]]) -> None:
    [verdict] = steps[feature]
    assert (verdict.answer, verdict.feature) == ("not_judged", feature), verdict


def test_losses_tell_whether_an_option_is_read(steps: dict[str, list[Verdict]]) -> None:
    losses = {name: steps[name][0].losses for name in PASSED}
    for name in ("once more", "recomputed", "counts, traces and logs"):
        assert losses[name] == losses["as it is"], name
    assert losses["groups that nothing reads"] == losses["no groups"]
    assert len({losses[name] for name in ("as it is", "another seed", "no groups", "no token comes back")}) == 4


BEFORE = set(Path().glob("**/router_trace*.jsonl"))
"""Of runs that were launched in this checkout, such as `make quickstart`."""


def test_a_step_leaves_nothing_behind(steps: dict[str, list[Verdict]]) -> None:
    assert not Path("nowhere").exists()
    assert set(Path().glob("**/router_trace*.jsonl")) == BEFORE


def test_a_step_comes_after_the_stages_and_not_after_a_refusal() -> None:
    stages = (*STAGES, "step")
    fine, broken = judge_all(
        [Question(TINY_MOE, 8, stages=stages), Question(edit(TINY_MOE, "--min-lr 1"), 8, stages=stages)]
    )
    assert [(verdict.stage, verdict.answer) for verdict in fine] == [(stage, "passed") for stage in stages]
    assert [(verdict.stage, verdict.answer) for verdict in broken] == [("parse", "passed"), ("validate", "refused")]
    assert broken[-1].names == ("min_lr", "lr")
