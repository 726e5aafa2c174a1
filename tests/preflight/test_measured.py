"""What the planner gets of a preflight."""

import json
from pathlib import Path

import pytest

from moekit.job.preflight.measured import write_measured
from moekit.plan.time.hardware import hardware

VERDICT = {
    "profile": "aws-p5",
    "when": 1.0,
    "job": "7",
    "nodes": ["n1", "n2"],
    "inside": {"n1": 330.0, "n2": 332.0},
    "across": 76.0,
    "allreduce": 398.52,
    "baseline": {},
}


def test_the_planner_reads_it(tmp_path: Path) -> None:
    write_measured(tmp_path, VERDICT)
    write_measured(tmp_path, {**VERDICT, "nodes": ["n1", "n2", "n3", "n4"], "across": 39.0, "allreduce": None})
    found = hardware("h100", "efa", 8, tmp_path / "aws-p5.json")
    said = json.loads((tmp_path / "aws-p5.json").read_text())
    assert said["alltoall_busbw_gbps"] == {"1": 331.0, "2": 76.0, "4": 39.0}
    assert said["allreduce_busbw_gbps"] == {"2": 398.52}
    assert said["runs"]["alltoall.2"] == {"when": 1.0, "job": "7", "nodes": ["n1", "n2"]}
    assert (found.alltoall, found.allreduce) == ({1: 331e9, 2: 76e9, 4: 39e9}, {2: 398.52e9})


def test_a_baselines_median_is_more_than_one_run(tmp_path: Path) -> None:
    write_measured(tmp_path, {**VERDICT, "baseline": {"across": 77.14, "inside": 331.5}})
    said = json.loads((tmp_path / "aws-p5.json").read_text())
    assert said["alltoall_busbw_gbps"] == {"1": 331.5, "2": 77.14}


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_file_is_written_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "aws-p5.json").write_text(text)
    write_measured(tmp_path, VERDICT)
    assert json.loads((tmp_path / "aws-p5.json").read_text())["alltoall_busbw_gbps"]["2"] == 76.0


def test_one_node_says_nothing_of_a_network(tmp_path: Path) -> None:
    write_measured(tmp_path, {**VERDICT, "nodes": ["n1"], "inside": {"n1": 330.0}, "across": None, "allreduce": None})
    said = json.loads((tmp_path / "aws-p5.json").read_text())
    assert said["alltoall_busbw_gbps"] == {"1": 330.0}
