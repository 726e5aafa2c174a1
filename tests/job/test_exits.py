from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PRELUDE = """
import atexit, ctypes, os, pathlib, signal, sys, threading, time
from moekit.job import exits
path = pathlib.Path(sys.argv[1])
"""


def start(script: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what a script does to its process group stays there
    )


def record_of(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    assert abs(record.pop("time") - time.time()) < 60
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing temporary is left
    return record


@pytest.mark.parametrize(
    ("program", "process_code", "record"),
    [
        ("None", 0, {"code": 0, "reason": "ok"}),
        ("sys.exit()", 0, {"code": 0, "reason": "SystemExit: None"}),
        ("sys.exit(16)", 16, {"code": 16, "reason": "SystemExit: 16"}),
        ("sys.exit('no data')", 1, {"code": 1, "reason": "SystemExit: no data"}),
        ("1 / 0", 1, {"code": 1, "reason": "ZeroDivisionError: division by zero"}),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, {"code": 130, "reason": "SIGINT"}),
    ],
)
def test_every_ending_is_recorded_and_kept(
    tmp_path: Path, program: str, process_code: int, record: dict[str, Any]
) -> None:
    path = tmp_path / "exit" / "rank0.json"
    process = start(f"exits.run_recorded(lambda: {program}, path)", path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == process_code, errors
    assert record_of(path) == record
    assert ("Traceback" in errors) == (process_code in (1, -signal.SIGINT) and "no data" not in program)


@pytest.mark.parametrize(("program", "code"), [("None", 0), ("sys.exit(16)", 16), ("1 / 0", 1)])
@pytest.mark.parametrize(
    "left_behind",
    [
        """
class Aborts:
    def __del__(self, abort=os.abort):
        abort()
sys.kept = Aborts()
""",
        # In C++ and without Python's lock most of the time, like a worker of Gloo that drops the last tensors.
        """
import torch
def calculate():
    tensor = torch.ones(1_000_000)
    while True:
        tensor + tensor
threading.Thread(target=calculate, daemon=True).start()
time.sleep(0.2)
""",
    ],
    ids=["finalizer", "thread"],
)
def test_what_aborts_an_interpreter_on_its_way_out_changes_no_ending(
    tmp_path: Path, left_behind: str, program: str, code: int
) -> None:
    path = tmp_path / "exit" / "rank0.json"
    process = start(f"{left_behind}\nexits.run_recorded(lambda: {program}, path)", path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert record_of(path)["code"] == code
    assert ("ZeroDivisionError" in errors) == (program == "1 / 0")


def test_a_rank_leaves_when_its_threads_and_handlers_are_done(tmp_path: Path) -> None:
    script = """
def program():
    threading.Thread(target=lambda: (time.sleep(0.5), print("thread"))).start()
    atexit.register(print, "handler")
    ctypes.CDLL(None).printf(b"buffered by C\\n")
exits.run_recorded(program, path)
"""
    process = start(script, tmp_path / "rank0.json")
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert sorted(out.splitlines()) == ["buffered by C", "handler", "thread"]


@pytest.mark.parametrize(
    "waiting",
    [
        "time.sleep(60)",
        "signal.set_wakeup_fd(-1); time.sleep(60)",  # as after asyncio's event loop
        # A wait in C that no signal interrupts, as in a collective: the same mutex is locked twice.
        "mutex = ctypes.create_string_buffer(128); [ctypes.CDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]",
    ],
)
def test_sigterm_ends_a_rank_at_once_with_a_record(tmp_path: Path, waiting: str) -> None:
    path = tmp_path / "exit" / "rank0.json"
    seen = tmp_path / "seen"
    script = f"""
def after():
    pathlib.Path({str(seen)!r}).write_text(path.read_text())
    1 / 0
exits.record_sigterm(path, after)
print("ready", flush=True)
{waiting}
"""
    process = start(script, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(timeout=30) == 143
    assert record_of(path) == {"code": 143, "reason": "SIGTERM"}
    assert json.loads(seen.read_text())["reason"] == "SIGTERM"  # written before anything that may take its time


def test_sigterm_after_the_end_does_not_hide_it(tmp_path: Path) -> None:
    path = tmp_path / "exit" / "rank0.json"
    script = """
exits.record_sigterm(path, after=lambda: None)
atexit.register(time.sleep, 60)  # an interpreter that takes its time
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
exits.run_recorded(lambda: 1 / 0, path)
"""
    process = start(script, path)
    process.communicate(timeout=30)
    assert record_of(path) == {"code": 1, "reason": "ZeroDivisionError: division by zero"}


def test_a_record_of_an_earlier_start_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text('{"code": 0, "reason": "ok", "time": 0}')
    process = start("exits.run_recorded(lambda: os._exit(9), path)", path)
    assert process.wait(timeout=60) == 9
    assert not path.exists()


def test_sigterm_of_a_forked_worker_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "exit" / "rank0.json"
    script = """
exits.record_sigterm(path, after=lambda: None)
for _ in range(500):  # a signal may come before the child has run one line
    worker = os.fork()
    if not worker:
        time.sleep(60)
        os._exit(1)
    os.kill(worker, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
time.sleep(1)
print("alive")
"""
    out, errors = start(script, path).communicate(timeout=60)
    assert out == "alive\n", errors
    assert not path.exists()


def test_a_forked_worker_keeps_the_handler_that_megatron_installs(tmp_path: Path) -> None:
    script = """
exits.record_sigterm(path, after=lambda: None)
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
worker = os.fork()
if not worker:
    time.sleep(60)
    os._exit(1)
os.kill(worker, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""
    out, errors = start(script, tmp_path / "rank0.json").communicate(timeout=60)
    assert out == "7\n", errors


def test_a_handler_that_megatron_installs_decides(tmp_path: Path) -> None:
    path = tmp_path / "exit" / "rank0.json"
    script = """
exits.record_sigterm(path, after=lambda: None)
signal.signal(signal.SIGTERM, lambda *_: print("megatron's"))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
"""
    process = start(script, path)
    assert process.communicate(timeout=60)[0] == "megatron's\n"
    assert process.returncode == 0
    assert not path.exists()


@pytest.mark.parametrize(("program", "process_code"), [("None", 0), ("sys.exit(16)", 16)])
def test_a_record_that_cannot_be_written_changes_no_ending(tmp_path: Path, program: str, process_code: int) -> None:
    (tmp_path / "exit").write_text("a file where the folder would be")
    path = tmp_path / "exit" / "rank0.json"
    process = start(f"exits.run_recorded(lambda: {program}, path)", path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == process_code
    begin = f"moekit: `{path}` is missing or of an earlier start: "
    assert [line.split("Error: ")[0] for line in errors.splitlines()] == [f"{begin}NotADirectory", f"{begin}FileExists"]


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    from moekit.job import exits

    path = tmp_path / "rank0.json"
    exits.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        exits.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["rank0.json"]  # noqa: PTH208
