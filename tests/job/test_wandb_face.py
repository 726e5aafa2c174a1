from __future__ import annotations

import enum
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runs import scalars

from moekit.job import lines as lines_of_job
from moekit.job import wandb_face
from moekit.job.lines import Lines
from moekit.job.wandb_face import WandbFace

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attempts" / "1" / "metrics.jsonl"


@pytest.fixture
def face(path: Path) -> WandbFace:
    face = WandbFace(path)
    face.init(dir="somewhere", name="run", project="project", config={}, entity="someone")
    return face


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps(path: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line["metrics"] for line in lines(path) if "step" in line}


def test_one_call_a_scalar_becomes_one_line_a_step(face: WandbFace, path: Path) -> None:
    for step in (1, 2):
        face.log({"lm loss": torch.tensor(8.25 / step)}, step)
        face.log({"batch-size": 16}, step)
        face.log({"a": 1, "b": 2.5}, step)
    face.finish()
    assert steps(path) == {
        1: {"lm loss": 8.25, "batch-size": 16, "a": 1, "b": 2.5},
        2: {"lm loss": 4.125, "batch-size": 16, "a": 1, "b": 2.5},
    }
    assert [line.get("event", line.get("step")) for line in lines(path)] == ["config", 1, 2, "finish"]
    assert all(abs(line["time"] - time.time()) < 60 for line in lines(path))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (torch.tensor(0.1), 0.10000000149011612),  # float32, exactly
        (torch.tensor([3]), 3),
        (torch.tensor([[1.5]], dtype=torch.bfloat16), 1.5),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (torch.tensor(7.0).numpy(), 7.0),
        (torch.tensor([7.0]).numpy()[0], 7.0),
        (True, True),
        (float("nan"), "NaN"),
        (torch.tensor(float("nan")), "NaN"),
        (math.inf, "Infinity"),
        (torch.tensor(-math.inf), "-Infinity"),
    ],
)
def test_every_kind_of_number_is_written(face: WandbFace, path: Path, value: Any, written: Any) -> None:
    face.log({"x": value}, torch.tensor(5))
    face.finish()
    assert steps(path) == {5: {"x": written}}


@pytest.mark.parametrize(
    "value", [torch.zeros(3), torch.zeros(0), torch.tensor(1j), numpy.array("text"), None, "text", [1.0], object()]
)
def test_what_is_no_number_is_left_out(face: WandbFace, path: Path, value: Any) -> None:
    face.log({"x": value, "y": 1}, 1)
    face.finish()
    assert steps(path) == {1: {"y": 1}}


def test_a_step_without_numbers_is_no_line(face: WandbFace, path: Path) -> None:
    face.log({"x": "text"}, 1)
    face.finish()
    assert steps(path) == {}


def test_a_value_is_that_of_its_call(face: WandbFace, path: Path) -> None:
    buffer = torch.tensor(1.0)  # Megatron zeroes its loss buffers in place after logging
    face.log({"x": buffer}, 1)
    buffer.zero_()
    face.finish()
    assert steps(path) == {1: {"x": 1.0}}


def test_the_first_value_of_a_name_stays_also_after_a_flush(face: WandbFace, path: Path) -> None:
    face.log({"lm loss validation": 4.0}, 10)
    face.log({"lm loss validation": 5.0}, 10)
    face.flush()
    face.log({"lm loss validation": 6.0}, 10)
    face.log({"lm loss validation": 3.0}, 11)
    face.finish()
    assert steps(path) == {10: {"lm loss validation": 4.0}, 11: {"lm loss validation": 3.0}}


def test_a_call_before_any_step_is_left_out(face: WandbFace, path: Path) -> None:
    face.log({"x": 1})
    face.log({"y": 2}, 1)
    face.finish()
    assert steps(path) == {1: {"y": 2}}


def test_a_call_without_step_belongs_to_the_current_one(face: WandbFace, path: Path) -> None:
    face.log({"x": 1}, step=3)
    face.log({"y": 2})
    face.finish()
    assert steps(path) == {3: {"x": 1, "y": 2}}


class Backend(enum.Enum):
    flash = 1


def test_config_is_plain_text_and_may_grow(path: Path) -> None:
    face = WandbFace(path)
    config = {
        "_is_global_batch_size_explicitly_specified": True,
        "lr": 3e-4,
        "inf": math.inf,
        "none": None,
        "backend": Backend.flash,
        "dtype": torch.bfloat16,
        "function": torch.nn.functional.silu,
        "class": torch.nn.Linear,
        "set": {"b", "a"},
        "object": object(),
        "path": Path("a/b"),
        "list": [1, {"nan": math.nan}, (Backend.flash,)],
    }
    face.init(config=config)
    face.config.update({"slurm_job_name": "N/A"}, allow_val_change=True)
    face.flush()
    first, second = lines(path)
    assert first["config"] == {
        "is_global_batch_size_explicitly_specified": True,
        "lr": 3e-4,
        "inf": "Infinity",
        "none": None,
        "backend": "flash",
        "dtype": "torch.bfloat16",
        "function": "silu",
        "class": "Linear",
        "set": ["a", "b"],
        "object": "object",
        "path": "a/b",
        "list": [1, {"nan": "NaN"}, ["flash"]],
    }
    assert second["config"] == {"slurm_job_name": "N/A"}
    assert "_is_global_batch_size_explicitly_specified" in config  # Megatron's own arguments are left alone


def test_it_is_the_module_that_an_import_finds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    face = wandb_face.install(path)
    import wandb  # type: ignore[import-not-found]

    assert wandb == face
    assert bool(wandb)
    assert importlib.util.find_spec("wandb") is not None
    assert not path.exists()  # ranks other than the last never call `init`


def test_checkpoint_artifacts_go_nowhere(face: WandbFace, path: Path) -> None:
    artifact = face.Artifact("checkpoints", type="model", metadata={"iteration": 10})
    artifact.add_reference("file:///checkpoints/iter_0000010", checksum=False)
    artifact.add_file("checkpoints/latest_checkpointed_iteration.txt")
    assert face.run is not None
    face.run.log_artifact(artifact, aliases=["iter_0000010"])
    face.run.use_artifact("local/project/checkpoints:iter_0000010")
    assert f"{face.run.entity}/{face.run.project}" == "local/project"
    assert len(lines(path)) == 1


def test_finish_may_come_twice_and_calls_after_it_are_harmless(face: WandbFace, path: Path) -> None:
    face.log({"x": 1}, 1)
    face.finish()
    face.finish()
    face.log({"x": 1}, 2)
    face.flush()
    assert [line.get("event") for line in lines(path)] == ["config", None, "finish"]


class OnDevice:
    """A GPU's scalar, where there is no GPU."""

    device = torch.device("cuda")

    def __init__(self, value: float) -> None:
        self.value = value

    def numel(self) -> int:
        return 1

    def item(self) -> float:
        return self.value


@pytest.mark.parametrize("value", [1, torch.tensor(1), OnDevice(1)])
def test_a_quiet_step_is_written_by_the_timer(path: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(wandb_face, "QUIET_SECONDS", 0.5)
    face = WandbFace(path)
    face.init()
    face.log({"x": value}, 1)
    deadline = time.monotonic() + 10
    while not steps(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert steps(path) == {1: {"x": 1}}
    face.log({"lm loss validation": 4.0}, 1)
    face.finish()
    assert [line["metrics"] for line in lines(path) if "step" in line] == [{"x": 1}, {"lm loss validation": 4.0}]


def test_a_failure_warns_once_and_never_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "metrics.jsonl"
    face = WandbFace(path)
    face.init(config={"a": 1})
    face.log({"x": 1}, "no step")
    face.log({"x": 1}, 1)
    face.finish()
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"moekit: metrics are no longer complete: `{path}`: FileExistsError: ")


def test_a_warning_that_nobody_can_read_is_none(face: WandbFace, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    face.log({"x": 1}, "no step")
    with (path.parent / "closed").open("w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
    face.warn("again")
    WandbFace(path).warn("of another")
    face.config.update(["neither keys nor values"])
    face.log({"x": 1}, 1)
    face.finish()
    assert steps(path) == {1: {"x": 1}}


def test_a_full_disk_does_not_stop_the_training(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    face = WandbFace(Path("/dev/full"))
    face.init(config={"a": 1})
    for step in range(3):
        face.log({"x": 1}, step)
    face.finish()
    assert capsys.readouterr().err.count("metrics are no longer complete") == 1


@pytest.fixture
def tensorboard(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WandbFace, Any]]:
    """A face, and TensorBoard's writer of the same process."""
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.setattr(SummaryWriter, "add_scalar", SummaryWriter.add_scalar)  # put back at the end
    face = WandbFace(path)
    face.init()
    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        yield face, writer


def test_what_only_tensorboard_gets_is_written(tensorboard: tuple[WandbFace, Any], path: Path) -> None:
    face, writer = tensorboard
    writer.add_scalar("mem-allocated-bytes", 1 << 30, 7)
    writer.add_scalar("lm loss validation-wiki ppl", 20.5, 7)
    writer.add_scalar("lm loss validation-wiki ppl vs samples", 20.5, 56)
    writer.add_scalar("lm loss vs samples", 3.0, 56)
    face.log({"samples vs steps": 56}, 7)
    face.finish()
    written = {"mem-allocated-bytes": 1 << 30, "lm loss validation-wiki ppl": 20.5, "samples vs steps": 56}
    assert steps(path) == {7: written}


def test_tensorboard_has_what_it_would_have_without(
    tensorboard: tuple[WandbFace, Any], tmp_path: Path, path: Path
) -> None:
    values = [torch.tensor(0.1), torch.tensor([7], dtype=torch.int64), 3, 0.25, True, math.nan, torch.tensor(math.inf)]
    face, writer = tensorboard
    for number, value in enumerate(values):
        writer.add_scalar(f"value {number}", value, 4)
    face.finish()
    writer.flush()
    kept = scalars(tmp_path / "tensorboard")
    assert [kept[f"value {number}"][4] for number in range(len(values))] == [
        pytest.approx(float(value), nan_ok=True, rel=1e-7) for value in values
    ]
    assert list(steps(path)[4]) == list(kept)


def test_a_scalar_that_tensorboard_refuses_is_refused_as_before(tensorboard: tuple[WandbFace, Any]) -> None:
    _, writer = tensorboard
    with pytest.raises((AssertionError, ValueError)):
        writer.add_scalar("two numbers", torch.zeros(2), 1)


def test_a_tensor_is_read_off_its_device_once(tensorboard: tuple[WandbFace, Any]) -> None:
    face, writer = tensorboard
    read: list[float] = []

    class Counted(OnDevice):
        def item(self) -> float:
            read.append(self.value)
            return self.value

    loss = Counted(2.0)
    writer.add_scalar("lm loss", loss, 3)
    face.log({"lm loss": loss}, 3)
    assert read == [2.0]


def test_a_file_system_that_hangs_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_face, "WAIT_SECONDS", 0.5)
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)  # opening it waits until someone reads
    face, begin = WandbFace(pipe), time.monotonic()
    face.init(config={"a": 1})
    for step in range(1, 1001):
        face.log({"lm loss": 1.0}, step)
    face.flush()
    assert time.monotonic() - begin < 4
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [f"moekit: metrics are no longer complete: `{pipe}` was not written within 0.5 s"]
    with pipe.open() as file:  # it goes on
        face.finish()
        kept = [json.loads(file.readline()) for _ in range(1002)]
    assert [line.get("event", line.get("step")) for line in kept] == ["config", *range(1, 1001), "finish"]


def test_what_no_disk_takes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_of_job, "MOST_WAITING", 10)
    os.mkfifo(tmp_path / "pipe")
    failures: list[str] = []
    writer = Lines(tmp_path / "pipe", lambda: None, failures.append)
    for number in range(100):
        writer.add(str(number))
    assert len(failures) in (89, 90)  # the thread may hold one more
    assert failures[0] == f"`{tmp_path / 'pipe'}` takes nothing any more, 10 lines wait for it"
    (tmp_path / "pipe").open()  # let the thread go


def test_a_line_after_half_a_line_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, once = os.write, [b"second\n"]

    def half(descriptor: int, data: bytes) -> int:
        if data in once:
            once.clear()
            write(descriptor, data[:3])
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", half)
    failures: list[str] = []
    path = tmp_path / "x" / "lines"
    writer = Lines(path, lambda: None, failures.append)
    for text in ("first", "second", "third", "fourth"):
        writer.add(text)
    assert writer.wait(10)
    assert path.read_text() == "first\nsec\nthird\nfourth\n"
    assert failures == [f"`{path}`: OSError: [Errno 28] No space left on device"]


@pytest.mark.parametrize(("end", "written"), [("pass", [1, 2]), ("os.kill(os.getpid(), signal.SIGKILL)", [1])])
def test_what_is_on_disk_when_a_process_ends_early(path: Path, end: str, written: list[int]) -> None:
    script = f"""
import os, pathlib, signal, time
from moekit.job.wandb_face import WandbFace
face = WandbFace(pathlib.Path({str(path)!r}))
face.init()
face.log({{"x": 1}}, 1)
face.log({{"x": 1}}, 2)
time.sleep(0.5)
{end}
"""
    code = subprocess.run([sys.executable, "-c", script], check=False).returncode
    assert code == (0 if end == "pass" else -signal.SIGKILL)
    assert sorted(steps(path)) == written
    assert not any(line.get("event") == "finish" for line in lines(path))


def test_sigterm_does_not_wait_for_a_value_that_is_being_read(path: Path) -> None:
    script = f"""
import pathlib, time
from moekit.job import exits
from moekit.job.wandb_face import WandbFace
class Stuck:  # a GPU's scalar behind a collective that no one joins
    def numel(self):
        return 1
    def item(self):
        print("ready", flush=True)
        time.sleep(60)
face = WandbFace(pathlib.Path({str(path)!r}))
face.init()
face.log({{"x": 1}}, 1)
exits.record_sigterm(pathlib.Path({str(path.with_name("rank0.json"))!r}), face.flush_unless_busy)
face.log({{"y": Stuck()}}, 1)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert json.loads(path.with_name("rank0.json").read_text())["reason"] == "SIGTERM"


def test_a_flush_that_need_not_wait_is_done(face: WandbFace, path: Path) -> None:
    face.log({"x": 1}, 1)
    face.flush_unless_busy()
    assert steps(path) == {1: {"x": 1}}


def test_it_costs_far_less_than_a_millisecond_a_step(face: WandbFace) -> None:
    loss = torch.tensor(1.0)
    begin = time.process_time()
    for step in range(1000):
        for layer in range(30):
            face.log({f"moe/load_balancing_loss_layer_{layer}": loss}, step)
    assert (time.process_time() - begin) / 1000 < 0.5e-3
