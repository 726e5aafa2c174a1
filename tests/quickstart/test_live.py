"""What the terminal shows of a run's files, on a terminal and elsewhere."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console

from moekit.launch.attempt import Plan, watch
from moekit.launch.live import MOST_ROWS, Display, Follow, Row, clock, rows_every
from moekit.launch.rundir import RunDir
from moekit.recipe.load import load

CONFIG = {"world_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "num_experts": 4}
START = 1_000_000.0


class Run:
    """A run directory that grows as a training's does."""

    def __init__(self, path: Path, attempt: int = 1) -> None:
        self.path = path
        self.metrics = path / "attempts" / str(attempt) / "metrics.jsonl"
        self.counts = path / "checkpoints" / "tokens_per_expert"
        self.metrics.parent.mkdir(parents=True)
        self.counts.mkdir(parents=True, exist_ok=True)
        self.write({"event": "config", "config": CONFIG, "time": START})

    def write(self, line: dict[str, object]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def step(self, step: int, time: float, **metrics: float) -> None:
        named = {name.replace("_loss", " loss", 1) if name.startswith("lm") else name: v for name, v in metrics.items()}
        self.write({"step": step, "time": START + time, "metrics": named})

    def count(self, step: int, first: list[int], second: list[int]) -> None:
        for rank, counts in enumerate((first, second)):
            with (self.counts / f"rank{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"iter": step, "block": "decoder", "layer": 0, "tpe": [counts]}) + "\n")


def losses(rows: Iterable[Row]) -> list[tuple[int, float | None]]:
    return [(row.step, row.loss) for row in rows]


def test_a_row_is_the_mean_of_its_interval(tmp_path: Path) -> None:
    run, follow = Run(tmp_path), Follow(tmp_path, 1, 10, 100, 5)
    assert follow.poll() == []
    for step in range(1, 6):
        run.step(step, step * 2.0, lm_loss=float(step), load_balancing_loss=1.0 + step / 10)
    run.count(5, [30, 10], [10, 10])
    (row,) = follow.poll()
    assert (row.step, row.loss, row.balance_loss) == (5, 3.0, pytest.approx(1.3))
    assert row.max_vio == pytest.approx(1.0)  # 30 tokens where the mean is 15
    assert (row.tokens_per_s, row.left_s) == (50.0, 10.0)
    assert follow.poll() == []


def test_counts_that_lack_a_layer_are_left_out(tmp_path: Path) -> None:
    run, follow = Run(tmp_path), Follow(tmp_path, 1, 10, 100, 5)
    with (run.counts / "rank0.jsonl").open("a") as file:  # rank 1 was killed before it wrote its own
        for layer in (0, 1):
            file.write(json.dumps({"iter": 4, "block": "decoder", "layer": layer, "tpe": [[9, 1]]}) + "\n")
    with (run.counts / "rank1.jsonl").open("a") as file:
        file.write(json.dumps({"iter": 4, "block": "decoder", "layer": 0, "tpe": [[9, 1]]}) + "\n")
    for step in range(1, 6):
        run.step(step, step * 2.0, lm_loss=1.0)
    for step in range(5, 20):
        run.count(step, [30, 10], [10, 10])
        follow.poll()
    assert 4 not in follow._max_vio
    assert follow._max_vio[5] == pytest.approx(1.0)


def test_a_layout_that_has_no_max_vio_is_said_once(tmp_path: Path) -> None:
    run, follow = Run(tmp_path), Follow(tmp_path, 1, 10, 100, 1)
    run.write({"event": "config", "config": {"pipeline_model_parallel_size": 2}, "time": START})
    run.step(1, 1.0, lm_loss=1.0)
    run.step(2, 2.0, lm_loss=2.0)
    assert [(row.loss, row.max_vio) for row in follow.poll()] == [(1.0, None), (2.0, None)]
    follow.poll()
    (problem,) = follow.problems
    assert "each pipeline stage numbers its own from 0" in problem.what


def test_no_fault_in_showing_ends_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real attempt in all but its program, which takes a second and says how it ended."""
    run = RunDir(tmp_path / "runs" / "shown")
    run.path.mkdir(parents=True)
    loaded = load("quickstart")
    plan = Plan(
        loaded, run, run.new_attempt(), resumes=False, start=0, end=300, processes=1, device="cpu", tokens_per_step=1
    )
    line = json.dumps({"step": 7, "time": START, "metrics": {"lm loss": 1.0}})
    run.attempt(plan.attempt).metrics.write_text(line + "\n")
    program = "import time; time.sleep(1.2); print('came to its end')"
    monkeypatch.setattr(Plan, "command", property(lambda _: [sys.executable, "-c", program]))
    monkeypatch.setattr(Follow, "poll", lambda _: 1 / 0)
    out = io.StringIO()
    with (run.path / ".lock").open("w") as lock:
        followed = watch(plan, lock.fileno(), Display(True, Console(file=out, highlight=False)))
    assert followed.step == 7
    assert run.attempt(plan.attempt).train_log.read_text() == "came to its end\n"
    assert out.getvalue() == "training goes on, though it can no longer be shown here\n"
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1


def test_a_pause_for_a_checkpoint_is_no_step(tmp_path: Path) -> None:
    run, follow = Run(tmp_path), Follow(tmp_path, 1, 100, 100, 5)
    for step in range(1, 11):
        run.step(step, step * 2.0 + 60.0 * (step > 7), lm_loss=1.0)
    first, second = follow.poll()
    assert first.tokens_per_s == second.tokens_per_s == 50.0


def test_the_last_row_comes_at_the_end_and_validation_is_no_row(tmp_path: Path) -> None:
    run, follow = Run(tmp_path), Follow(tmp_path, 1, 7, 100, 5)
    for step in range(1, 8):
        run.step(step, float(step), lm_loss=1.0)
    run.write({"step": 7, "time": START + 9, "metrics": {"lm loss validation": 4.5}})
    assert [row.step for row in follow.poll()] == [5, 7]
    assert follow.validation_loss == 4.5
    assert follow.step == 7


def test_only_the_running_attempt_is_shown(tmp_path: Path) -> None:
    first = Run(tmp_path)
    for step in range(1, 9):
        first.step(step, float(step), lm_loss=9.0)
    second, follow = Run(tmp_path, attempt=2), Follow(tmp_path, 2, 10, 100, 5)
    for step in range(6, 11):
        second.step(step, float(step), lm_loss=2.0)
    assert losses(follow.poll()) == [(10, 2.0)]


def test_a_dense_run_has_no_router_columns(tmp_path: Path) -> None:
    run, follow = Run(tmp_path), Follow(tmp_path, 1, 4, 100, 2)
    run.write({"event": "config", "config": {"num_experts": None}, "time": START})
    run.step(1, 1.0, lm_loss=1.0)
    run.step(2, 2.0, lm_loss=2.0)
    (row,) = follow.poll()
    assert row == Row(2, 1.5, None, None, 100.0, 2.0)
    assert shown(row, has_router=False).splitlines() == [
        "iteration     LM loss   tokens/s   time left",
        "      2/4       1.500        100        0:02",
    ]


def test_what_is_not_known_is_a_dash() -> None:
    assert shown(Row(2, None, None, None, None, None)).splitlines() == [
        "iteration     LM loss  balance loss   MaxVio   tokens/s   time left",
        "      2/4           -             -        -          -           -",
    ]


def test_not_a_number_is_shown_as_that() -> None:
    assert " nan " in shown(Row(2, float("nan"), 1.0, 0.5, 1.0, 1.0))


def shown(row: Row, has_router: bool = True) -> str:
    out = io.StringIO()
    display = Display(has_router, Console(file=out, highlight=False))
    display.row(row, 4)
    return out.getvalue()


@pytest.mark.parametrize(
    ("interval", "total", "every"), [(10, 400, 10), (1, 400, 7), (1, 60, 1), (1, 61, 2), (10, 4768, 80), (500, 20, 500)]
)
def test_rows_never_flood(interval: int, total: int, every: int) -> None:
    assert rows_every(interval, total) == every
    assert every % interval == 0
    assert total / every <= MOST_ROWS


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (59.6, "1:00"), (185, "3:05"), (3785, "1:03:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def display_of(out: io.StringIO, terminal: bool, environment: dict[str, str]) -> Display:
    return Display(True, Console(file=out, force_terminal=terminal, highlight=False, _environ=environment, width=40))


def test_lines_are_plain_and_whole_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    display = display_of(out, False, {})
    with display.moving("Megatron is starting", 10):
        display.say("a" * 60 + " [bold]not markup[/bold]", "bold")
        display.move("step 1 of 10", 1, None)
    assert out.getvalue() == "a" * 60 + " [bold]not markup[/bold]\n"


def test_a_terminal_has_a_moving_line_and_colour_only_where_wanted() -> None:
    coloured, plain = io.StringIO(), io.StringIO()
    for out, environment in ((coloured, {"TERM": "xterm"}), (plain, {"TERM": "xterm", "NO_COLOR": "1"})):
        display = display_of(out, True, environment)
        with display.moving("Megatron is starting", 10):
            display.say("failed", "red")
            display.move("step 1 of 10", 1, 65)
        assert "step 1 of 10" in out.getvalue()
        assert "1:05 left" in out.getvalue()
    assert "\x1b[31m" in coloured.getvalue()
    assert "\x1b[31m" not in plain.getvalue()
