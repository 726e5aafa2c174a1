from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_runs import JOB, command

from moekit.job import intervals
from moekit.job.wandb_face import WandbFace

torch = pytest.importorskip("torch")
training = pytest.importorskip("megatron.training.training")
pytestmark = pytest.mark.megatron


def call(iteration: int = 4, skipped: int = 0, losses: tuple[float, ...] = (1.0,), **sums: int) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "skipped_iter": skipped,
        "is_first_iteration": False,
        "loss_dict": {f"loss {number}": torch.tensor([loss, 1.0]) for number, loss in enumerate(losses)},
        "total_loss_dict": {f"{name} iterations": count for name, count in sums.items()},
    }


@pytest.mark.parametrize(
    ("of_call", "skipped", "nan"),
    [
        (call(), 0, 0),
        (call(skipped=2, nan=1), 2, 1),
        (call(losses=(float("nan"),)), 0, 0),  # Megatron looks at the losses of skipped iterations only
    ],
)
def test_iterations_are_counted_as_megatron_does(of_call: dict[str, Any], skipped: int, nan: int) -> None:
    assert intervals.steps_not_taken(of_call) == {"skipped_iterations": skipped, "nan_iterations": nan}


@pytest.mark.parametrize(("losses", "nan"), [((1.0, 2.0), 0), ((1.0, float("nan")), 1), ((float("-inf"),), 1), ((), 0)])
def test_a_skipped_iteration_is_a_nan_one_where_a_loss_is_not_finite(losses: tuple[float, ...], nan: int) -> None:
    of_call = call(losses=losses) | {"skipped_iter": 1}
    assert intervals.steps_not_taken(of_call) == {"skipped_iterations": 1, "nan_iterations": nan}


@pytest.mark.parametrize(
    ("of_call", "ends"),
    [
        (call(4), True),
        (call(5), False),
        (call(4) | {"is_first_iteration": True}, False),  # Megatron's counts go on over it
    ],
)
def test_an_interval_ends_where_megatron_starts_its_counts_anew(of_call: dict[str, Any], ends: bool) -> None:
    assert intervals.ends_interval(of_call, SimpleNamespace(log_interval=2, wandb_project="p")) is ends
    assert not intervals.ends_interval(of_call, SimpleNamespace(log_interval=2, wandb_project=""))


def test_a_training_log_that_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts_nothing(loss_dict, total_loss_dict, iteration, skipped_iter, is_first_iteration): ...  # type: ignore[no-untyped-def]

    def takes_else(losses):  # type: ignore[no-untyped-def]
        return losses["skipped iterations"], losses["nan iterations"]

    assert intervals.is_known(training.training_log)
    for unknown in (counts_nothing, takes_else):
        monkeypatch.setattr(training, "training_log", unknown)
        assert intervals.install() == []
        assert training.training_log is unknown


RANKS = """
import json, os, sys
import torch
sys.path.insert(0, sys.argv[1])
import cuda_on_cpu, intervals
cuda_on_cpu.install()
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
bytes_of = [{"memory": 5 << 30, "reserved": 7 << 30}, {"memory": 180 << 30, "reserved": 7 << 30},
            {"memory": 6 << 30, "reserved": 1}]
found = intervals.highest(bytes_of[rank])
with open(f"found{rank}.json", "w") as file:
    json.dump(found, file)
torch.distributed.destroy_process_group()
"""


def test_ranks_agree_on_the_busiest_and_its_memory(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    subprocess.run(command("ranks.py", str(JOB), ranks=3), cwd=tmp_path, check=True, timeout=300)
    found = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(3)]
    expected = {"peak_memory_gib": 180, "peak_memory_rank": 1, "peak_reserved_gib": 7, "peak_reserved_rank": 0}
    assert found == [expected] * 3


def test_the_resident_peak_is_that_since_the_last_time() -> None:
    mib = 1 << 20
    intervals.resident_peak()
    before = intervals.resident_peak()["rss"]
    held = bytearray(b"x" * (300 * mib))
    del held
    assert intervals.resident_peak()["rss"] > before + 250 * mib
    assert intervals.resident_peak()["rss"] < before + 50 * mib


def test_a_gpus_peaks_are_those_since_the_last_time(
    one_rank: tuple[WandbFace, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU's answers in their place: what is asked, and that it starts anew."""
    face, _ = one_rank
    peaks = {"max_memory_allocated": 3 << 30, "max_memory_reserved": 4 << 30}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in peaks:
        monkeypatch.setattr(torch.cuda, name, lambda name=name: peaks[name])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.update(dict.fromkeys(peaks, 1 << 29)))
    for iteration in (2, 4):
        training.training_log({}, {}, iteration, 0)
    face.finish()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [[v for k, v in line["metrics"].items() if k.startswith("peak_")] for line in lines if "step" in line]
    assert found == [[3.0, 0, 4.0, 0], [0.5, 0, 0.5, 0]]
    assert list(lines[1]["metrics"])[2:] == [
        *("peak_memory_gib", "peak_memory_rank", "peak_reserved_gib", "peak_reserved_rank"),
    ]


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[WandbFace, Any]:
    """Megatron's own timers, a training log that only counts its calls, and a face that writes."""
    from megatron.core.timers import Timers

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    timers = Timers(0, "max")
    timers("interval-time", log_level=0).start()
    monkeypatch.setattr("megatron.training.get_timers", lambda: timers)
    monkeypatch.setattr("megatron.training.get_args", lambda: SimpleNamespace(log_interval=2, wandb_project="p"))

    def training_log(loss_dict, total_loss_dict, iteration, skipped_iter, is_first_iteration=False):  # type: ignore[no-untyped-def]
        total_loss_dict["skipped iterations"] = total_loss_dict["nan iterations"] = 0
        return iteration, ['skipped iterations', 'nan iterations']  # fmt: skip

    monkeypatch.setattr(training, "training_log", training_log)
    face = WandbFace(tmp_path / "metrics.jsonl")
    monkeypatch.setitem(sys.modules, "wandb", face)
    monkeypatch.setattr(face, "_take_what_tensorboard_gets", lambda: None)
    face.init()
    assert intervals.install()
    return face, timers("interval-time")


def test_what_megatron_is_about_to_forget_is_kept(one_rank: tuple[WandbFace, Any], tmp_path: Path) -> None:
    face, _ = one_rank
    sums = {"skipped iterations": 1, "nan iterations": 1}
    for iteration in (3, 4):
        assert training.training_log({}, sums, iteration=iteration, skipped_iter=1)[0] == iteration
        sums |= {"skipped iterations": 1} if iteration == 3 else {}
    face.finish()
    _, line, _ = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["step"] == 4
    assert line["metrics"] == {
        "skipped_iterations": 2,
        "nan_iterations": 0,
        "peak_rss_gib": line["metrics"]["peak_rss_gib"],
        "peak_rss_rank": 0,
    }
    assert 0.05 < line["metrics"]["peak_rss_gib"] < 20


def test_the_time_it_takes_is_no_time_of_the_iterations(
    one_rank: tuple[WandbFace, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, timer = one_rank
    monkeypatch.setattr(intervals, "highest", lambda own: time.sleep(1) or {})
    timer.elapsed()
    training.training_log({}, {}, 4, 0)
    assert timer.elapsed() < 0.5
    time.sleep(0.2)
    assert timer.elapsed() > 0.1  # it goes on


def test_a_failure_is_said_once_and_the_rank_takes_part(
    one_rank: tuple[WandbFace, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    took_part: list[dict[str, int]] = []
    monkeypatch.setattr(intervals, "resident_peak", lambda: 1 / 0)
    monkeypatch.setattr(intervals, "highest", lambda own: took_part.append(own) or {})
    for iteration in (2, 4):
        assert training.training_log({"loss": "no tensor"}, {}, iteration, 1)[0] == iteration
    assert took_part == [{"rss": 0}] * 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "moekit: metrics are no longer complete: `steps_not_taken` fails: "
        "AttributeError: 'str' object has no attribute 'float'"
    ]
