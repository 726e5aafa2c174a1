"""Upcycling in the real trainer: converted, trained on, killed and resumed; and the repairs where nothing is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from job_runs import EXPERT_PARALLEL
from upcycled import (
    DENSE_STEPS,
    SAVE_LAST,
    dense_words,
    killed_after_the_conversion,
    losses,
    resumed_words,
    upcycled_words,
)

pytestmark = pytest.mark.megatron

REPAIRS = ["upcycling_loader_argument", "upcycling_dense_model", "upcycling_model_chunks"]


def repairs(run_dir: Path, attempt: int = 1) -> list[str]:
    installed = json.loads((run_dir / "attempts" / str(attempt) / "installed.json").read_text())
    return [part["name"] for part in installed if part["name"].startswith("upcycling")]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., None]) -> Path:
    """The dense run: 4 steps, saved."""
    run_dir = tmp_path_factory.mktemp("dense")
    launch(run_dir, [*dense_words(), *EXPERT_PARALLEL[4:], *SAVE_LAST, "--train-iters", str(DENSE_STEPS)])
    return run_dir


@pytest.fixture(scope="session")
def upcycled(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., None], dense: Path) -> Path:
    """Its layers as experts over two processes (bf16, distributed optimizer), and 4 steps more."""
    run_dir = tmp_path_factory.mktemp("upcycled")
    launch(run_dir, upcycled_words(dense, *EXPERT_PARALLEL, "--train-iters", "4"))
    return run_dir


@pytest.mark.train
def test_an_upcycled_model_goes_on_where_the_dense_one_was(
    tmp_path: Path, launch: Callable[..., None], dense: Path, upcycled: Path
) -> None:
    assert repairs(dense) == []
    assert repairs(upcycled) == REPAIRS
    words = [*dense_words(), *EXPERT_PARALLEL[4:], "--load", str(dense / "checkpoints"), "--no-load-optim"]
    launch(tmp_path, [*words, "--train-iters", str(DENSE_STEPS + 1)])
    continued = losses(tmp_path)[DENSE_STEPS + 1][0]
    first = losses(upcycled)[1][0]
    assert first == pytest.approx(continued, abs=2e-3)  # the same tokens before any update; SwiGLU's scale is not exact
    assert abs(first - losses(dense)[1][0]) > 0.2  # a model that begins anew is far off
    assert losses(upcycled)[4][0] < first


@pytest.mark.train
def test_a_run_killed_after_the_conversion_goes_on_to_the_bit(
    tmp_path: Path, launch: Callable[..., None], dense: Path, upcycled: Path
) -> None:
    words = upcycled_words(dense, *EXPERT_PARALLEL, "--train-iters", "4")
    killed_after_the_conversion(tmp_path, words)
    launch(tmp_path, resumed_words(words), attempt=2)
    assert repairs(tmp_path, 2) == ["upcycling_resume"]
    assert losses(tmp_path, 2) == losses(upcycled)


@pytest.mark.train
def test_a_checkpoint_after_the_conversion_is_resumed_as_any_other(
    tmp_path: Path, launch: Callable[..., None], dense: Path, upcycled: Path
) -> None:
    """Also one that takes the conversion's own place, after the first step."""
    words = upcycled_words(dense, *EXPERT_PARALLEL, "--train-iters", "4")
    launch(tmp_path, [*words, "--save-interval", "1", "--exit-interval", "1"])
    launch(tmp_path, resumed_words(words), attempt=2)
    assert repairs(tmp_path, 2) == []
    assert losses(tmp_path, 1) | losses(tmp_path, 2) == losses(upcycled)
    assert sorted(losses(tmp_path, 2)) == [2, 3, 4]


@pytest.mark.train
def test_chunks_of_a_virtual_pipeline_are_converted_each(tmp_path: Path, launch: Callable[..., None]) -> None:
    deep, first = ["--num-layers", "4", "--pipeline-model-parallel-size", "2"], {}
    launch(tmp_path, [*dense_words(), *deep, *SAVE_LAST, "--train-iters", "2"])
    for name, more in (("whole", []), ("chunks", ["--num-layers-per-virtual-pipeline-stage", "1"])):
        run_dir = tmp_path / name
        run_dir.mkdir()
        launch(run_dir, upcycled_words(tmp_path, *deep, *more, "--train-iters", "1"))
        first[name] = losses(run_dir)[1][0]
    assert first["whole"] == first["chunks"]


@pytest.mark.train
def test_a_patched_megatron_upcycles_by_itself(
    tmp_path: Path, launch: Callable[..., None], dense: Path, upcycled: Path
) -> None:
    """`moekit megatron patch` on a copy of the installed Megatron: the same losses, without a repair of ours."""
    copy = tmp_path / "copy"
    shutil.copytree(str(importlib.metadata.distribution("megatron-core").locate_file("megatron")), copy / "megatron")
    subprocess.run([sys.executable, "-m", "moekit", "megatron", "patch", str(copy)], check=True)
    words = upcycled_words(dense, *EXPERT_PARALLEL, "--train-iters", "4")
    launch(tmp_path, words, env={"PYTHONPATH": str(copy)})
    assert repairs(tmp_path) == []
    assert losses(tmp_path) == losses(upcycled)


def test_what_is_mended_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import upcycling_utils
    from megatron.training import training

    from moekit.job import upcycling

    def mended() -> None: ...

    before = (upcycling_utils.load_and_upcycle_model, training.load_checkpoint)
    monkeypatch.setattr(training, "setup_model_and_optimizer", mended)
    monkeypatch.setattr(upcycling_utils, "upcycle_state_dict", mended)
    monkeypatch.setattr(sys, "argv", ["entry.py", "--moe-use-upcycling", "--load", "nowhere"])
    assert upcycling.install() == []
    assert (training.setup_model_and_optimizer, upcycling_utils.upcycle_state_dict) == (mended, mended)
    assert (upcycling_utils.load_and_upcycle_model, training.load_checkpoint) == before


def test_a_run_that_does_not_upcycle_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from moekit.job import upcycling

    monkeypatch.setattr(sys, "argv", ["entry.py", "--load", str(tmp_path)])
    assert upcycling.install() == []
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")  # of a checkpoint in another format
    assert upcycling.install() == []


def test_a_dense_twin_leaves_the_models_own_configuration_as_it_was() -> None:
    from moekit.job import upcycling

    transformer = SimpleNamespace(
        num_moe_experts=8, moe_layer_freq=[1, 1], expert_model_parallel_size=2, ffn_hidden_size=64, hidden_size=32
    )
    model = SimpleNamespace(transformer=transformer, vocab_size=512)
    twin = upcycling.dense_twin(model, SimpleNamespace(expert_model_parallel_size=1, ffn_hidden_size=128))
    assert vars(twin.transformer) == {
        "num_moe_experts": None,
        "moe_layer_freq": 1,
        "expert_model_parallel_size": 1,
        "ffn_hidden_size": 128,
        "hidden_size": 32,
    }
    assert (twin.vocab_size, model.transformer) == (512, transformer)
    assert transformer.num_moe_experts == 8
