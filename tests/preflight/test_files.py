"""What a job gets to look at its nodes with."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

import moekit.job
from moekit import share
from moekit.cluster.profile import Cluster, find_cluster
from moekit.launch.missing import missing
from moekit.launch.script import slurm_files
from moekit.preflight.files import preflight_files
from moekit.preflight.submit import Wanted, job_files, problems_of, settings
from moekit.problems import MoekitError
from moekit.recipe.load import load

AWS = find_cluster("aws-p5")
FOLDER = Path(moekit.job.__file__).parent / "preflight"


def asked(cluster: Cluster, **words: object) -> dict[str, object]:
    return json.loads(preflight_files(cluster, cluster.environment or {}, **words)["preflight.json"])  # type: ignore[arg-type]


def test_the_handbooks_command() -> None:
    words = asked(AWS)["srun"]
    assert isinstance(words, list)
    assert {"--gres=gpu:8", "--mpi=pmix", "--cpu-bind=none", "--no-container-mount-home"} <= set(words)
    assert "--container-image=/fsx/moekit/images/nccl-tests.sqsh" in words
    from moekit.job.preflight.measure import ARGUMENTS

    assert " ".join(ARGUMENTS) == "-b 8G -e 8G -g 1 -c 1 -n 20"


def test_an_image_of_its_own_keeps_its_own_libraries() -> None:
    assert asked(AWS)["library_path"] is None
    ours = asked(replace(AWS, nccl_tests_image=None))
    assert (ours["image"], ours["library_path"]) == (AWS.image, "/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib")


def test_nodes_are_asked_outside_the_container() -> None:
    assert not [word for word in asked(AWS)["node_srun"] if "container" in word]  # type: ignore[attr-defined]


def test_a_job_of_its_own() -> None:
    files = job_files(Wanted(4, nodelist="n[1-4]", level=2, baseline=True), AWS)
    assert files["job.sbatch"].splitlines()[2:] == [
        "#SBATCH --job-name=moekit-preflight",
        "#SBATCH --nodes=4",
        "#SBATCH --nodelist=n[1-4]",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=96",
        "#SBATCH --gres=gpu:8",
        "#SBATCH --mem=0",
        "#SBATCH --time=120",
        "#SBATCH --output=slurm-%j.log",
        "#SBATCH --exclusive",
        "#SBATCH --no-requeue",
        "exec bash preflight.sh out",
    ]
    said = json.loads(files["preflight.json"])
    assert (said["level"], said["baseline"], said["shared_root"]) == (2, True, "/fsx/moekit")
    assert "export NCCL_NET_PLUGIN=ofi\n" in files["environment.sh"]
    assert job_files(Wanted(4), AWS) == job_files(Wanted(4), AWS)


def test_a_training_job_has_it_unless_it_is_told_not_to() -> None:
    assert {"preflight.sh", "preflight.json", "job/preflight/__main__.py"} <= set(slurm_files(load("dense"), "x", AWS))
    without = slurm_files(load("dense"), "x", replace(AWS, preflight=False))
    assert not [name for name in without if "preflight" in name]
    assert not [name for name in slurm_files(load("quickstart"), "x", AWS) if "preflight" in name]  # on CPUs


def test_a_training_and_a_look_have_the_same_baselines() -> None:
    of_run = json.loads(slurm_files(load("first_moe"), "x", AWS)["preflight.json"])
    alone = json.loads(job_files(Wanted(1), AWS)["preflight.json"])
    assert of_run["settings"] == alone["settings"]
    assert of_run["image"] == alone["image"]


@pytest.mark.parametrize("level", [3, 4])
def test_levels_for_maintenance(level: int) -> None:
    (problem,) = problems_of(Wanted(level=level), AWS, maintenance=False)
    assert "--maintenance" in problem.hint
    assert problems_of(Wanted(level=level), AWS, maintenance=True) == []


def test_what_needs_nccl_tests() -> None:
    (problem,) = problems_of(Wanted(baseline=True), replace(AWS, nccl_tests=None), maintenance=False)
    assert problem.what == "profile `aws-p5` names no `nccl_tests`, so nothing can be measured"


@pytest.mark.parametrize("word", ["A", "=1", "1A=2", "a b=c", ""])
def test_a_setting_is_a_name_and_a_value(word: str) -> None:
    with pytest.raises(MoekitError, match="is no setting"):
        settings([word])
    assert settings(["A=", "B=x=y"]) == (("A", ""), ("B", "x=y"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_programs_are_python_3_9_and_need_no_package(path: Path) -> None:
    """The node's own Python runs them."""
    import sys

    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(name.name.partition(".")[0] in sys.stdlib_module_names for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").partition(".")[0] in sys.stdlib_module_names
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("zip", "dataclass"):
            assert not {"strict", "slots", "kw_only"} & {word.arg for word in node.keywords}  # of 3.10


def test_the_script_is_the_one_that_ships() -> None:
    assert preflight_files(AWS, {})["preflight.sh"] == (share.folder("slurm") / "preflight.sh").read_text()


def test_launch_tells_of_an_image_that_is_not_there(tmp_path: Path) -> None:
    """Else the job would be refused by its own preflight."""
    there = tmp_path / "nccl-tests.sqsh"
    cluster = replace(AWS, shared_root=str(tmp_path), nccl_tests_image=str(there))

    def told(cluster: Cluster) -> list[str]:
        return [problem.what for problem in missing(load("first_moe"), cluster, {}) if "measures" in problem.what]

    assert told(cluster) == [f"there is no {there}, with which the job measures its nodes"]
    assert told(replace(cluster, preflight=False)) == told(replace(cluster, nccl_tests=None)) == []
    there.touch()
    assert told(cluster) == []
