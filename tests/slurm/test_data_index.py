"""`moekit data index` as a job on CPUs: one for an index, and a launch waits for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from tiny import tiny

pytestmark = [pytest.mark.slurm, pytest.mark.megatron]


@pytest.fixture(autouse=True)
def _nothing_left(slurm: Cluster) -> Iterator[None]:
    yield
    slurm.call("scancel", "--user=root")


def test_an_index_has_one_job_and_a_launch_waits_for_it(slurm: Cluster, tmp_path: Path) -> None:
    recipe = tmp_path / "beforehand.yaml"
    recipe.write_text(tiny(20).replace("seq_length: 64", "seq_length: 48"))
    fields = {"gpus_per_node": 2, "cpus_per_task": 2, "cpu_partition": "cpu", "fabric": "none"}
    profile = slurm.profile("beforehand", **fields)
    # the partition takes no work yet, so that the job is still there at the next commands
    slurm.call("scontrol", "update", "PartitionName=cpu", "State=DOWN")
    try:
        words: list[str | Path] = ["data", "index", recipe, "--on", "slurm", "--profile", profile, "--json"]
        first, second = slurm.moekit(*words), slurm.moekit(*words)
        launched = slurm.moekit("launch", recipe, "--on", "slurm", "--profile", profile, "--json")
        assert [one.returncode for one in (first, second, launched)] == [0, 0, 0], launched.stderr
        (said,), (again,) = json.loads(first.stdout), json.loads(second.stdout)
        assert said == again
        assert json.loads(launched.stdout)["after"] == [said["job"]]
        assert not (slurm.shared_root / "runs/beforehand/index").exists()
    finally:
        slurm.call("scontrol", "update", "PartitionName=cpu", "State=UP")
    assert slurm.wait(int(said["job"])) == "COMPLETED"
    log = (Path(said["directory"]) / f"index/slurm-{said['job']}.log").read_text()
    assert f"in {said['cache']}: 8 files built" in log
    assert said["cache"] == str(slurm.shared_root / "data/python-docs/cache")

    (other,) = json.loads(slurm.moekit(*words).stdout)
    assert other["job"] != said["job"]
    assert slurm.wait(int(other["job"])) == "COMPLETED"
    log = (Path(said["directory"]) / f"index/slurm-{other['job']}.log").read_text()
    assert "it was there already" in log
