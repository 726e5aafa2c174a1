"""Symptoms that traces show: by real traces of the router, made ones of a GPU, and the values that they give."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "profile"))
from made_traces import SEND, gpu_events, operator, write

from moekit.doctor import traces
from moekit.doctor.evidence import Evidence, gather
from moekit.doctor.judge import shown
from moekit.doctor.traces import Exchange, Gate, Reach, Traces, of_run
from moekit.launch.rundir import RunDir
from moekit.runs.history import read_history
from moekit.runs.look import look_at

ROUTER = Path(__file__).parents[1] / "watch" / "router" / "data"
CAPTURE = Path(__file__).parents[1] / "watch" / "data" / "run"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """What a real run on a CPU left."""
    return RunDir(Path(shutil.copytree(CAPTURE, tmp_path / "runs" / "demo")))


def seen(run: RunDir, recipe: str, **changes: Any) -> Evidence:
    """Its evidence with another recipe, long after its warm-up."""
    run.recipe.write_text(f"{recipe}\n")
    found = gather(run, read_history(look_at(run)[0]))
    picture = replace(found.picture, step=5000, latest={**found.picture.latest, **changes.pop("latest", {})})
    return replace(found, picture=picture, traces=Traces(**changes))


def keys(found: Evidence) -> dict[str, str]:
    return {one.symptom.key: one.sure for one in shown(found)}


BUSY = Exchange(exposed=0.4, runs=0.42, permute=0.05, other=0.02, idle=0.01, gemm=0.4)
HIDDEN = replace(BUSY, exposed=0.05)
RECOMPUTED = "memory: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"


@pytest.mark.parametrize(
    ("key", "recipe", "there", "absent"),
    [
        ("all_to_all_half", "base: first_moe", {"exchange": BUSY}, {"exchange": HIDDEN}),
        ("all_to_all_exposed", "base: first_moe", {"exchange": BUSY}, {"exchange": replace(BUSY, exposed=0.2)}),
        ("still_slow", "base: first_moe", {"exchange": HIDDEN}, {"exchange": replace(HIDDEN, idle=0.2)}),
        ("every_node", "base: settings/ep16", {"reach": Reach(1.95, 2)}, {"reach": Reach(1.2, 2)}),
        ("flat_gate", "base: first_moe", {"gates": (Gate("layer_3", True, 0.5),)}, {"gates": (Gate("a", False, 0.5),)}),
        (
            "pre_softmax_worse",
            "base: first_moe\nrouter: {pre_softmax: true}",
            {"gates": (Gate("layer_3", False, 0.4),)},
            {"gates": (Gate("layer_3", False, 0.97),)},
        ),
        (
            "capacity_worse",
            "base: settings/capacity\nmoe: {pad_expert_input_to_capacity: null, expert_capacity_factor: 1.2}",
            {"latest": {"router/max_vio_micro": 0.5}},
            {"latest": {"router/max_vio_micro": 0.1}},
        ),
        (
            "full_recompute",
            f"base: first_moe\n{RECOMPUTED}",
            {"peak_gib": 30.0, "gpu_gib": 80.0},
            {"peak_gib": 70.0, "gpu_gib": 80.0},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "base" not in value else "",
)
def test_what_traces_show(run: RunDir, key: str, recipe: str, there: dict[str, Any], absent: dict[str, Any]) -> None:
    assert key in keys(seen(run, recipe, **there))
    assert key not in keys(seen(run, recipe, **absent))
    assert key not in keys(seen(run, recipe))


def test_a_group_over_nodes_is_judged_by_its_share_of_the_step(run: RunDir) -> None:
    assert keys(seen(run, "base: settings/ep16", reach=Reach(1.95, 2)))["every_node"] == "possible"
    assert keys(seen(run, "base: settings/ep16", reach=Reach(1.95, 2), exchange=BUSY))["every_node"] == "sure"


def test_the_share_of_dropped_tokens_is_the_least_that_can_be(run: RunDir) -> None:
    recipe = "base: settings/capacity\nmoe: {pad_expert_input_to_capacity: null, expert_capacity_factor: 1.2}"
    (one,) = shown(seen(run, recipe, latest={"router/max_vio_micro": 0.5}))
    assert one.sentence.endswith("at least 20% of the tokens' choices are dropped")  # 1.2 / 1.5 are left


def test_a_profile_of_a_gpu(run: RunDir) -> None:
    folder = run.attempt(2).path / "torch_profile"
    write(folder / "rank-0.json.gz", gpu_events(), 0)
    run.recipe.write_text("base: first_moe\n")
    found = of_run(run, 0.0)
    assert found.missing == ()
    assert found.exchange == Exchange(
        exposed=pytest.approx(0.4),
        runs=pytest.approx(0.5),
        permute=0.06,
        other=0.05,
        idle=0.05,
        gemm=pytest.approx(0.3),
    )
    assert SEND.startswith("ncclDevKernel_SendRecv")


def test_a_profile_of_a_cpu_says_nothing_of_speed(run: RunDir) -> None:
    write(run.attempt(2).path / "torch_profile" / "rank-0.json", [operator("aten::mm", 0, 50)], 0)
    run.recipe.write_text("base: quickstart\n")
    found = of_run(run, 0.0)
    assert found.exchange is None
    assert found.missing == ("Its profile is of a CPU, on which speed is not judged.",)


def test_large_and_damaged_traces_are_named(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.recipe.write_text("base: quickstart\n")
    folder = run.attempt(2).path / "torch_profile"
    folder.mkdir()
    (folder / "rank-0.json").write_text("[")
    (said,) = of_run(run, 0.0).missing
    assert said.startswith("A trace cannot be read: ")
    monkeypatch.setattr(traces, "_MOST_BYTES", 0)
    (said,) = of_run(run, 0.0).missing
    assert said.endswith("are not read on the way: `moekit profile demo`.")


def test_a_real_routing_trace(tmp_path: Path) -> None:
    """Of a run of two steps: gates are flat, and on nodes of one rank each token reaches some of two."""
    run = RunDir(Path(shutil.copytree(ROUTER / "logits", tmp_path / "logits")))
    (run.path / "retry.json").write_text('{"ranks_per_node": 1}')
    found = of_run(run, 0.0)
    assert [(gate.layer, gate.flat) for gate in found.gates] == [("layer_0", True), ("layer_1", True)]
    assert found.reach is not None
    assert found.reach.nodes == 2
    assert 1 < found.reach.mean <= 2


@pytest.mark.parametrize(
    ("device", "gib"), [("NVIDIA H100 80GB HBM3", 80.0), ("NVIDIA H200", 131.3), ("cpu", 0.0), ("NVIDIA L4", 0.0)]
)
def test_the_memory_of_a_gpu_by_its_name(run: RunDir, device: str, gib: float) -> None:
    run.attempt(2).software.write_text(f'{{"device": "{device}"}}')
    assert of_run(run, 0.0).gpu_gib == pytest.approx(gib, abs=0.1)


def test_the_peak_that_megatron_prints_is_read(run: RunDir) -> None:
    peak = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 100.00 | max allocated: 40960.00 | reserved: 1.00"
    run.recipe.write_text("base: quickstart\n")
    run.attempt(2).train_log.write_text(f"{peak} | max reserved: 2.00\n")
    assert gather(run, read_history(look_at(run)[0])).traces.peak_gib == 40.0
