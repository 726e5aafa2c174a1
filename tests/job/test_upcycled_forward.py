"""Slices and the scale of their weights: upcycled layers beside the dense ones, and the table of docs/upcycling.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import moekit

pytestmark = pytest.mark.megatron

ROOT = Path(moekit.__file__).parents[1]
Case = tuple[str, int, int, int, str]


@pytest.fixture(scope="module")
def measured() -> dict[Case, tuple[float, int]]:
    """By case (activation, slices, experts, experts a token, softmax): relative distance, rows of the router."""
    script = Path(__file__).with_name("upcycled_forward.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {tuple(line[:5]): tuple(line[5:]) for line in lines}


def whole(case: Case) -> bool:
    """Whether a token meets every slice equally often."""
    return case[3] % case[1] == 0


def test_a_homogeneous_activation_gives_the_dense_layer(measured: dict[Case, tuple[float, int]]) -> None:
    exact = {case: far for case, (far, _) in measured.items() if case[0] == "squared_relu" and case[4] == "last"}
    assert all((far < 1e-6) == whole(case) for case, far in exact.items()), exact


def test_whole_copies_give_it_for_any_activation(measured: dict[Case, tuple[float, int]]) -> None:
    assert all(far < 1e-6 for case, (far, _) in measured.items() if case[1] == 1 and case[4] == "last")


@pytest.mark.parametrize(("activation", "at_most"), [("swiglu", 0.16), ("gelu", 0.4)])
def test_the_scale_is_approximate_for_others(
    activation: str, at_most: float, measured: dict[Case, tuple[float, int]]
) -> None:
    """The farther, the more slices."""
    asked = [(activation, slices, *rest, "last") for slices, *rest in ((2, 8, 2), (4, 8, 4), (8, 64, 8))]
    far = [measured[case][0] for case in asked]
    assert 0.01 < far[0] < far[1] < far[2] < at_most


def test_a_token_that_misses_a_slice_gets_another_layer(measured: dict[Case, tuple[float, int]]) -> None:
    assert all(far > 0.25 for case, (far, _) in measured.items() if not whole(case))


def test_before_the_softmax_the_chosen_weigh_more_than_their_share(measured: dict[Case, tuple[float, int]]) -> None:
    first = {case: far for case, (far, _) in measured.items() if case[4] == "first" and case[3] < case[2]}
    assert all(far > 0.08 for far in first.values()), first


def test_the_router_chooses_between_copies(measured: dict[Case, tuple[float, int]]) -> None:
    """A row for each copy: with one copy of each slice there is one, and nothing to choose between."""
    assert {case: rows for case, (_, rows) in measured.items()} == {case: case[2] // case[1] for case in measured}


def test_the_table_of_the_docs_is_measured(measured: dict[Case, tuple[float, int]]) -> None:
    text = (ROOT / "docs" / "upcycling.md").read_text()
    for slices, experts, topk in dict.fromkeys(case[1:4] for case in measured):
        cells = []
        for activation in ("squared_relu", "swiglu", "gelu"):
            for softmax in ("last", "first"):
                far = measured[(activation, slices, experts, topk, softmax)][0]
                cells.append("0" if far < 1e-6 else f"{far:.0%}")
        assert f"| {slices} | {experts} | {topk} | {' | '.join(cells)} |" in text
