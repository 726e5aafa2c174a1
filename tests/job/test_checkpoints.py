"""What lies in `checkpoints/`, judged on what real saves of the real Megatron left, whole and harmed."""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import saves
from job_runs import EXPERT_PARALLEL, JOB, TINY_MOE, started

from moekit.job import checkpoints, saved

pytestmark = [pytest.mark.megatron, pytest.mark.train]
LATEST = checkpoints.TRACKER
ARGV = [*TINY_MOE, *EXPERT_PARALLEL, "--save", "checkpoints", "--eval-interval", "100", "--save-interval", "2"]


@pytest.fixture(scope="module")
def torch_dist(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., None]) -> Path:
    """The checkpoints of iterations 2, 4 and 6 in Megatron's own format."""
    run_dir = tmp_path_factory.mktemp("torch_dist")
    launch(run_dir, [*ARGV, "--train-iters", "6"])
    return run_dir / "checkpoints"


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., None]) -> Path:
    """The same as one file, or two, a rank."""
    run_dir = tmp_path_factory.mktemp("torch")
    launch(run_dir, [*ARGV, "--train-iters", "6", "--ckpt-format", "torch"])
    return run_dir / "checkpoints"


@pytest.fixture(scope="module")
def torch_dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iterations 4 and 6 as PyTorch alone writes them: Megatron's `torch_dcp` itself needs a GPU."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder = tmp_path_factory.mktemp("torch_dcp")
    for step in (4, 6):
        state = {"model": {"weight": torch.ones(1000)}, "args": argparse.Namespace(lr=3e-3), "iteration": step}
        dcp.save(state, checkpoint_id=folder / f"iter_{step:07}", no_dist=True)
    (folder / LATEST).write_text("6")
    return folder


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(request.getfixturevalue(name), tmp_path / "run" / "checkpoints"))


def cut(path: Path, by: int = 1) -> None:
    os.truncate(path, path.stat().st_size - by)


def zero(path: Path) -> None:
    """As long as before, and nothing in it: a file whose blocks were never written."""
    path.write_bytes(bytes(path.stat().st_size))


HARMS: list[tuple[str, Callable[[Path], object], str]] = [
    ("torch_dist", lambda at: cut(at / "__0_0.distcp"), "`__0_0.distcp` has "),
    ("torch_dist", lambda at: cut(at / "__1_0.distcp"), "`__1_0.distcp` has "),
    ("torch_dist", lambda at: (at / "__0_0.distcp").unlink(), "`__0_0.distcp` is missing"),
    ("torch_dist", lambda at: (at / "__1_0.distcp").unlink(), "`__1_0.distcp` is missing"),
    ("torch_dist", lambda at: zero(at / "__0_0.distcp"), "`__0_0.distcp` is cut off, or no file of torch's"),
    ("torch_dist", lambda at: (at / ".metadata").unlink(), "`.metadata` is missing"),
    ("torch_dist", lambda at: cut(at / ".metadata"), "`.metadata` is no whole pickle (UnpicklingError)"),
    ("torch_dist", lambda at: zero(at / ".metadata"), "`.metadata` is no whole pickle (UnpicklingError)"),
    ("torch_dist", lambda at: os.truncate(at / ".metadata", 0), "`.metadata` is no whole pickle (EOFError)"),
    ("torch_dist", lambda at: (at / "metadata.json").unlink(), "`metadata.json` is missing"),
    ("torch_dist", lambda at: cut(at / "metadata.json"), "`metadata.json` is cut off"),
    ("torch_dist", lambda at: (shutil.rmtree(at), at.mkdir()), "it is empty"),
    ("torch_dist", lambda at: shutil.rmtree(at), "it is not there"),
    ("torch_dcp", lambda at: cut(at / "__0_0.distcp"), "`__0_0.distcp` has "),
    ("torch_dcp", lambda at: (at / "__0_0.distcp").unlink(), "`__0_0.distcp` is missing"),
    ("torch_dcp", lambda at: (at / ".metadata").unlink(), "`.metadata` is missing"),
    *[
        ("legacy", lambda at, rank=rank, name=name, harm=harm: harm(at / rank / name), reason.format(f"{rank}/{name}"))
        for rank in ("mp_rank_00_000", "mp_rank_00_001")
        for name in ("model_optim_rng.pt", "distrib_optim.pt")
        for harm, reason in ((cut, "`{}` is cut off, or no file of torch's"), (Path.unlink, "`{}` is missing"))
    ],
    ("legacy", lambda at: shutil.rmtree(at / "mp_rank_00_001"), "1 of 2 folders `mp_rank_*` are there"),
    ("legacy", lambda at: (shutil.rmtree(at), at.mkdir()), "it is empty"),
]


@pytest.mark.parametrize("name", ["torch_dist", "legacy", "torch_dcp"])
def test_what_megatron_saved_is_complete(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    assert {checkpoints.missing(checkpoints.folder_of(folder, step)) for step in checkpoints.steps(folder)} == {""}
    assert checkpoints.latest(folder) == checkpoints.Found(6, folder / "iter_0000006")


@pytest.mark.parametrize(("name", "harm", "reason"), HARMS, ids=[f"{name}-{why}" for name, _, why in HARMS])
def test_what_is_not_complete_is_passed_over(
    name: str, harm: Callable[[Path], object], reason: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    last = folder / "iter_0000006"
    harm(last)
    assert checkpoints.missing(last).startswith(reason)
    found = checkpoints.settle(folder)
    assert (found.step, found.folder) == (4, folder / "iter_0000004")
    assert reason in found.said[0] or "is not there" in found.said[0]
    assert (folder / LATEST).read_text() == "4"
    assert not last.exists()
    kept = list((folder / "incomplete").iterdir()) if (folder / "incomplete").exists() else []
    assert [path.name for path in kept] == (["iter_0000006-1"] if reason != "it is not there" else [])
    assert checkpoints.settle(folder) == checkpoints.Found(4, folder / "iter_0000004")  # and says so once


TRACKERS = [
    ("2", 2, ["iteration 6 is complete too, but", "iteration 4 is complete too, but"]),
    ("8", 6, ["iteration 8, which"]),
    ("", 6, ["names no checkpoint, it says ''"]),
    ("iter_6", 6, ["names no checkpoint, it says 'iter_6'"]),
    ("-6", 6, ["names no checkpoint"]),
    ("\0", 6, ["names no checkpoint"]),
    ("9" * 200, 6, ["names no checkpoint"]),
    ("release", 6, ["`release` is passed over: it is not there"]),
    (None, 6, [f"there is no `{LATEST}`"]),
    ("6\n", 6, []),
]


@pytest.mark.parametrize(("text", "step", "said"), TRACKERS, ids=[repr(text)[:20] for text, _, _ in TRACKERS])
def test_megatrons_file_decides(text: str | None, step: int, said: list[str], copied: Callable[[str], Path]) -> None:
    folder = copied("torch_dist")
    (folder / LATEST).unlink() if text is None else (folder / LATEST).write_text(text)
    found = checkpoints.latest(folder)
    assert (found.step, len(found.said)) == (step, len(said)), found.said
    assert all(part in sentence for part, sentence in zip(said, found.said, strict=True))
    checkpoints.settle(folder)
    assert (folder / LATEST).read_text().strip() == str(step)
    assert checkpoints.steps(folder) == [one for one in (2, 4, 6) if one <= step]
    newer = folder / "newer"
    moved = sorted(path.name for path in newer.glob("*"))
    assert moved == [f"iter_{one:07}-1" for one in (2, 4, 6) if one > step]


def test_a_release_is_taken(copied: Callable[[str], Path]) -> None:
    folder = copied("torch_dist")
    (folder / "iter_0000006").rename(folder / "release")
    (folder / LATEST).write_text("release")
    assert checkpoints.settle(folder) == checkpoints.Found(0, folder / "release", checkpoints.latest(folder).said)
    assert (folder / LATEST).read_text() == "release"


def test_where_none_is_complete_all_stays_unless_none_ever_was(copied: Callable[[str], Path]) -> None:
    folder = copied("torch_dist")
    for step in (2, 4, 6):
        (checkpoints.folder_of(folder, step) / "metadata.json").unlink()
    found = checkpoints.settle(folder)
    assert (found.step, found.folder, len(found.said)) == (0, None, 3)
    assert checkpoints.steps(folder) == [2, 4, 6]
    (folder / LATEST).unlink()  # as after a first save that was cut off
    assert checkpoints.settle(folder).folder is None
    assert checkpoints.steps(folder) == []
    assert checkpoints.latest(folder) == checkpoints.Found()
    assert checkpoints.settle(folder.parent / "nothing") == checkpoints.Found()


def test_what_cannot_be_read_is_no_incomplete_checkpoint(tmp_path: Path) -> None:
    """A file system that fails says nothing about a checkpoint: nothing is moved for it."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(NotADirectoryError):
        checkpoints.settle(tmp_path / "checkpoints")


def test_nothing_of_a_pickle_is_run(tmp_path: Path, copied: Callable[[str], Path]) -> None:
    import pickle

    class Call:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "was here"),)

    folder = copied("torch_dist") / "iter_0000006"
    (folder / ".metadata").write_bytes(pickle.dumps(Call()))
    assert checkpoints.missing(folder) == "`.metadata` does not say which files there are"
    assert not (tmp_path / "was here").exists()


@pytest.mark.parametrize("name", ["torch_dist", "legacy"])
def test_arguments_are_those_of_the_run(name: str, request: pytest.FixtureRequest) -> None:
    arguments = saved.saved_arguments(request.getfixturevalue(name) / "iter_0000006")
    assert (arguments["train_iters"], arguments["world_size"], arguments["lr"]) == (6, 2, 3e-3)
    assert saved.differences(arguments, [*ARGV, "--train-iters", "6"]) == []
    said = saved._options([*ARGV, "--train-iters", "6"])
    compared = [name for name in (*saved._SCHEDULE, *saved._BATCH, *saved._LAYOUT) if name in said]
    assert len(compared) == 16  # they are compared


def test_arguments_of_torch_dcp(torch_dcp: Path) -> None:
    assert saved.saved_arguments(torch_dcp / "iter_0000006") == {"lr": 3e-3}


CHANGES = [
    ("--lr 1e-3", "lr 0.003, the run 1e-3"),
    ("--min-lr 0", "min_lr 0.0003, the run 0"),
    ("--lr-decay-style linear", "lr_decay_style cosine, the run linear"),
    ("--lr-decay-iters 200", "lr_decay_iters 100, the run 200"),
    ("--lr-warmup-iters 3", "lr_warmup_iters 2, the run 3"),
    ("--lr-warmup-fraction 0.1", "lr_warmup_fraction None, the run 0.1"),
    ("--lr-wsd-decay-iters 10", "lr_wsd_decay_iters None, the run 10"),
    ("--weight-decay 0.2", "weight_decay 0.1, the run 0.2"),
    ("--train-iters 8", "train_iters 6, the run 8"),
    ("--global-batch-size 16", "global_batch_size 8, the run 16"),
    ("--micro-batch-size 4", "micro_batch_size 2, the run 4"),
    ("--rampup-batch-size 4 4 100", "rampup_batch_size None, the run 4 4 100"),
    ("--seq-length 128", "seq_length 64, the run 128"),
    ("--tensor-model-parallel-size 2", "tensor_model_parallel_size 1, the run 2"),
    ("--pipeline-model-parallel-size=2", "pipeline_model_parallel_size 1, the run 2"),
    ("--expert-model-parallel-size 1", "expert_model_parallel_size 2, the run 1"),
    ("--expert-tensor-parallel-size 2", "expert_tensor_parallel_size 1, the run 2"),
    ("--context-parallel-size 2", "context_parallel_size 1, the run 2"),
    ("--num-layers-per-virtual-pipeline-stage 1", "num_layers_per_virtual_pipeline_stage None, the run 1"),
    ("--num-virtual-stages-per-pipeline-rank 2", "num_virtual_stages_per_pipeline_rank None, the run 2"),
    ("--num-layers 4", "num_layers 2, the run 4"),
    ("--num-experts 4", "num_experts 8, the run 4"),
]


@pytest.mark.parametrize(("words", "said"), CHANGES, ids=[words for words, _ in CHANGES])
def test_what_differs_from_the_checkpoint_is_said(words: str, said: str, torch_dist: Path) -> None:
    arguments = saved.saved_arguments(torch_dist / "iter_0000006")
    argv = [*ARGV, "--train-iters", "6", *words.split()]
    assert saved.differences(arguments, argv) == [f"the checkpoint has {said}"]
    won = saved.differences(arguments, [*argv, "--override-opt-param-scheduler"])
    assert won == ([] if said.partition(" ")[0] in saved._SCHEDULE else [f"the checkpoint has {said}"])


def test_a_decay_as_long_as_the_training_is_told_of(torch_dist: Path) -> None:
    arguments = saved.saved_arguments(torch_dist / "iter_0000006")
    said = ["the checkpoint has lr_decay_iters 100, the run decays to its end, train_iters 6"]
    assert saved.differences(arguments, ["--train-iters", "6"]) == said


def test_megatron_refuses_a_longer_training_too(copied: Callable[[str], Path]) -> None:
    """Also with a decay of its own length: the weight decay's is the training's (optimizer_param_scheduler.py:397)."""
    run_dir = copied("torch_dist").parent
    with started(run_dir, [*ARGV, "--train-iters", "8", "--load", "checkpoints"], attempt=2) as torchrun:
        assert torchrun.wait(timeout=300) != 0
    assert "total number of weight decay iterations do not match" in (run_dir / "log.2").read_text()


def test_old_ones_are_deleted_while_it_trains(tmp_path: Path, launch: Callable[..., None]) -> None:
    argv = [*ARGV, "--save-interval", "1", "--train-iters", "9"]
    launch(tmp_path, argv, env={"MOEKIT_KEEP_LAST": "2", "MOEKIT_KEEP_EVERY": "4"})
    assert checkpoints.steps(tmp_path / "checkpoints") == [4, 8, 9]
    assert not list((tmp_path / "checkpoints").glob(".pruned-*"))
    assert "moekit: deleted the checkpoints of iterations " in (tmp_path / "log.1").read_text()


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "tracker", "left"),
    [
        (1, None, "6", [6]),
        (2, None, "6", [4, 6]),
        (3, None, "6", [2, 4, 6]),
        (4, None, "6", [2, 4, 6]),
        (1, 4, "6", [4, 6]),
        (1, None, "4", [4, 6]),
        (1, None, "8", [2, 4, 6]),
        (1, None, "release", [2, 4, 6]),
        (1, None, None, [2, 4, 6]),
    ],
)
def test_the_newest_and_some_stay(
    keep_last: int, keep_every: int | None, tracker: str | None, left: list[int], copied: Callable[[str], Path]
) -> None:
    folder = copied("torch_dist")
    (folder / LATEST).unlink() if tracker is None else (folder / LATEST).write_text(tracker)
    gone = checkpoints.prune(folder, keep_last, keep_every)
    assert checkpoints.steps(folder) == left
    assert sorted(gone) == sorted({2, 4, 6} - set(left))


def test_nothing_is_deleted_for_one_that_is_not_complete(copied: Callable[[str], Path]) -> None:
    folder = copied("torch_dist")
    cut(folder / "iter_0000006" / "__1_0.distcp")
    assert checkpoints.prune(folder, 1) == []
    (folder / LATEST).write_text("4")  # 6 is being saved
    assert checkpoints.prune(folder, 1) == [2]
    assert checkpoints.steps(folder) == [4, 6]
    (folder / ".pruned-iter_0000002").mkdir()  # of one that was killed as it deleted
    assert checkpoints.prune(folder, 1) == []
    assert not (folder / ".pruned-iter_0000002").exists()


def test_a_fault_in_deleting_is_said_and_ends_nothing(tmp_path: Path) -> None:
    script = "import pruning, pathlib\nwith pruning.pruned(pathlib.Path('checkpoints'), 1, None): print('trained')\n"
    (tmp_path / "checkpoints").write_text("")
    environ = {**os.environ, "PYTHONPATH": str(JOB)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "moekit: an old checkpoint could not be deleted: NotADirectoryError" in done.stderr


def saves_process(what: str, *folders: Path) -> subprocess.Popen[str]:
    command = [sys.executable, saves.__file__, what, *map(str, folders)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )


def test_what_a_killed_save_leaves_loads(tmp_path: Path) -> None:
    """Thirty moments of real saves, at each of which a SIGKILL would leave these files: it is stopped, and they are
    copied."""
    saving, at, moments = tmp_path / "saving", random.Random(7), [tmp_path / str(n) for n in range(30)]
    saving.mkdir()
    with saves_process("save", saving) as process:
        try:
            deadline = time.monotonic() + 240
            while checkpoints.tracked(saving) is None and time.monotonic() < deadline:
                time.sleep(0.01)
            for moment in moments:
                time.sleep(at.uniform(0, 0.3))
                os.killpg(process.pid, signal.SIGSTOP)
                shutil.copytree(saving, moment)
                os.killpg(process.pid, signal.SIGCONT)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    named = [checkpoints.tracked(moment) for moment in moments]
    reasons = [[checkpoints.missing(checkpoints.folder_of(m, step)) for step in checkpoints.steps(m)] for m in moments]
    assert len(set(named)) > 10  # it went on
    assert sum(any(of_one) for of_one in reasons) > 5  # and was met in the midst of a save
    found = [checkpoints.settle(moment) for moment in moments]
    with saves_process("load", *[one.folder for one in found if one.folder]) as process:
        assert process.stdout is not None
        loaded = [json.loads(line) for line in process.stdout]
    assert loaded == [{"step": one.step, "numbers": [float(one.step)]} for one in found]
    assert [str(one.step) for one in found if one.said == ()] == [
        n for n, one in zip(named, found, strict=True) if not one.said
    ]


def test_all_of_it_is_python_3_9() -> None:
    for name in ("checkpoints.py", "saved.py"):
        ast.parse((JOB / name).read_text(), feature_version=(3, 9))
