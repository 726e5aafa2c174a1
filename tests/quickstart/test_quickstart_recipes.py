"""The quickstart's recipes and those of the check on a GPU: sound, and alike where they say so."""

import shutil
import subprocess
from pathlib import Path

import pytest

from moekit.cluster.profile import find_cluster
from moekit.recipe.check import problems_of
from moekit.recipe.load import load
from moekit.recipe.sizes import sizes

GPU = Path(__file__).parents[1] / "gpu"
SCRIPT = GPU / "quickstart.sh"


@pytest.mark.parametrize(
    "name",
    ["quickstart", "settings/quickstart_dense", "settings/quickstart_gpu", str(GPU / "wide_gpu.yaml")],
)
def test_nothing_is_wrong_with_them(name: str) -> None:
    assert problems_of(load(name), find_cluster()) == []


def test_the_dense_twin_has_the_same_data_batch_and_schedule() -> None:
    moe, dense = load("quickstart").recipe, load("settings/quickstart_dense").recipe
    assert (moe.data, moe.train, moe.schedule, moe.optimizer) == (
        dense.data,
        dense.train,
        dense.schedule,
        dense.optimizer,
    )
    assert dense.moe.num_experts is None
    assert moe.router.topk is not None
    assert moe.moe.ffn_hidden_size is not None
    assert dense.model.ffn_hidden_size == moe.router.topk * moe.moe.ffn_hidden_size


def test_the_gpu_trains_the_same_on_the_gpu() -> None:
    cpu, gpu = load("quickstart"), load("settings/quickstart_gpu")
    for section in ("model", "moe", "router", "balance", "optimizer", "schedule", "precision", "data"):
        assert getattr(cpu.recipe, section) == getattr(gpu.recipe, section)
    of_cpu, of_gpu = sizes(cpu.recipe), sizes(gpu.recipe)
    assert of_cpu is not None
    assert of_gpu is not None
    assert (of_gpu.tokens_per_step, of_gpu.world, gpu.recipe.runtime.device) == (of_cpu.tokens_per_step, 1, "gpu")


def test_the_wide_one_has_first_moes_width() -> None:
    first, wide = load("first_moe").recipe, load(str(GPU / "wide_gpu.yaml")).recipe
    assert (wide.model.hidden_size, wide.moe.ffn_hidden_size) == (2048, 1024)
    assert (wide.model.hidden_size, wide.moe.ffn_hidden_size) == (first.model.hidden_size, first.moe.ffn_hidden_size)
    assert (wide.moe.num_experts, wide.parallel.expert_model) == (8, 1)


def test_the_script_is_sound() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)
