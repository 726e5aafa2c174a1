import ast
import inspect
import subprocess
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from moekit.launch import cluster
from moekit.launch.cluster import Cluster, find_cluster, shipped_clusters
from moekit.problems import MoekitError
from moekit.recipe.names import variable_problem

LEAST = {
    "name": "mine",
    "gpus_per_node": "8",
    "gpu": "h200",
    "fabric": "none",
    "container": "none",
    "shared_root": "/shared",
}

FIND_IT = "\n    hint: all nodes must find it"


def profile(tmp_path: Path, **changes: str | None) -> str:
    lines = [f"{key}: {value}" for key, value in {**LEAST, **changes}.items() if value is not None]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("name", shipped_clusters())
def test_shipped_profiles_load(name: str) -> None:
    assert find_cluster(name).name == name


def test_the_default_is_the_handbooks_cluster() -> None:
    assert find_cluster() == find_cluster("aws-p5")
    assert find_cluster().environment["NCCL_NET_PLUGIN"] == "ofi"


def test_a_profile_needs_only_what_cannot_be_guessed(tmp_path: Path) -> None:
    found = find_cluster(profile(tmp_path))
    assert (found.gpus_per_node, found.partition, found.image, found.python) == (8, None, None, "python")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_root": None}, ":1: `shared_root` is missing"),
        ({"shared_root": "null"}, ":6: `shared_root` is missing"),
        ({"shared_root": "runs"}, f":6: `shared_root` must be an absolute path, not `runs`{FIND_IT}"),
        ({"python": "python3 -X dev"}, ":7: `python` is `python3 -X dev`: one program, without arguments"),
        ({"shared_root": "/a b"}, ":6: `shared_root` has a ` `, which no mount carries: `/a b`"),
        ({"gpu": "h1000"}, ":3: `gpu` must be one of a100, h100, h200, b200, gb200, b300, gb300, not `h1000`"
         "\n    hint: did you mean `h100`?"),
        ({"partitio": "gpu"}, ":7: unknown field `partitio`\n    hint: did you mean `partition`?"),
        ({"partition": '"gpu debug"'}, ":7: `partition` is `gpu debug`, which no #SBATCH line carries"),
        ({"container": "pyxis"}, ":5: `image` is missing, which `container: pyxis` starts"),
        ({"image": "./i.sqsh"}, f":7: `image` must be an absolute path, not `./i.sqsh`{FIND_IT}"),
        ({"mounts": "['/my dir:/d']"}, ":7: mount `/my dir:/d` has a space or a comma, which pyxis splits at"),
        ({"mounts": "['/a,b:/c']"}, ":7: mount `/a,b:/c` has a space or a comma, which pyxis splits at"),
        ({"mounts": "['data:/data']"}, ":7: mount `data:/data` must be `/path` or `/path:/inside`, both absolute"),
        ({"mounts": "['/a:/c', '/b:/c']"}, ":7: two mounts lie at `/c`"),
        ({"mounts": "['/c', '/b:/c:ro']"}, ":7: two mounts lie at `/c`"),
        ({"library_path": "[lib]"}, ":7: `library_path` has `lib`; it lists absolute folders"),
        ({"environment": "{LD_LIBRARY_PATH: /x}"}, ":7: `environment.LD_LIBRARY_PATH` would take the image's own"
         " folders away\n    hint: list folders in the profile's `library_path`"),
        ({"environment": "{PATH: /x}"}, ":7: `environment.PATH` is the job's shell's own"
         "\n    hint: the profile's `python` names an interpreter"),
        ({"environment": "{MOEKIT_DEVICE: cpu}"}, ":7: `environment.MOEKIT_DEVICE` is moekit's own"),
        ({"environment": "{SLURM_JOB_ID: 1}"}, ":7: `environment.SLURM_JOB_ID` is Slurm's own"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, changes: dict[str, str | None], message: str) -> None:
    path = profile(tmp_path, **changes)
    with pytest.raises(MoekitError) as refused:
        find_cluster(path)
    assert str(refused.value) == path + message


def test_mounts_that_pyxis_takes(tmp_path: Path) -> None:
    mounts = ("/lustre/lustre", "/a:/b", "/a:/c:ro", "/d:/e:ro+rprivate")
    assert find_cluster(profile(tmp_path, mounts=str([*mounts]))).mounts == mounts


def test_an_unknown_profile_names_the_closest() -> None:
    with pytest.raises(MoekitError) as refused:
        find_cluster("aws-p4")
    assert str(refused.value) == ("error: there is no cluster profile `aws-p4`\n    hint: did you mean `aws-p5`?")


def test_each_field_is_documented() -> None:
    body = ast.parse(inspect.getsource(Cluster)).body[0].body
    documented = [
        one.target.id for one, after in pairwise(body) if isinstance(one, ast.AnnAssign) and isinstance(after, ast.Expr)
    ]
    assert documented == [field.name for field in fields(Cluster)]


def test_every_variable_that_bash_keeps_for_itself_is_refused() -> None:
    """What does not arrive in a child when a shell exports it."""
    known = subprocess.run(["bash", "-c", "compgen -v"], capture_output=True, text=True, env={}).stdout.split()
    assert "SHELLOPTS" in known
    lost = []
    for name in {*known, "EPOCHREALTIME", "SRANDOM", "BASH_ENV", "FUNCNAME", "COMP_WORDBREAKS"}:
        script = f"export {name}=moekit; exec /usr/bin/env"
        seen = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env={}).stdout
        if f"{name}=moekit\n" not in seen:
            lost.append(name)
    assert len(lost) > 10
    assert [name for name in lost if not variable_problem(name)] == []


def test_plain_variables_are_taken() -> None:
    for name in ("NCCL_DEBUG", "c_lower", "HOME", "argv", "id", "LD_PRELOAD", "PYTHONPATH", cluster.DEFAULT.upper()):
        assert variable_problem(name) is None


def test_a_name_no_file_can_have_is_refused() -> None:
    with pytest.raises(MoekitError, match="cannot be read: file name too long"):
        find_cluster("x" * 300)
