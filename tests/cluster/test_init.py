"""`moekit init` where there is no Slurm; with a real one: tests/slurm/test_init_slurm.py."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sites import CLOUD, DGX, site

from moekit import share
from moekit.cluster import init_node
from moekit.cluster.init import Wishes, questions
from moekit.cluster.init_choice import Kind, choose
from moekit.cluster.init_node import NodeReport
from moekit.cluster.init_site import task_options, words
from moekit.cluster.init_text import Gpus

ASK_NODE = share.folder("slurm") / "ask_node.sh"


def moekit(folder: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moekit", *arguments],
        cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={"PATH": path}, timeout=60,
    )  # fmt: skip


def test_without_slurm(tmp_path: Path) -> None:
    done = moekit(tmp_path, "init", "mine.yaml")
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [
        "error: `sinfo` is not on PATH",
        "    hint: run this on a login node of the cluster, where Slurm's commands are",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_left_before_anybody_is_asked(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine\n")
    done = moekit(tmp_path, "init", "mine.yaml")
    assert (done.returncode, done.stderr) == (
        1, "error: `mine.yaml` exists\n    hint: `--force` writes over it; or name another file\n"
    )  # fmt: skip
    assert (tmp_path / "mine.yaml").read_text() == "mine\n"
    assert moekit(tmp_path, "init", ".").stderr == "error: `.` is a directory\n    hint: name a file\n"


def test_a_controller_that_says_no(tmp_path: Path) -> None:
    """Slurm's words, as sinfo 22.05 prints them where its configuration cannot be read."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    sinfo = bin_folder / "sinfo"
    sinfo.write_text(
        "#!/bin/sh\necho 'sinfo: error: slurm_load_partitions: Unable to contact slurm controller' >&2\nexit 1\n"
    )
    sinfo.chmod(0o755)
    done = moekit(tmp_path, "init", path=f"{bin_folder}:/bin:/usr/bin")
    assert done.stderr.splitlines()[1:] == [
        "error: `sinfo` has no answer from Slurm: slurm_load_partitions: Unable to contact slurm controller",
        "    hint: `scontrol ping` says whether Slurm's controller is up",
    ]


def test_a_node_must_be_asked_or_its_network_said(tmp_path: Path) -> None:
    assert moekit(tmp_path, "init", "--wait", "0").stderr.splitlines() == [
        "error: `--wait 0` asks no node, and the network between nodes must be known",
        "    hint: say it with `--fabric`",
    ]


def test_questions_are_what_nobody_else_knows() -> None:
    """A GPU that neither its gres nor nvidia-smi names; without nvidia-smi, once no node can say it any more."""
    kind = choose(site("22.05"))
    unnamed = replace(kind, gpus=Gpus("", 8))

    def asked(
        of: Kind, container: str, wishes: Wishes, node: NodeReport | None, *, node_can_say: bool = False
    ) -> list[str]:
        return [one.option for one in questions(wishes, container, of, node, node_can_say=node_can_say)]

    assert asked(kind, "pyxis", Wishes(), DGX) == ["--shared-root", "--image", "--megatron-path"]
    assert asked(kind, "none", Wishes(), DGX) == ["--shared-root", "--megatron-path"]
    said = Wishes(shared_root="/r", megatron_path="none")
    assert asked(unnamed, "none", said, DGX) == []
    assert asked(unnamed, "none", said, None, node_can_say=True) == []
    assert asked(unnamed, "none", said, CLOUD) == asked(unnamed, "none", said, None) == ["--gpu"]


def test_defaults_follow_from_the_shared_root() -> None:
    shared, image, _ = questions(Wishes(), "pyxis", choose(site("22.05")), None)
    assert shared.default == str(Path.home() / "moekit")
    assert image.default.startswith(f"{shared.default}/")
    _, checkout = questions(Wishes(shared_root="/fsx/m"), "pyxis", choose(site("22.05")), None)
    assert checkout.default == "/fsx/m/Megatron-LM"


def test_what_this_machine_says_of_itself() -> None:
    here = subprocess.run(
        ["bash", "-c", ASK_NODE.read_text(), "ask_node.sh", "/etc/passwd", "/no/such/file"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = init_node.report(here.stdout)
    assert here.stderr == ""
    assert found.host == subprocess.run(["hostname"], capture_output=True, text=True).stdout.strip()
    assert "lo" in [interface.name for interface in found.interfaces]
    assert found.files == {"/etc/passwd"}


def test_the_script_for_nodes_is_clean() -> None:
    assert shutil.which("shellcheck"), "shellcheck is not installed"
    done = subprocess.run(["shellcheck", str(ASK_NODE)], capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("srun: error: Unable to allocate resources: Requested nodes are busy\n",
         "Unable to allocate resources: Requested nodes are busy"),
        ("srun: job 2 queued and waiting for resources\nsrun: error: a\n", "a"),
        ("sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
         "invalid partition specified: nope; allocation failure: Invalid partition name specified"),
        ("", "it says nothing"),
    ],
)  # fmt: skip
def test_a_clients_words(said: str, shown: str) -> None:
    assert words(said) == shown


def test_the_options_of_a_short_task() -> None:
    assert task_options("gpu", "ml", None, "gpu:h100", 900) == [
        "--partition=gpu", "--account=ml", "--gres=gpu:h100:1", "--mem=1024",
    ]  # fmt: skip
    assert task_options(None, None, None, "gpu", 0) == ["--gres=gpu:1"]
