"""What sbatch is told of jobs that wait for others, and the text of the job that builds an index. That it holds on a
real Slurm: tests/slurm/test_chains.py."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from moekit.cluster.profile import find_cluster
from moekit.launch import chain, index
from moekit.problems import MoekitError
from moekit.recipe.load import Loaded, load

CLUSTER = replace(find_cluster(), cpu_partition="cpu", account="ml")


@pytest.mark.parametrize(
    ("after", "links", "words"),
    [
        ([], 1, []),
        ([], 3, ["--dependency=singleton"]),
        (["7"], 1, ["--dependency=afterok:7", "--kill-on-invalid-dep=yes"]),
        (["7;east", "9"], 2, ["--dependency=afterok:7,afterok:9,singleton", "--kill-on-invalid-dep=yes"]),
    ],
)
def test_what_sbatch_is_told(after: list[str], links: int, words: list[str]) -> None:
    assert chain.options(after, links) == words


def named(folder: Path, name: str, parent: str | None) -> Loaded:
    path = folder / f"{name}.yaml"
    path.write_text(f"base: dense\ncheckpoint: {{from_run: {parent or 'null'}}}\n")
    return load(str(path))


def test_parents_come_first_and_the_rest_keeps_its_order(tmp_path: Path) -> None:
    runs = [named(tmp_path, *pair) for pair in (("c", "b"), ("x", "elsewhere"), ("b", "a"), ("a", None), ("y", None))]
    assert [run.name for run in chain.parents_first(runs)] == ["a", "b", "c", "x", "y"]


def test_runs_cannot_wait_for_each_other(tmp_path: Path) -> None:
    runs = [named(tmp_path, *pair) for pair in (("a", "b"), ("b", "a"))]
    with pytest.raises(MoekitError, match=r"a\.yaml:2: runs begin from each other's checkpoints: a → b → a"):
        chain.parents_first(runs)


@pytest.mark.parametrize("links", [0, -1, 101])
def test_a_chain_has_a_number_of_jobs(links: int) -> None:
    (problem,) = chain.problems(load("settings/monitor"), links)
    assert problem.what == f"`--chain {links}` is no number of jobs"


def test_the_job_that_builds_an_index(tmp_path: Path) -> None:
    files = index.files(load("first_moe"), "x", CLUSTER)
    assert files["index.sbatch"].splitlines()[2:] == [
        "#SBATCH --job-name=x-index",
        "#SBATCH --partition=cpu",
        "#SBATCH --account=ml",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        "#SBATCH --time=60",
        "#SBATCH --output=slurm-%j.log",
        "#SBATCH --open-mode=append",
        "exec bash index.sh",
    ]
    assert files["argv.python"].splitlines() == ["env", "WORLD_SIZE=8", "python"]
    words = files["argv.srun"].splitlines()
    assert words[:3] == ["--nodes=1", "--ntasks=1", "--export=ALL"]
    assert any(word.startswith("--container-image=") for word in words)
    assert not [word for word in words if word.startswith(("--cpus-per-task", "--wait", "--ntasks-per-node"))]
    assert shutil.which("shellcheck"), "shellcheck is not installed"
    for name in ("index.sbatch", "index.sh"):
        (tmp_path / name).write_text(files[name])
        found = subprocess.run(["shellcheck", "-s", "bash", name], cwd=tmp_path, capture_output=True, text=True)
        assert found.stdout == ""


def test_an_index_needs_a_partition_of_cpus() -> None:
    none = replace(CLUSTER, cpu_partition=None)
    runs = [load("first_moe"), load("dense")]
    (asked,) = index.problems(runs[:1], none, True)
    assert (asked.level, asked.what) == (
        "error",
        "`--index-first` is a job for CPUs, and the profile names no partition of them",
    )
    (shared,) = index.problems(runs, none, None)
    assert shared.level == "warning"
    assert shared.what == "2 runs will each build the index of fineweb-edu, over each other's files"
    for loaded, cluster, wanted in ((runs, none, False), (runs[:1], none, None), (runs, CLUSTER, None)):
        assert [*index.problems(loaded, cluster, wanted)] == []
    assert [*index.problems([load("first_moe_smoke")] * 2, none, None)] == []


@pytest.mark.parametrize(("wanted", "built"), [(None, True), (True, True), (False, False)])
def test_several_runs_of_the_same_data_have_their_index_first(wanted: bool | None, built: bool) -> None:
    assert index.for_runs([load("first_moe"), load("dense")], CLUSTER, wanted).wanted is built
    assert not index.for_runs([load("first_moe")], CLUSTER, None).wanted


def test_data_without_an_index(tmp_path: Path) -> None:
    path = tmp_path / "phases.yaml"
    path.write_text("base: dense\nmegatron: {extra: [--phase-transition-iterations, '10']}\n")
    assert [index.has_index(load(name)) for name in ("dense", "first_moe_smoke", str(path))] == [True, False, False]
    (problem,) = index.problems([load("first_moe_smoke")], CLUSTER, True)
    assert (
        problem.what == "`--index-first`: there is no index of the data of `first_moe_smoke` that could be built first"
    )
