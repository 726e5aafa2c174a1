"""The summary, of a real run that was killed and resumed (`data/run`, see its README) and of runs that lack things."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moekit.watch.chart import curve, shares
from moekit.watch.counts import RankLayout, tokens_per_expert
from moekit.watch.metrics import history
from moekit.watch.render import render_summary
from moekit.watch.summary import SummaryData, load_summary

CAPTURE = Path(__file__).parent / "data" / "run"
GOLDEN = Path(__file__).parent / "data"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    return Path(shutil.copytree(CAPTURE, tmp_path / "runs" / "demo"))


def summary(run: Path) -> SummaryData:
    """The run's summary, with the paths of this machine masked."""
    data = load_summary(run, "quickstart")
    dashboard = ["TRACKIO_DIR=trackio trackio show --project quickstart"]
    return replace(data, run_dir="runs/demo", dashboard=dashboard, relaunch="moekit launch quickstart --name other")


@pytest.mark.parametrize("width", [80, 120])
def test_of_a_real_run(run: Path, width: int, golden_file: Callable[[Path, str], None]) -> None:
    text = render_summary(summary(run), width).plain
    golden_file(GOLDEN / f"summary_{width}.txt", text)
    assert max(map(len, text.splitlines())) <= width
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_as_json(run: Path) -> None:
    values = json.loads(json.dumps(summary(run).as_json(), allow_nan=False))
    assert values["name"] == "demo"
    assert values["balance"]["ceiling"] == 3.0
    assert [layer["name"] for layer in values["balance"]["layers"]] == ["layer_0", "layer_1", "layer_2", "layer_3"]
    assert values["loss"][-1][0] == values["train_iters"] == 160


def test_the_capture_holds_repeated_steps_and_every_token(run: Path) -> None:
    steps = history(run)
    assert list(steps) == list(range(1, 161))
    layout = RankLayout(world_size=2, expert_model_parallel=2, expert_tensor_parallel=1, num_experts=8)
    intervals = list(tokens_per_expert(run / "checkpoints" / "tokens_per_expert", layout))
    assert [interval.iteration for interval in intervals] == list(range(5, 161, 5))
    assert all(sum(counts) == 16 * 256 * 2 for interval in intervals for counts in interval.layers.values())
    assert all(interval.coverage.complete and len(interval.layers) == 4 for interval in intervals)


def test_what_is_missing_is_said(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    rewrite(run, lambda record: drop(record, "lm loss validation"))
    data = summary(run)
    assert data.balance is None
    text = render_summary(data, 80).plain
    assert "No validation loss was logged" in text
    assert "Too few tokens-per-expert counts (none)" in text.replace("\n ", "")
    assert "Router" not in text
    assert "◆" not in text


def test_lost_ranks_are_not_averaged_away(run: Path) -> None:
    file = run / "checkpoints" / "tokens_per_expert" / "rank1.jsonl"
    file.write_text("".join(line for line in file.open() if not line.startswith('{"iter": 160,')))
    data = summary(run)
    assert data.balance is not None
    assert data.balance.iterations_after[1] == 155
    assert "1 of 32 counts lack a rank or a layer" in data.missing[0]


def test_dense_runs_have_no_router(run: Path) -> None:
    rewrite(run, lambda record: record["config"].update(num_experts=None) if "config" in record else None)
    data = summary(run)
    assert (data.balance, data.missing) == (None, [])
    assert "Router" not in render_summary(data, 80).plain


def test_runs_with_pipeline_stages_say_why(run: Path) -> None:
    rewrite(run, lambda r: r["config"].update(pipeline_model_parallel_size=2) if "config" in r else None)
    assert "each pipeline stage numbers its own from 0" in summary(run).missing[0]


def test_losses_that_are_no_numbers(run: Path) -> None:
    rewrite(run, lambda r: r.get("metrics", {}).update({"lm loss": "NaN"}) if r.get("step", 0) > 150 else None)
    data = summary(run)
    assert data.loss[-1][0] == 150
    assert "The loss was not a number at 10 steps" in data.missing[0]
    rewrite(run, lambda r: r.get("metrics", {}).update({"lm loss": "NaN"}))
    assert "No loss was logged that is a number." in render_summary(summary(run), 80).plain


def test_of_a_run_that_has_not_begun(tmp_path: Path) -> None:
    text = render_summary(load_summary(tmp_path / "runs" / "new"), 80).plain
    assert "stopped at iteration 0" in text
    assert "No loss was logged." in text
    assert "Megatron's arguments were not recorded" in text


def test_what_was_stopped_is_not_finished(run: Path) -> None:
    """The last attempt stopped by a signal, as Megatron ends well then; an earlier one had come further."""
    first, last = (run / "attempts" / number / "metrics.jsonl" for number in "12")
    with first.open("a") as file:
        for step in range(100, 161):
            file.write(json.dumps({"step": step, "time": 1795986400.0, "metrics": {"lm loss": 1.0}}) + "\n")
    lines = [line for line in last.open() if json.loads(line).get("step", 0) <= 120]
    assert '"finish"' in lines[-1]
    last.write_text("".join(lines))
    data = summary(run)
    assert (data.finished, data.step, data.loss[-1][0]) == (False, 120, 120)
    assert data.final_loss is not None
    assert data.final_loss > 4
    assert "stopped at iteration 120 of 160, in 2 attempts" in render_summary(data, 80).plain


def test_the_final_loss_is_of_what_was_logged(run: Path) -> None:
    data = summary(run)
    assert "mean of the last 10 iterations" in words(data)
    assert "mean of the last 10 logged iterations" in words(replace(data, loss=data.loss[9::10]))


def test_in_a_session_of_ssh(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.7 50022 192.0.2.10 22")
    assert "ssh -N -L 7860:127.0.0.1:7860 " in render_summary(load_summary(run), 80).plain


def test_balance_that_did_not_come_is_not_claimed(run: Path) -> None:
    data = summary(run)
    assert data.balance is not None
    assert "auxiliary loss at work" in words(data)
    little = words(replace(data, balance=replace(data.balance, max_vio_before=0.3, max_vio_after=0.299)))
    assert "too little to tell" in little
    assert "at work" not in little
    worse = replace(data.balance, max_vio_before=0.1, max_vio_after=0.2)
    assert "has not made the load more even" in words(replace(data, balance=worse))
    without = replace(data.balance, balancing=[])
    assert "auxiliary" not in words(replace(data, balance=without))


def test_many_experts_and_layers_fit(run: Path) -> None:
    data = summary(run)
    assert data.balance is not None
    layer = data.balance.layers[0]
    wide = [
        replace(layer, name=f"layer_{i}", load_before=[i, 0] * 128, load_after=[1] * 256, max_vio_after=i / 60)
        for i in range(60)
    ]
    text = render_summary(replace(data, balance=replace(data.balance, layers=wide, experts=256)), 80).plain
    assert max(map(len, text.splitlines())) <= 80
    assert "the 16 least even of 60 layers" in text
    assert "layer 59" in text
    assert "layer 43" not in text
    assert "each block the busiest of 11 experts" in text


def test_strips() -> None:
    assert "".join(block for block, _ in shares([1, 1, 1, 1], 12)) == "▄▄ ▄▄ ▄▄ ▄▄ "
    assert "".join(block for block, _ in shares([0, 8, 0, 0], 4)) == "·█··"
    assert "".join(block for block, _ in shares([0, 4, 2, 2, 2, 2], 3)) == "█▄▄"
    assert "".join(block for block, _ in shares([0, 0], 2)) == "··"


def test_curve() -> None:
    rows = curve([(1, 4.0), (2, 3.0), (3, 2.0)], [(3, 2.0)], width=12, height=3)
    assert [len(row) for row in rows[-2:]] == [12, 12]
    assert rows[0].startswith("4.00 ┤")
    assert rows[2].endswith("◆")
    assert rows[-1] == "      1    3"
    assert len(curve([(5, 1.0)], [], width=20, height=4)) == 6


def test_reading_a_summary_imports_neither_trackio_nor_torch() -> None:
    import subprocess

    code = "import sys, moekit.watch.render; print({'torch', 'trackio', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def words(data: SummaryData) -> str:
    return " ".join(render_summary(data, 80).plain.split())


def drop(record: dict[str, Any], name: str) -> None:
    record.get("metrics", {}).pop(name, None)


def rewrite(run: Path, change: Any) -> None:
    for file in run.glob("attempts/*/metrics.jsonl"):
        whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        records = [json.loads(line) for line in whole]
        for record in records:
            change(record)
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
