"""`moekit image verify` on a real Slurm, in a container: the python in it says what a GPU's would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = pytest.mark.slurm

PYTHON = """#!/bin/sh
# called as python -c CODE MODE, with the profile's variables
case $3 in
gpus) echo 'moekit-image: GPUS' ;;
network)
    echo "$(hostname):7:7 [0] NCCL INFO Using network $A_NETWORK"
    echo "moekit-image: {\\"rank\\": $SLURM_PROCID, \\"sum\\": $SLURM_NTASKS.0, \\"right\\": true}"
    echo "nodes $SLURM_STEP_NODELIST $NCCL_DEBUG $LD_LIBRARY_PATH"
    ;;
esac
"""
GPUS = {
    "torch": "2.13.0a0+8145d630e8.nv26.06",
    "transformer_engine": "2.16.0+4220403e",
    "devices": [{"name": "NVIDIA H200", "sum": 499500.0, "right": True}] * 8,
}


def test_an_image_is_verified_on_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    python = slurm.shared_root / "verify-python"
    python.write_text(PYTHON.replace("GPUS", json.dumps(GPUS)))
    python.chmod(0o755)
    said = {"torch": "2.13.0", "transformer_engine": "2.16.0", "library_path": ["/opt/amazon/efa/lib"]}
    said |= {"container": "pyxis", "python": str(python), "environment": {"A_NETWORK": "Libfabric"}}
    profile = slurm.profile("verify", **said)
    words = [sys.executable, "-m", "moekit", "image", "verify", "--profile", str(profile)]
    done = subprocess.run(words, cwd=tmp_path, env=slurm.env(), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 NVIDIA H200" in done.stdout
    assert "right over 2 nodes" in done.stdout
    if not slurm.lacks:
        hosts = {line.split()[2] for line in done.stdout.splitlines() if "network of" in line}
        assert len(hosts) == 2
    slurm.profile("verify", **{**said, "torch": "2.12.0"})
    other = subprocess.run(words, cwd=tmp_path, env=slurm.env(), capture_output=True, text=True, timeout=150)
    assert other.returncode == 1
    assert "should be 2.12.0" in other.stdout
    assert "network" not in other.stdout  # what is wrong inside comes first
