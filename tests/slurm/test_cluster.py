"""The test cluster is what it says: machines of their own, GPUs to ask for, images to run in."""

from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = pytest.mark.slurm


def batch(folder: Path, *lines: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "job.sbatch").write_text("\n".join(["#!/bin/bash", "#SBATCH --output=out --mem=1000", *lines, ""]))
    return folder


def test_nodes_are_machines_of_their_own(slurm: Cluster) -> None:
    said = slurm.call(
        "srun",
        "-N2",
        "--ntasks-per-node=1",
        "--gres=gpu:8",
        "bash",
        "-c",
        "hostname; nproc; echo $CUDA_VISIBLE_DEVICES; ps -e | wc -l",
    )
    assert said.returncode == 0, said.stderr
    words = said.stdout.split()
    assert words.count("0,1,2,3,4,5,6,7") == (0 if "devices" in "".join(slurm.lacks) else 2)
    if not slurm.lacks:
        assert {"n1", "n2"} <= set(words)


def test_a_node_has_a_network_of_its_own(slurm: Cluster) -> None:
    if slurm.lacks:
        pytest.xfail(slurm.lacks[0])
    said = slurm.call(
        "srun",
        "-wn2",
        "bash",
        "-c",
        "ip -o -4 addr show | wc -l; getent hosts n1 n2; ip route | wc -l; ping -c1 n1 >/dev/null 2>&1; echo",
    )
    assert said.stdout.split()[0] == "2"  # its own loopback, and one interface
    assert "n1" in said.stdout


def test_a_batch_job_ends(slurm: Cluster, tmp_path: Path) -> None:
    good = slurm.submit(batch(tmp_path / "good", "echo it ran"))
    bad = slurm.submit(batch(tmp_path / "bad", "exit 3"))
    assert slurm.wait(good) == "COMPLETED"
    assert (tmp_path / "good/out").read_text() == "it ran\n"
    assert slurm.wait(bad) == "FAILED"
    assert slurm.job(bad)["ExitCode"] == "3:0"
