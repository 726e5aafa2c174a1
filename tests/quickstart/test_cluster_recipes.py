"""The recipes for clusters, made small enough for a CPU: their schedule, data, batch, overlap and logging really start.

Parsing and validation let settings pass that stop the trainer later, when data sets are built or the first step runs.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from launched import Launch, Launched

from moekit.watch.metrics import history

pytestmark = [pytest.mark.megatron, pytest.mark.train, pytest.mark.timeout(4000)]

SMALL_MODEL = """
model:
  num_layers: 2
  hidden_size: 64
  ffn_hidden_size: 128
  num_attention_heads: 4
  num_query_groups: 2
  seq_length: 64
  max_position_embeddings: 64
  transformer_impl: local
  no_rope_fusion: true
  no_masked_softmax_fusion: true
  no_persist_layer_norm: true
  no_bias_swiglu_fusion: true
  no_gradient_accumulation_fusion: true
train: {micro_batch_size: 2, global_batch_size: 8, exit_interval: 3}
runtime: {device: cpu}
"""
DENSE = "parallel: {gpus: 2, distributed_backend: gloo}\n"
EXPERTS = """
moe: {num_experts: 4, ffn_hidden_size: 32}
router: {topk: 2}
parallel: {gpus: 2, expert_model: 2, distributed_backend: gloo}
"""
DATA = "data: {name: python-docs, tokenizer: python-docs}\n"


def trained(launched: Launched, first: int = 1) -> dict[int, dict[str, float]]:
    assert launched.wait() == 0, launched.text
    steps = history(launched.run.path)
    assert sorted(steps) == [first, first + 1, first + 2]
    return steps


@pytest.mark.parametrize(
    ("name", "changes"), [("first_moe", EXPERTS + DATA), ("first_moe_smoke", EXPERTS)], ids=["first_moe", "smoke"]
)
def test_the_moe_starts(name: str, changes: str, launch: Launch) -> None:
    steps = trained(launch(f"small_{name}", f"base: {name}\n{SMALL_MODEL}{changes}"))
    assert {"load_balancing_loss", "moe/load_balancing_loss_layer_1", "grad-norm"} <= steps[3].keys()
    rates = [steps[step]["learning-rate"] for step in (1, 2, 3)]
    assert rates == pytest.approx([5e-4 / 40 * step for step in (1, 2, 3)])  # the warmup of the whole budget


def test_both_go_on_from_the_dense_checkpoint(launch: Launch) -> None:
    save = "checkpoint: {save_interval: 3}\n"
    dense = trained(launch("dense_save", f"base: settings/dense_save\n{SMALL_MODEL}{DENSE}{DATA}{save}"))
    continued = trained(launch("continued", f"base: settings/dense_continued\n{SMALL_MODEL}{DENSE}{DATA}"), first=4)
    # the next tokens, as upcycling takes them, and a warmup of its own
    assert continued[4]["samples vs steps"] == dense[3]["samples vs steps"] + 8
    assert continued[4]["learning-rate"] == dense[1]["learning-rate"]

    slices = EXPERTS.replace("num_experts: 4, ffn_hidden_size: 32", "num_experts: 8, ffn_hidden_size: 64")
    slices = slices.replace("{num_experts", "{upcycling_granularity: 2, num_experts")
    recipe = f"base: upcycle\n{SMALL_MODEL.replace('ffn_hidden_size: 128', 'ffn_hidden_size: 64')}{slices}{DATA}{save}"
    upcycled = trained(launch("upcycled", recipe))
    for metric in ("samples vs steps", "learning-rate"):
        assert upcycled[1][metric] == continued[4][metric]
    assert upcycled[1]["lm loss"] == pytest.approx(continued[4]["lm loss"], abs=2e-3)

    killed = launch("killed", recipe)
    while not killed.run.latest_checkpoint.exists():
        assert killed.process.poll() is None, killed.text
        time.sleep(0.05)
    os.kill(killed.workers()[0], signal.SIGKILL)
    assert killed.wait() == 1, killed.text
    again = trained(launch("killed", recipe))
    assert [again[step]["lm loss"] for step in (1, 2, 3)] == [upcycled[step]["lm loss"] for step in (1, 2, 3)]
