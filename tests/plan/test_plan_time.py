"""Time of a step: against published steps, against published networks, against itself, and what it refuses."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_rows
from step_rows import Row

from moekit.plan.candidates import Candidates
from moekit.plan.time.communication import distinct, exchange, exchange_bytes
from moekit.plan.time.hardware import Constants, hardware
from moekit.plan.time.step import TERMS, budget, step_time
from moekit.problems import MoekitError

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return step_rows.rows(tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def errors(rows: list[Row]) -> list[tuple[float, Row]]:
    return [(float(row.predicted().seconds[0]) / row.measured_s - 1, row) for row in rows]


def _is_held_out(row: Row) -> bool:
    return step_rows.family_of(row.text["model"])[0] == "held_out"


def _middle_and_most(errors: Iterator[float]) -> tuple[float, float]:
    middle, most = np.percentile(np.abs(list(errors)), [50, 90])
    print(f"median {middle:.1%}, 90th percentile {most:.1%}")
    return float(middle), float(most)


def test_families_that_fit_nothing(errors: list[tuple[float, Row]]) -> None:
    assert sum(_is_held_out(row) for _, row in errors) > 40
    middle, most = _middle_and_most(error for error, row in errors if _is_held_out(row))
    assert middle <= 0.10
    assert most <= 0.25


def test_rows_that_state_recompute_and_dispatcher(errors: list[tuple[float, Row]]) -> None:
    middle, most = _middle_and_most(error for error, row in errors if row.is_stated)
    assert middle <= 0.10
    assert most <= 0.25
    held, _ = _middle_and_most(error for error, row in errors if row.is_stated and _is_held_out(row))
    assert held <= 0.10


@pytest.mark.parametrize("gpu", ["h100", "b200", "b300", "gb200", "gb300"])
def test_each_gpu_type(errors: list[tuple[float, Row]], gpu: str) -> None:
    middle, _ = _middle_and_most(error for error, row in errors if row.text["gpu"] == gpu)
    assert middle <= 0.10


def test_every_family_is_held_out_or_fits() -> None:
    both = step_rows.families()
    models = [model for side in both.values() for family in side.values() for model in family]
    assert len(models) == len(set(models))
    assert {text["model"] for text in step_rows.texts()} <= set(models)


def test_at_most_eight_constants() -> None:
    assert len(fields(Constants)) <= 8


def test_terms_are_the_whole_step(rows: list[Row]) -> None:
    for row in rows[::7]:
        found = row.predicted()
        assert set(found.terms) == set(TERMS)
        assert sum(found.terms.values()) == pytest.approx(found.seconds)
        assert found.terms["hidden exchange"][0] <= 0
        assert all(found.terms[term][0] >= 0 for term in TERMS if term != "hidden exchange")
        assert (found.exposed <= found.seconds).all()


def _together(rows: list[Candidates]) -> Candidates:
    """Candidates of the same world and stages as one."""

    def joined(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: joined([value[key] for value in values]) for key in values[0]}
        return np.concatenate(values) if isinstance(values[0], np.ndarray) else values[0]

    return Candidates(
        **{field.name: joined([getattr(row, field.name) for row in rows]) for field in fields(Candidates)}
    )


def test_many_layouts_are_each_as_if_alone(tmp_path: Path) -> None:
    text = next(text for text in step_rows.texts() if text["row"] == "157" or text["model"] == "DeepSeek-V3")
    changes: list[dict[str, Any]] = [
        {},
        {"train": {"micro_batch_size": 2}},
        {"parallel": {"expert_model": 16}},
        {"moe": {"dispatcher": "alltoall", "flex_dispatcher_backend": None}},
        {"memory": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    ]
    changes[4]["memory"]["recompute_modules"] = None
    changes[4]["overlap"] = {"moe_expert_parallel_comm": None}
    alone = [step_rows.row_of(tmp_path, text, **change) for change in changes]
    found = step_time(alone[0].shape, alone[0].facts, _together([row.candidates for row in alone]), alone[0].on())
    for place, row in enumerate(alone):
        assert found.seconds[place] == pytest.approx(row.predicted().seconds[0])
    assert len(set(found.seconds.round(6))) == len(alone)


def test_exchange_against_published_dispatch_times(tmp_path: Path) -> None:
    """Dispatch and combine of DeepSeek-V3's layer, and where they cross (arXiv 2603.07685 Table 7)."""
    text = next(text for text in step_rows.texts() if text["model"] == "DeepSeek-V3" and text["gpu"] == "gb200")
    row = step_rows.row_of(tmp_path, text)
    off = []
    with (FOLDER / "dispatch_times.csv").open() as file:
        for line in csv.DictReader(file):
            ranks = int(line["expert_ranks"])
            one = replace(row.candidates, expert=np.array([ranks]), dispatcher=np.array([line["dispatcher"]]))
            inside, across = exchange(row.shape, row.facts, one, hardware("h100", "ib", 8), np.ones(1))
            off.append(float(inside[0] + across[0]) * 1e6 / float(line["microseconds"]) - 1)
            assert (across[0] > 0) == (ranks > 8)
    middle, most = _middle_and_most(iter(off))
    assert middle <= 0.08
    assert most <= 0.16


def test_bytes_of_the_exchange(tmp_path: Path) -> None:
    """Two bytes a feature, a copy for each expert, or for each node: 4,096 tokens, 7,168 features, 8 of 256."""
    text = next(text for text in step_rows.texts() if text["model"] == "DeepSeek-V3" and text["gpu"] == "gb200")
    row = step_rows.row_of(tmp_path, text)
    assert row.shape.experts is not None
    copies = replace(row.candidates, expert=np.array([16]), dispatcher=np.array(["alltoall"]))
    nodes = replace(row.candidates, expert=np.array([16]), dispatcher=np.array(["deepep"]))
    on = hardware("h100", "ib", 8)
    inside, across = exchange_bytes(row.shape, row.facts, copies, on, row.shape.experts)
    assert across[0] == 4096 * 8 * 7168 * 2 * 8 / 16
    assert inside[0] == 4096 * 8 * 7168 * 2 * 7 / 16
    _, once = exchange_bytes(row.shape, row.facts, nodes, on, row.shape.experts)
    limited = 2 * (1 - 1 / 70)  # all four groups on one node: one of 70 choices for either
    assert once[0] == pytest.approx(4096 * 7168 * 2 * limited / 2)


def test_distinct_nodes_of_a_token() -> None:
    """All on one; eight experts over very many; four of eight groups are four nodes of eight, at most."""
    assert distinct(np.array([1]), 8)[0] == 1
    assert distinct(np.array([100_000]), 8)[0] == pytest.approx(8, rel=1e-3)
    assert distinct(np.array([8]), 8, 8, 4)[0] == pytest.approx(4)
    assert distinct(np.array([64]), 8, 8, 4)[0] < distinct(np.array([64]), 8)[0]


def test_network_of_preflight(rows: list[Row], tmp_path: Path) -> None:
    row = next(row for row in rows if row.text["dispatcher"] == "alltoall" and row.text["ep"] == "16")
    file = tmp_path / "preflight.json"
    file.write_text(json.dumps({"alltoall_busbw_gbps": {"2": 39.84}, "allreduce_busbw_gbps": {"2": 398.5}}))
    fitted, slow = hardware("h100", "efa", 8, tmp_path / "none.json"), hardware("h100", "efa", 8, file)
    assert dict(fitted.notes)["network"].startswith("calibrated")
    assert dict(slow.notes)["network"].startswith("measured here")
    on = [step_time(row.shape, row.facts, row.candidates, one).seconds[0] for one in (fitted, slow)]
    assert on[1] > 1.3 * on[0]
    file.write_text(json.dumps({"alltoall_busbw_gbps": {"1": 330.1}}))  # says nothing of two nodes
    one_node = hardware("h100", "efa", 8, file)
    assert step_time(row.shape, row.facts, row.candidates, one_node).seconds[0] == pytest.approx(on[0], rel=0.02)
    inside = next(row for row in rows if row.text["gpu"] == "h100" and row.text["ep"] == "8")
    file.write_text(json.dumps({"alltoall_busbw_gbps": {"1": 30.0}}))
    slow_node = hardware("h100", "efa", 8, file)
    on = [step_time(inside.shape, inside.facts, inside.candidates, each).seconds[0] for each in (fitted, slow_node)]
    assert on[1] > 1.3 * on[0]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(MoekitError, match="no figures are known of GPU `tpu`"):
        hardware("tpu", "ib", 8)
    with pytest.raises(MoekitError, match="no figures are known of fabric `wifi`"):
        hardware("h100", "wifi", 8)
    for text in ("{", "[]", '{"alltoall_busbw_gbps": {"two": 3}}', '{"allreduce_busbw_gbps": 7}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(MoekitError, match="no bandwidths of"):
            hardware("h100", "ib", 8, tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text('{"alltoall_busbw_gbps": {"2": 0}}')
    with pytest.raises(MoekitError, match="a bandwidth is not positive"):
        hardware("h100", "ib", 8, tmp_path / "bad.json")


def test_gpus_without_constants_say_whose_they_take() -> None:
    assert dict(hardware("h200", "efa", 8).notes)["efficiencies"] == "assumed: those of h100, none measured on h200"
    assert dict(hardware("gb300", "ib", 4).notes)["efficiencies"] == "calibrated"


def test_budget() -> None:
    run = budget(18.0, 1000, 16, 2.5)
    assert (run.hours, run.gpu_hours, run.cost) == (5.0, 80.0, 200.0)
    assert budget(18.0, 1000, 16).cost is None
