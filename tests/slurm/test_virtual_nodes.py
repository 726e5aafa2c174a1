"""The test cluster is what it says: machines of their own, GPUs to ask for, images to run in."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster

from moekit.cluster.profile import find_cluster

pytestmark = pytest.mark.slurm

SERVE = """
import os, pathlib, socket, time
server = socket.create_server(("127.0.0.1", 0)) if os.environ["SLURM_PROCID"] == "0" else None
port = pathlib.Path("port")
if server:
    port.write_text(str(server.getsockname()[1]))
    time.sleep(3)
else:
    while not port.exists() or not port.read_text():
        time.sleep(0.05)
    try:
        socket.create_connection(("127.0.0.1", int(port.read_text())), 1)
        print("reached")
    except OSError:
        print("not reached")
"""


def batch(folder: Path, *lines: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "job.sbatch").write_text("\n".join(["#!/bin/bash", "#SBATCH --output=out --mem=1000", *lines, ""]))
    return folder


def test_it_comes_up_quickly(cluster: Cluster) -> None:
    assert len(cluster.nodes) >= 2
    assert cluster.up_after_s < 20


def test_nodes_are_machines_of_their_own(slurm: Cluster) -> None:
    command = "hostname; echo $SLURM_GPUS_ON_NODE; echo $CUDA_VISIBLE_DEVICES"
    said = slurm.call("srun", "-N2", "--ntasks-per-node=1", "--gres=gpu:8", "bash", "-c", command)
    assert said.returncode == 0, said.stderr
    words = said.stdout.split()
    assert words.count("8") == 2
    assert words.count("0,1,2,3,4,5,6,7") == (0 if "devices" in "".join(slurm.lacks) else 2)
    if not any("namespaces" in sentence for sentence in slurm.lacks):
        assert len({"n1", "n2", "n3", "n4"} & set(words)) == 2


def test_a_nodes_loopback_is_its_own(slurm: Cluster, tmp_path: Path) -> None:
    words = ["srun", "-N2", "--ntasks-per-node=1", f"--chdir={tmp_path}", sys.executable, "-c", SERVE]
    said = slurm.call(*words).stdout.strip()
    assert said == ("reached" if slurm.lacks else "not reached")


def test_a_batch_job_ends(slurm: Cluster, tmp_path: Path) -> None:
    good = slurm.submit(batch(tmp_path / "good", "echo it ran"))
    bad = slurm.submit(batch(tmp_path / "bad", "exit 3"))
    assert slurm.wait(good) == "COMPLETED"
    assert (tmp_path / "good/out").read_text() == "it ran\n"
    assert slurm.wait(bad) == "FAILED"
    assert slurm.job(bad)["ExitCode"] == "3:0"


def test_a_profile_describes_it(slurm: Cluster) -> None:
    assert find_cluster(str(slurm.profile())).shared_root == str(slurm.shared_root)
    assert find_cluster(str(slurm.profile(container="pyxis"))).image == str(slurm.image)


def test_a_job_in_an_image(slurm: Cluster, tmp_path: Path) -> None:
    cluster = find_cluster(str(slurm.profile(container="pyxis")))
    mounts = ",".join(f"{mount}:{mount}" for mount in (cluster.mounts or ()))
    words = ["srun", f"--container-image={slurm.image}", f"--container-mounts={mounts},{tmp_path}:{tmp_path}"]
    done = slurm.call(
        *words, "--container-workdir", tmp_path, "bash", "-c", "pwd; echo $LD_LIBRARY_PATH; ls /root | wc -l"
    )
    assert done.returncode == 0, done.stderr
    if not any("image" in sentence for sentence in slurm.lacks):
        assert done.stdout.splitlines() == [str(tmp_path), "/image/lib", "0"]
    refused = slurm.call("srun", "--container-image=/no/such.sqsh", "true")
    assert refused.returncode == 1
    assert "/no/such.sqsh: No such file or directory" in refused.stderr


def test_a_node_that_dies_and_comes_back(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(batch(tmp_path / "sleeps", "#SBATCH --nodelist=n4 --no-requeue", "sleep 600"))
    slurm.wait(job, "RUNNING")
    slurm.kill("n4")
    slurm.call("scontrol", "update", "nodename=n4", "state=down", "reason=test")  # else Slurm asks for 10 to 30 s
    assert slurm.wait(job) == "NODE_FAIL"
    began = time.monotonic()
    slurm.start("n4")
    slurm.ready()
    assert time.monotonic() - began < 15
