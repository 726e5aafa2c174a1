from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job_runs import EXPERT_PARALLEL, JOB, SAVE, TINY_MOE, read_metrics

pytestmark = pytest.mark.megatron


def test_the_helpers_of_the_wheel_are_taken_as_built(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("megatron.core.datasets.utils")
    from moekit.job import fixes

    monkeypatch.setattr(utils, "compile_helpers", utils.compile_helpers)
    with pytest.raises(SystemExit):  # the defect: `make` without a Makefile
        utils.compile_helpers()
    done = fixes.dataset_helpers()
    assert done is not None
    utils.compile_helpers()


def test_a_makefile_is_left_to_megatron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    utils = pytest.importorskip("megatron.core.datasets.utils")
    from moekit.job import fixes

    before = utils.compile_helpers
    (tmp_path / "Makefile").touch()
    monkeypatch.setattr(utils, "__file__", str(tmp_path / "utils.py"))
    assert fixes.dataset_helpers() is None
    assert utils.compile_helpers is before


def test_an_optimizer_of_transformer_engine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    distrib_optimizer = pytest.importorskip("megatron.core.optimizer.distrib_optimizer")
    from moekit.job import fixes

    before = dict(vars(distrib_optimizer.DistributedOptimizer))
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    assert fixes.optimizer_resume() is None
    assert dict(vars(distrib_optimizer.DistributedOptimizer)) == before


@pytest.mark.train
@pytest.mark.parametrize("resumed", [[], ["--dist-ckpt-optim-fully-reshardable"]], indirect=True)
def test_resume_with_the_distributed_optimizer_is_exact(trained: Path, resumed: Path) -> None:
    straight = read_metrics(trained / "attempts/1/metrics.jsonl")
    parts = [read_metrics(resumed / "attempts" / attempt / "metrics.jsonl") for attempt in ("1", "2")]
    assert [sorted(part) for part in parts] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    for step, values in (parts[0] | parts[1]).items():
        expected = {name: value for name, value in straight[step].items() if not name.endswith("-time")}
        assert {name: value for name, value in values.items() if not name.endswith("-time")} == expected, step


@pytest.mark.train
def test_resume_in_fp32_is_exact(tmp_path: Path, launch: Callable[..., None]) -> None:
    argv = [word for word in (*TINY_MOE, *EXPERT_PARALLEL, *SAVE, "--log-interval", "1") if word != "--bf16"]
    argv += ["--train-iters", "4", "--eval-interval", "100"]
    launch(tmp_path, [*argv, "--exit-interval", "2"])
    launch(tmp_path, [*argv, "--load", "checkpoints"], attempt=2)
    (tmp_path / "straight").mkdir()
    launch(tmp_path / "straight", argv)
    parts = [read_metrics(tmp_path / "attempts" / attempt / "metrics.jsonl") for attempt in ("1", "2")]
    assert [sorted(part) for part in parts] == [[1, 2], [3, 4]]
    straight = read_metrics(tmp_path / "straight/attempts/1/metrics.jsonl")
    for step, values in (parts[0] | parts[1]).items():
        assert (values["lm loss"], values["grad-norm"]) == (straight[step]["lm loss"], straight[step]["grad-norm"])


SIGNALLED = """
import multiprocessing, os, signal, sys
sys.path.insert(0, {job!r})
import fixes

if __name__ == "__main__":
    sys.argv = ["entry.py", *{flags!r}]
    print(bool(fixes.exit_signal()))
    manager = multiprocessing.get_context("spawn").Manager()
    queue = manager.Queue()
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(manager._process.pid, signum)
    manager._process.join(0.5)
    try:
        queue.put(17)
        print(queue.get())
    except (OSError, EOFError):
        print("gone")
    worker = multiprocessing.get_context("spawn").Process(target=signal.pause, daemon=True)
    worker.start()  # and what still runs at the end is ended
"""


@pytest.mark.parametrize(("flags", "said"), [(["--exit-signal-handler"], "True\n17\n"), ([], "False\ngone\n")])
def test_the_signal_to_save_leaves_those_that_write(tmp_path: Path, flags: list[str], said: str) -> None:
    script = tmp_path / "signalled.py"
    script.write_text(SIGNALLED.format(job=str(JOB), flags=flags))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


KILLED = """
import multiprocessing, os, signal, sys, time
sys.path.insert(0, {job!r})
import fixes

if __name__ == "__main__":
    fixes.orphans()
    queue = multiprocessing.get_context("spawn").Manager().Queue()
    queue.put(17)
    time.sleep(2.5)  # it outlives some looks
    print(queue.get(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_leaves_no_helper(tmp_path: Path) -> None:
    """The helpers hold standard output too: it closes once all are gone."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(job=str(JOB)))
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "17\n")
