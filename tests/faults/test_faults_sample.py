"""Some of the faults of `make faults`, and one with a wrong expectation, which is to be found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cluster import Unavailable
from faults.bench import Bench, bench
from faults.cases import CASES
from faults.trial import run_case

pytestmark = [pytest.mark.slurm, pytest.mark.train]

SAMPLE = (
    "kill-rank-step",
    "told-step",
    "requeue-shards",
    "cut-shard",
    "tracker-garbage",
    "layout",
    "all-gone",
    "memory-step",
)
"""In an order in which one run can be disturbed by several."""
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    try:
        with bench(tmp_path_factory.mktemp("faults"), print, ("reference", "early")) as made:
            yield made
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_followed_by_what_the_table_says(here: Bench, name: str) -> None:
    result = run_case(BY_NAME[name], here)
    assert result.ok, result
    assert result.numbers > 50


def test_a_wrong_expectation_is_found(here: Bench) -> None:
    result = run_case(replace(BY_NAME["all-gone"], then="resumes", says=""), here)
    assert not result.ok
    assert result.detail.startswith("expected: resumes, observed: stops")


def test_a_wrong_loss_is_found(here: Bench) -> None:
    values = here.reference[3]
    values["lm loss"] += 1e-7
    result = run_case(BY_NAME["all-gone"], here)
    assert not result.ok
    assert "step 3: lm loss is" in result.detail
