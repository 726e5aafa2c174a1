"""`moekit rehearse` with the real Megatron: what it says, where a refusal lands, and that nothing is left behind."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moekit.megatron.cpu_limits import _LIMITS
from moekit.rehearse.without import FURTHER

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rehearse.md"

pytestmark = [pytest.mark.megatron, pytest.mark.train, pytest.mark.timeout(900)]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory like a user's; temporary files lie beside it."""
    (tmp_path / "work").mkdir()
    (tmp_path / ("temporary" * 10)).mkdir()
    (tmp_path / "work" / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path / "work"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "moekit", "rehearse", *words]


def environment(folder: Path) -> dict[str, str]:
    """With temporary files in a folder whose path is longer than a socket's may be."""
    return {**os.environ, "TMPDIR": str(folder.parent / ("temporary" * 10)), "COLUMNS": "100"}


@pytest.fixture
def rehearse(folder: Path) -> Run:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*words), cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
        )

    return run


def left_behind(folder: Path) -> list[Path]:
    return list((folder.parent / ("temporary" * 10)).glob("moekit-rehearsal-*"))


def masked(text: str) -> str:
    """Without what differs from run to run and place to place: seconds, losses behind their second digit, paths."""
    text = re.sub(r"(\d+\.\d\d)\d\b", r"\1x", re.sub(r"\b\d+\xa0s:", "N\xa0s:", text))
    return text.replace(f"{ROOT}/recipes", "recipes")


def shown(number: int) -> tuple[str, str]:
    """(command, output) of a block of the page."""
    return re.findall(r"^```text\n\$ moekit rehearse (.*?)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[
        number
    ]


def test_the_page_shows_what_it_prints(rehearse: Run, folder: Path) -> None:
    words, text = shown(0)
    done = rehearse(*words.split())
    assert done.returncode == 0, done.stderr
    assert masked(done.stdout + done.stderr) == masked(text)
    assert left_behind(folder) == []


def test_the_page_lists_what_a_cpu_cannot_do() -> None:
    rows = [
        f"| {limit.feature} | {'torch does it' if limit.build == 'replaced' else 'left out'} | {limit.reason} |"
        for limit in (*(limit for limit, _ in _LIMITS), *(limit for limit, _ in FURTHER))
    ]
    assert "\n".join(rows) in PAGE.read_text()


def test_a_refusal_is_at_the_users_line(rehearse: Run, folder: Path) -> None:
    words, text = shown(1)
    (folder / words).write_text(dict(re.findall(r"^```yaml (\S+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S))[words])
    done = rehearse(words)
    assert done.returncode == 1
    kept = left_behind(folder)
    assert len(kept) == 1, "the log of what was refused is kept"
    assert masked((done.stdout + done.stderr).replace(str(kept[0]), "/tmp/moekit-rehearsal-x")) == masked(text)


def test_nan_is_called_nan_though_megatron_dies_of_another(rehearse: Run, folder: Path) -> None:
    (folder / "hot.yaml").write_text("base: first_moe\nschedule: {lr: 1.0e+30}\n")
    done = rehearse("hot.yaml")
    assert done.returncode == 1
    assert "hot.yaml: in the rehearsal rank " in done.stderr
    assert "found NaN in local grad norm" in done.stderr


def parts(done: subprocess.CompletedProcess[str], recipe: str) -> dict[str, Any]:
    said = json.loads(done.stdout)[recipe]
    return {part["name"]: part for part in said["parts"]} | {"": said}


def test_upcycling_starts_from_a_dense_run_and_goes_on_from_its_own_checkpoint(rehearse: Run, folder: Path) -> None:
    done = rehearse("upcycle", "--json", "--keep", "kept")
    assert done.returncode == 0, done.stderr
    found = parts(done, "upcycle")
    assert found[""]["answer"] == "passed"
    assert list(found)[-4:-1] == [
        "two processes, run `dense_save` that it begins from",
        "two processes, first start",
        "two processes, from its checkpoint",
    ]
    losses = {name: part["losses"] for name, part in found.items() if name.startswith("two processes")}
    assert [len(several) for several in losses.values()] == [3, 3, 3]
    assert all(abs(loss - math.log(512)) < 0.1 for several in losses.values() for loss in several)
    run = folder / "kept" / "1" / "runs" / "upcycle"
    logs = [(run / "attempts" / number / "train.log").read_text() for number in ("1", "2")]
    assert ["Upcycled checkpoint saved to checkpoints" in log for log in logs] == [True, False]
    assert "--moe-use-upcycling" not in (run / "argv.resume").read_text()


def test_what_a_cpu_cannot_do_is_left_out_by_name_and_never_a_pass(rehearse: Run) -> None:
    done = rehearse("fp8", "--json")
    found = parts(done, "fp8")
    assert {"feature": "FP8", "why": "its kernels are Transformer Engine's", "how": "left out"} in found[""]["left_out"]
    changes = {change["field"]: change for change in found[""]["changes"]["two processes"]}
    assert changes["precision.fp8_format"]["to"] is None
    assert changes["precision.fp8_format"]["why"].startswith("FP8")
    build = next(verdict for verdict in found["full size"]["verdicts"] if verdict["stage"] == "build")
    assert (build["answer"], build["feature"]) == ("not_judged", "FP8")
    assert found["two processes"]["answer"] == "passed"


def test_a_folder_that_is_there_is_not_written_into(rehearse: Run, folder: Path) -> None:
    (folder / "there").mkdir()
    done = rehearse("dense", "--keep", "there")
    assert (done.returncode, done.stdout) == (1, "")
    assert "`there` already exists" in done.stderr


def test_a_recipe_that_breaks_a_rule_is_not_rehearsed(rehearse: Run, folder: Path) -> None:
    (folder / "wrong.yaml").write_text("base: first_moe\nrouter: {topk: 65}\n")
    done = rehearse("wrong.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("wrong.yaml:2: ")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_runs_on_when_it_is_stopped(stop: signal.Signals, folder: Path) -> None:
    process = subprocess.Popen(
        command("quickstart", "--keep", "kept"),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    log = folder / "kept" / "1" / "runs" / "quickstart" / "attempts" / "1" / "train.log"
    until(lambda: log.exists() and "iteration" in log.read_text(errors="replace"), 300)
    assert list(processes_in(folder)), "it is training"
    process.send_signal(stop)
    assert process.wait(60) != 0
    assert process.stderr
    assert "Traceback" not in process.stderr.read()
    until(lambda: not list(processes_in(folder)), 60)


def processes_in(folder: Path) -> Iterator[int]:
    """Processes whose working directory is in a folder, the ranks among them."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            place = str((process / "cwd").readlink())
        except OSError:
            continue
        if place.startswith(str(folder / "kept")):
            yield int(process.name)


def until(true: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)
