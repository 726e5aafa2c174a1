"""What keeps a recipe from being trained here: all of it at once, each with its place and remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moekit.launch import needs
from moekit.launch.live import Display
from moekit.launch.local import _prepare_data
from moekit.launch.processes import environment, visible_gpus
from moekit.problems import format_problem
from moekit.recipe.load import Loaded, load


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """The quickstart with sections over it, as `changed.yaml` in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str = "") -> Loaded:
        Path("changed.yaml").write_text(f"base: quickstart\n{text}")
        return load("changed.yaml")

    return write


def found(loaded: Loaded, **environ: str) -> list[str]:
    return [format_problem(problem) for problem in needs.problems(loaded, Path(), environ)]


def test_nsight_is_started_in_jobs_only(recipe: object) -> None:
    assert found(recipe("profile: {enabled: true}")) == [  # type: ignore[operator]
        "changed.yaml:2: `profile.enabled` alone is for Nsight Systems, and only a job on Slurm starts `nsys`\n"
        "    hint: add `use_pytorch_profiler: true`, which writes `attempts/N/torch_profile/`"
    ]
    assert found(recipe("profile: {enabled: true, use_pytorch_profiler: true}")) == []  # type: ignore[operator]


@pytest.mark.megatron
@pytest.mark.parametrize("name", ["quickstart", "settings/quickstart_dense"])
def test_the_quickstart_can_be_trained_here(name: str, tmp_path: Path) -> None:
    assert needs.problems(load(name), tmp_path, {}) == []


def test_elsewhere_than_on_linux_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert found(load("quickstart")) == [
        "error: Megatron trains on Linux only, and this is darwin\n"
        "    hint: run this in a Linux container, a virtual machine or WSL 2; `moekit check` and `--dry-run` work here"
    ]


def test_all_that_is_missing_comes_at_once(recipe: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    text = "data:\n  name: own\n  tokenizer: own\ncheckpoint:\n  from_run: before\n"
    messages = found(recipe(text))  # type: ignore[operator]
    here = Path.cwd()
    assert messages == [
        "error: not installed: `torch`, `megatron-core`, `tensorboard`, `psutil`, `transformers`\n"
        "    hint: run `pip install 'moekit[local]'` (about 3 GB to download, 6 GB on disk)",
        "changed.yaml:4: there is no tokenizer `own`: tokenizers/own\n"
        "    hint: put its files there, or `moekit data tokenizer DATASET` fetches that of a data set",
        "changed.yaml:3: there is no data set `own`: data/own\n"
        "    hint: `moekit data tokenize own` makes it; or put its shards there, and their list `data-args.txt`",
        "changed.yaml:6: run `before` has no checkpoint: runs/before/checkpoints\n    hint: launch it first",
        f"{here}: 0.5 GiB of disk is free, and a run needs 1 GiB\n"
        "    hint: make room, or run this in another folder, or with another `shared_root` in the profile",
    ]


def test_missing_packages_name_their_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datatrove" else real(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.2")
    messages = [message for message in found(load("quickstart")) if "not installed" in message]
    assert any("`datatrove`" in message and "data]" in message for message in messages)


def test_data_that_is_there_needs_no_tokenizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datatrove" else real(name))
    (tmp_path / "data" / "python-docs").mkdir(parents=True)
    assert "datatrove" not in str(needs.problems(load("quickstart"), tmp_path, {}))


def test_a_shared_root_that_megatron_cannot_read_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    root = tmp_path / "a b"
    assert "the path has a space" in str([problem.what for problem in needs.problems(load("quickstart"), root, {})])
    assert not root.exists()


def test_data_of_ones_own_needs_no_tokenizing(recipe: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datatrove" else real(name))
    loaded: Loaded = recipe("data: {name: own}\n")  # type: ignore[operator]
    assert "datatrove" not in str(needs.problems(loaded, tmp_path, {}))
    assert _prepare_data(loaded, tmp_path, Display(True)) is None
    assert sorted(path.name for path in (tmp_path / "tokenizers" / "python-docs").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not (tmp_path / "data").exists()


@pytest.mark.megatron
@pytest.mark.parametrize("text", ["data: {name: own}\n", "data: {name: own, shards: ['0.3', a, '0.7', b]}\n"])
def test_shards_that_are_not_there(text: str, recipe: object, tmp_path: Path) -> None:
    """By name, before Megatron is started to say so."""
    loaded, folder = recipe(text), tmp_path / "data" / "own"  # type: ignore[operator]

    def said() -> list[str]:
        return [problem.what for problem in needs.problems(loaded, tmp_path, {})]

    assert said() == [f"there is no data set `own`: {folder}"]
    folder.mkdir(parents=True)
    if not loaded.recipe.data.shards:
        assert said() == [f"data set `own` has no list of its shards: {folder}/data-args.txt"]
        (folder / "data-args.txt").write_text(f"0.3 {folder}/a\n0.7 {folder}/b\n")
    assert said() == [f"data set `own` has no {folder}/a.bin, nor 3 other files"]
    for name in ("a.bin", "a.idx", "b.bin"):
        (folder / name).touch()
    assert said() == [f"data set `own` has no {folder}/b.idx"]
    (folder / "b.idx").touch()
    nothing = f"data set `own` has no manifest, so nothing says that its shards are whole: {folder}"
    assert said() == [nothing]
    assert {problem.level for problem in needs.problems(loaded, tmp_path, {})} == {"warning"}


def test_another_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.18.0")
    (message,) = found(load("quickstart"))
    assert "the recipe is for Megatron 0.19.2, and 0.18.0 is installed" in message


@pytest.mark.megatron
def test_a_megatron_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (message,) = found(load("quickstart"))
    assert "a `megatron` can be imported here, but `megatron-core` is not installed" in message


@pytest.mark.megatron
def test_too_few_gpus(recipe: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "visible_gpus", lambda environ: 1)
    (message,) = found(recipe("runtime: {device: gpu}\n"))  # type: ignore[operator]
    assert "the recipe trains on 2 GPUs, and 1 can be seen here" in message


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path("/dev", name) for name in names])
    assert visible_gpus({}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 2


def test_the_recipes_environment_wins_and_unsets() -> None:
    outer = {"PATH": "/bin", "MOEKIT_ATTEMPT": "9", "OMP_NUM_THREADS": "64", "GONE": "1", "PYTHONPATH": "/own"}
    got = environment(
        "cpu",
        10_000,
        3,
        {"MOEKIT_KEEP_LAST": "5", "MOEKIT_KEEP_EVERY": None},
        {"HF_HUB_OFFLINE": "0", "GONE": None},
        outer,
    )
    assert got["MOEKIT_ATTEMPT"] == "3"
    assert (got["MOEKIT_KEEP_LAST"], "MOEKIT_KEEP_EVERY" in got) == ("5", False)
    assert (got["OMP_NUM_THREADS"], got["HF_HUB_OFFLINE"], got["CUDA_VISIBLE_DEVICES"]) == ("1", "0", "")
    assert "GONE" not in got
    assert got["PYTHONPATH"] == "job"  # a Megatron in the shell's own would be trained
    assert "CUDA_VISIBLE_DEVICES" not in environment("gpu", 1, 1, {}, {}, outer)
