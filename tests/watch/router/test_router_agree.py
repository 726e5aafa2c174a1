"""Two runs' choices of the same tokens: two numbers, against a loop over what real runs wrote."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError
from moekit.watch.router.agree import disagree

DATA = Path(__file__).parent / "data"


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> RunDir:
    """The real run on two pipeline stages, with other choices."""
    run = Path(shutil.copytree(DATA / "pp2", tmp_path / "other"))
    for path in sorted((run / "attempts" / "1" / "routing").iterdir()):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            change(record)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return RunDir(run)


def test_a_real_run_agrees_with_itself(tmp_path: Path) -> None:
    def turn(record: dict[str, Any]) -> None:
        record["top_indices"] = [row[::-1] for row in record["top_indices"]]

    found = disagree(RunDir(DATA / "pp2"), changed(tmp_path, turn))
    assert (found.choices, found.tokens, found.compared, found.left_out) == (0, 0, 512, 0)


def test_the_two_numbers_by_a_loop(tmp_path: Path) -> None:
    rng, touched, choices = random.Random(0), set(), 0
    seen: dict[tuple[int, int], int] = {}

    def differ(record: dict[str, Any]) -> None:
        nonlocal choices
        place = record["rank"], record["layer"]
        batch = seen[place] = seen.get(place, -1) + 1
        for row, experts in enumerate(record["top_indices"]):
            if rng.random() < 0.1:
                experts[0] = next(e for e in range(8) if e not in experts)
                touched.add((record["rank"] % 2, batch, row))  # ranks 2 and 3 are the other stage of 0 and 1
                choices += 1

    found = disagree(RunDir(DATA / "pp2"), changed(tmp_path, differ))
    assert found.choices == pytest.approx(choices / (512 * 4))
    assert found.tokens == pytest.approx(len(touched) / 512)
    assert 3 * found.choices < found.tokens
    assert sum(found.layers.values()) / 4 == pytest.approx(found.choices)


def test_records_that_are_missing_on_a_side_are_left_out(tmp_path: Path) -> None:
    other = changed(tmp_path, lambda record: None)
    path = other.attempt(1).routing / "router_trace_rank3.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    found = disagree(RunDir(DATA / "pp2"), other)
    assert (found.compared, found.left_out) == (256, 1)


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    pp2 = RunDir(DATA / "pp2")
    with pytest.raises(MoekitError, match="the runs are on different numbers of ranks or stages"):
        disagree(pp2, RunDir(DATA / "ep1"))
    other = changed(tmp_path, lambda record: record.update(step=9))
    with pytest.raises(MoekitError, match="runs `pp2` and `other` have no traced step in common"):
        disagree(pp2, other)
    metrics = other.attempt(1).metrics
    metrics.write_text(metrics.read_text().replace('"seq_length": 64', '"seq_length": 32'))
    with pytest.raises(MoekitError, match="the runs have different `--seq-length`"):
        disagree(pp2, other)
    shutil.rmtree(other.attempt(1).routing)
    with pytest.raises(MoekitError):
        disagree(pp2, other)
