"""What is known to be faster than what, whatever the constants: signs, orders, and the handbook's own figures.

Each of the handbook's is marked `reproduced`, where the planner gives it, or `bound`, where it may only lie on one side
of it, since what was measured is not all said.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import step_rows
import yaml

from moekit import share
from moekit.plan.candidates import of_run
from moekit.plan.given import Given
from moekit.plan.layout import layout_of
from moekit.plan.resolve import resolve_given
from moekit.plan.run import facts_of
from moekit.plan.time.hardware import hardware
from moekit.plan.time.step import StepTime, step_time
from moekit.recipe.load import load

Changes = dict[str, Any]
NO_RECOMPUTE = {f"recompute_{name}": None for name in ("granularity", "method", "num_layers", "modules")}


@pytest.fixture
def timed(tmp_path: Path) -> Callable[..., StepTime]:
    """A shipped recipe, with sections changed, timed on H100."""
    number = 0

    def time(base: str, fabric: str = "efa", imbalance: float = 1.0, **changes: Changes) -> StepTime:
        nonlocal number
        number += 1
        path = tmp_path / f"asked{number}.yaml"
        path.write_text(yaml.safe_dump({"base": str(share.folder("recipes") / base), **changes}))
        given = Given.of(load(str(path)))
        shape = resolve_given(given)
        rows = of_run(given, shape, layout_of(given, shape))
        return step_time(shape, facts_of(given), rows, hardware("h100", fabric, 8), imbalance)

    return time


@pytest.fixture
def row(tmp_path: Path) -> Callable[..., StepTime]:
    """A published row by its number, columns changed, timed."""

    def time(number: int, **columns: str) -> StepTime:
        text = next(text for text in step_rows.texts() if text["row"] == str(number))
        return step_rows.row_of(tmp_path, {**text, **columns}).predicted()

    return time


def speed(found: StepTime) -> float:
    return float(found.tflops_per_gpu[0])


def gain(new: StepTime, old: StepTime) -> float:
    return speed(new) / speed(old) - 1


# Orders (matched pairs of arXiv 2504.14960 and 2603.07685, Megatron-Bridge's skills and performance tables)


def test_expert_overlap_pays_with_both_dispatchers(row: Callable[..., StepTime]) -> None:
    """Measured: 15 % of a step with HybridEP, 24 % with all-to-all."""
    hybrid = 1 - row(186).seconds[0] / row(185).seconds[0]
    copies = 1 - row(188).seconds[0] / row(187).seconds[0]
    assert 0.05 < hybrid < copies
    assert copies == pytest.approx(0.24, abs=0.06)


def test_one_copy_to_a_node_is_faster_than_one_to_an_expert(row: Callable[..., StepTime]) -> None:
    """Measured: 24.7 s against 41.3 s."""
    assert row(185).seconds[0] / row(187).seconds[0] == pytest.approx(24.71 / 41.25, abs=0.06)


def test_whole_experts_folded_over_attention_ranks_beat_halves(row: Callable[..., StepTime]) -> None:
    """Measured: 49.3 % of the peak against 46.3 %."""
    assert gain(row(204), row(203)) == pytest.approx(49.3 / 46.3 - 1, abs=0.04)


def test_tensor_parallelism_of_eight_is_much_slower_than_of_four(row: Callable[..., StepTime]) -> None:
    four, eight = row(204, tp="4", gpus="256"), row(204, tp="8", gpus="512")
    assert speed(eight) < 0.92 * speed(four)


def test_what_recomputing_each_module_costs(row: Callable[..., StepTime]) -> None:
    """Moonlight, one micro batch: activation, projections up, the dense network too, norms too, in this order."""
    none, activation, up, dense, norms = (float(row(number).seconds[0]) for number in (170, 174, 172, 173, 175))
    assert none < activation < up < dense < norms


def test_fp8_on_wide_experts(row: Callable[..., StepTime]) -> None:
    """Measured: 1.25 to 1.29 times as fast on Mixtral."""
    faster = 1 + gain(row(204, precision="tensorwise"), row(204))
    assert 1.15 < faster < 1.45


def test_weak_scaling_is_flat(row: Callable[..., StepTime]) -> None:
    """Measured: 1,024 TFLOP/s on 8 GPUs, 1,036 on 256."""
    assert abs(gain(row(168), row(167))) < 0.03


def test_strong_scaling_costs(row: Callable[..., StepTime]) -> None:
    """Mixtral with a global batch of 1,024 on 128 to 1,024 GPUs: 52.2 to 44.9 % of the peak."""
    speeds = [speed(row(204, gbs="1024", gpus=str(gpus))) for gpus in (128, 256, 512, 1024)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] / speeds[0] == pytest.approx(44.9 / 52.2, abs=0.06)


def test_natural_routing_is_slower_than_forced_balance(timed: Callable[..., StepTime]) -> None:
    for name in ("first_moe.yaml", "models/qwen3_30b_h100.yaml", "models/deepseek_v3_h100.yaml"):
        speeds = [speed(timed(name, "ib", imbalance)) for imbalance in (1.0, 1.2, 1.5, 2.0)]
        assert speeds == sorted(speeds, reverse=True)
        assert speeds[0] > 1.03 * speeds[1]


def test_an_optimizer_on_the_host_is_slow_where_steps_are_short(timed: Callable[..., StepTime]) -> None:
    """Measured: steps 1.9 to 4.2 times as long."""
    small = {"global_batch_size": 8}
    away = timed("models/moonlight.yaml", train=small, optimizer={"cpu_offload": True})
    assert 1.5 < away.seconds[0] / timed("models/moonlight.yaml", train=small).seconds[0] < 6


def test_graphs_pay_where_kernels_are_short(row: Callable[..., StepTime]) -> None:
    """Measured: 214 to 274 TFLOP/s with a small batch, of which the planner gives the sign and little more."""
    assert 0.01 < gain(row(178), row(178, graphs="")) < 0.28
    assert gain(row(170, graphs="attn moe_router moe_preprocess"), row(170)) > 0.1
    assert 0 <= gain(row(204, graphs="attn"), row(204)) < 0.03


def test_a_faster_network_is_faster(timed: Callable[..., StepTime]) -> None:
    speeds = [speed(timed("models/qwen3_30b_h100.yaml", fabric)) for fabric in ("none", "efa", "ib")]
    assert speeds == sorted(speeds)


# The handbook's figures


def test_bound_forced_balance(timed: Callable[..., StepTime]) -> None:
    """Bound: 149.4 TFLOP/s (3.3). The planner gives more: nothing that is said of that run explains the rest."""
    assert 149.4 < speed(timed("first_moe.yaml")) < 149.4 * 1.5


def test_bound_imbalance(timed: Callable[..., StepTime]) -> None:
    """Bound: 125 TFLOP/s with aux loss and 100.5 with the busiest GPU at twice the mean (3.3), 16 and 33 % less.

    Ranks that wait are no slower than the busiest: the planner takes every layer's busiest rank for everybody's time.
    """
    even, twice = timed("first_moe.yaml"), timed("first_moe.yaml", imbalance=2.0)
    assert -0.45 < gain(twice, even) < 100.5 / 149.4 - 1
    assert gain(timed("first_moe.yaml", imbalance=1.3), even) == pytest.approx(125 / 149.4 - 1, abs=0.04)


TWO_NODES: Changes = {"gpus": 16, "expert_model": 16}


def test_bound_experts_over_two_nodes(timed: Callable[..., StepTime]) -> None:
    """Bound: 59 % less than within one node (3.7); nodes, accumulation and balance were others."""
    one = timed("first_moe.yaml")
    assert -0.59 < gain(timed("first_moe.yaml", parallel=TWO_NODES), one) < -0.3
    assert gain(timed("first_moe.yaml", imbalance=2.0, parallel=TWO_NODES), one) < -0.59


def test_reproduced_sockets(timed: Callable[..., StepTime]) -> None:
    """Reproduced: some 25 times slower on sockets than on EFA (3.7), where the exchange is most of the step."""
    slower = (
        timed("first_moe.yaml", "none", parallel=TWO_NODES).seconds
        / timed("first_moe.yaml", parallel=TWO_NODES).seconds
    )
    assert 10 < slower[0] < 30


def test_reproduced_full_recomputation(timed: Callable[..., StepTime]) -> None:
    """Reproduced: 24 % less with micro batches of two (3.7)."""
    two = {"micro_batch_size": 2}
    less = gain(timed("first_moe.yaml", train=two), timed("first_moe.yaml", train=two, memory=NO_RECOMPUTE))
    assert less == pytest.approx(-0.24, abs=0.03)


def test_bound_overlap(timed: Callable[..., StepTime]) -> None:
    """Bound: up to 35 % more on two nodes (3.7), of runs whose batch and balance are not said; the planner gives more
    for a balanced one. Full recomputation is off with it."""
    small: Changes = {"parallel": TWO_NODES, "memory": NO_RECOMPUTE, "train": {"micro_batch_size": 2}}
    more = gain(
        timed("first_moe.yaml", overlap={"moe_expert_parallel_comm": True}, **small), timed("first_moe.yaml", **small)
    )
    assert 0.25 < more < 0.5


def test_bound_permute_fusion(timed: Callable[..., StepTime]) -> None:
    """Bound: 3.3 % of a step (3.7); the planner gives a sign and an upper end."""
    shorter = timed("first_moe.yaml", moe={"permute_fusion": True}).seconds / timed("first_moe.yaml").seconds - 1
    assert -0.10 < shorter[0] < -0.02


def test_reproduced_offload(timed: Callable[..., StepTime]) -> None:
    """Reproduced: 2 % less with the inputs of norms and experts in main memory (3.7), on 14 layers of DeepSeek-V3."""
    proxy: Changes = {
        "model": {"num_layers": 14, "mtp_num_layers": None},
        "moe": {
            "num_experts": 64, "layer_freq": "([0]*1+[1]*13)", "dispatcher": "alltoall",
            "flex_dispatcher_backend": None,
        },
        "router": {"num_groups": None, "group_topk": None, "padding_for_quantization": None, "fusion": None},
        "parallel": {
            "gpus": 64, "tensor_model": 1, "sequence": None, "pipeline_model": 4, "expert_model": 16,
            "pipeline_model_layout": "Et*4|tttt|tttt|ttL",
        },
        "train": {"global_batch_size": 512},
        "precision": {"fp8_format": None, "fp8_recipe": None},
        "overlap": {"moe_expert_parallel_comm": None},
    }  # fmt: skip
    modules = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["attn_norm", "mlp_norm", "expert_fc1", "moe_act"],
    }
    stays = timed("models/deepseek_v3_h100.yaml", "ib", **proxy, memory=NO_RECOMPUTE)
    moves = timed("models/deepseek_v3_h100.yaml", "ib", **proxy, memory={**NO_RECOMPUTE, **modules})
    assert -0.04 < gain(moves, stays) < 0


def test_bound_prediction_depth_on_the_last_stage(timed: Callable[..., StepTime]) -> None:
    """Bound: some 37 % longer early steps of a run over eight stages, whose shape is not said (3.6): the stage with the
    depth is as much longer, and all wait for it."""
    pipeline: Changes = {"gpus": 64, "pipeline_model": 8, "expert_model": 8}
    plain = timed("first_moe.yaml", parallel=pipeline, train={"micro_batch_size": 1})
    depth = timed("first_moe.yaml", parallel=pipeline, train={"micro_batch_size": 1}, model={"mtp_num_layers": 1})
    longer = depth.seconds[0] / plain.seconds[0] - 1
    assert 0.37 < longer < 1.2
    assert depth.stages[0].argmax() == 7


def test_bound_capacity_against_tensor_parallelism(row: Callable[..., StepTime]) -> None:
    """Bound: 463 TFLOP/s without tensor parallelism where capacity allows it, 392 dropless with two (3.7)."""
    assert speed(row(204, tp="1", capacity="1")) > 1.02 * speed(row(204, tp="2", capacity=""))
