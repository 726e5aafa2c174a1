"""`moekit check --real --in-image`: what srun is given, and what becomes of its answers.

A stand-in for srun runs the command on this machine, with moekit's folder "mounted" by a link: this shows that the
command needs nothing of the login node, and not that Slurm and pyxis start it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moekit.cluster.profile import Cluster, find_cluster
from moekit.launch import judges
from moekit.launch.real_check import real_check
from moekit.problems import MoekitError
from moekit.recipe.load import load
from moekit.share import PACKAGE

SRUN = """#!{python}
import json, os, sys
words = sys.argv[1:]
json.dump({{"argv": words, "env": dict(os.environ)}}, open({seen!r}, "w"))
while words[0].startswith("--"):
    words.pop(0)
print("srun: job 7 queued and waiting for resources", file=sys.stderr, flush=True)
{then}
os.execvp(words[0], [word.replace("/moekit-check", {inside!r}) for word in words])
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return replace(find_cluster(), python=sys.executable, megatron_path=None, partition="cpu", image="/img/ngc.sqsh")


def install_srun(folder: Path, monkeypatch: pytest.MonkeyPatch, then: str = "") -> Path:
    """An `srun` on PATH that runs its command here, after `then`; gives the file where it records how it is called."""
    (folder / "inside").mkdir()
    (folder / "inside" / "moekit").symlink_to(PACKAGE)
    (folder / "bin").mkdir()
    srun, seen = folder / "bin" / "srun", folder / "seen.json"
    srun.write_text(SRUN.format(python=sys.executable, seen=str(seen), inside=str(folder / "inside"), then=then))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:/usr/bin:/bin")
    return seen


def test_the_command_that_srun_gets(cluster: Cluster) -> None:
    cluster = replace(cluster, python="python3", account="me", megatron_path="/fsx/Megatron-LM")
    assert judges.srun_command(cluster) == [
        *("srun", "--nodes=1", "--ntasks=1", "--job-name=moekit-check", "--partition=cpu", "--account=me", "--time=10"),
        "--container-image=/img/ngc.sqsh",
        f"--container-mounts={PACKAGE}:/moekit-check/moekit:ro,/fsx/Megatron-LM:/fsx/Megatron-LM:ro",
        *("--no-container-mount-home", "--no-container-entrypoint", "--container-workdir=/"),
        *("python3", "-s", "/moekit-check/moekit/megatron/in_image.py", "/fsx/Megatron-LM"),
    ]


def test_without_a_container_the_nodes_python_reads_it_where_it_lies(cluster: Cluster) -> None:
    assert judges.srun_command(replace(cluster, container="none", python="/opt/python"))[6:] == [
        *("/opt/python", "-s", str(PACKAGE / "megatron" / "in_image.py")),
    ]


def test_a_folder_that_no_mount_carries(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "PACKAGE", Path("/home/a b/moekit"))
    with pytest.raises(MoekitError, match="moekit lies at `/home/a b/moekit`, and no mount carries a ` `"):
        judges.srun_command(cluster)


@pytest.mark.megatron
def test_the_images_own_megatron_answers(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = install_srun(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", "/login/node")
    monkeypatch.setenv("VIRTUAL_ENV", "/login/venv")
    monkeypatch.setenv("PATH", f"/login/venv/bin:{tmp_path}/bin:/usr/bin:/bin")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("base: settings/quickstart_gpu\nbalance:\n  enable_expert_bias: true\n")
    asked = {name: load(name) for name in ("settings/quickstart_gpu", str(wrong))}
    judged = real_check(asked, cluster, None, in_image=True)
    assert capfd.readouterr().err == "srun: job 7 queued and waiting for resources\n"
    right, refused = judged.values()
    # There is no Transformer Engine here, and in an image none is made up.
    assert right.values["judge"] == {"megatron": "0.19.2", "commit": "", "transformer_engine": None}
    assert [problem.where for problem in refused.problems] == [f"{wrong}:3"]
    env = json.loads(seen.read_text())["env"]
    assert "PYTHONPATH" not in env
    assert "VIRTUAL_ENV" not in env
    assert "/login/venv/bin" not in env["PATH"]


def fails(cluster: Cluster) -> str:
    with pytest.raises(MoekitError) as refused:
        real_check({"dense": load("dense")}, cluster, None, in_image=True)
    return str(refused.value)


def test_no_slurm(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fails(cluster) == (
        "error: there is no `srun` on PATH to start the image with\n"
        "    hint: `--in-image` is for a cluster's login node"
    )


def test_slurm_refuses(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_srun(tmp_path, monkeypatch, then="sys.exit('srun: error: invalid partition specified: cpu')")
    lines = fails(cluster).splitlines()
    assert lines[0] == (
        "error: `srun` ended with 1 for the image `/img/ngc.sqsh`: srun: error: invalid partition specified: cpu"
    )
    assert lines[1].startswith("    hint: it was `srun --nodes=1 --ntasks=1 ")


PYXIS = """\
pyxis: importing docker image: nvcr.io#nvidia/pytorch:26.06-py3
slurmstepd: error: pyxis: child 4711 failed with error code: 1
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     [ERROR] Could not process JSON input
slurmstepd: error: pyxis: couldn't start container
slurmstepd: error: Failed to invoke spank plugin stack
srun: error: n1: task 0: Exited with exit code 1
"""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (PYXIS, "Could not process JSON input"),
        (PYXIS.replace("[ERROR]", ""), "couldn't start container"),
    ],
)
def test_an_image_that_does_not_start(
    said: str, reason: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_srun(tmp_path, monkeypatch, then=f"sys.stderr.write({said!r}); sys.exit(1)")
    first, _ = fails(cluster).splitlines()
    assert first == f"error: `srun` ended with 1 for the image `/img/ngc.sqsh`: {reason}"


def test_an_image_without_megatron(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_srun(tmp_path, monkeypatch, then="words[1:1] = ['-S', '-E']")
    first, hint = fails(cluster).splitlines()
    assert first.startswith("error: Megatron does not import in the image `/img/ngc.sqsh`: no Megatron in ")
    assert hint == "    hint: a checkout is named with `megatron_path` in the profile, or `--megatron PATH`"
