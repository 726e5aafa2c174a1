"""Preflight on a real Slurm: only what needs a GPU is stood in for (`gpu_double.py`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_double
import pytest
from cluster import Cluster
from cluster.machine import what_python_needs
from gpu_double import nccl_text

pytestmark = pytest.mark.slurm

TRAINER = """#!/bin/bash
mkdir -p "attempts/$MOEKIT_ATTEMPT/exit"
if [[ -e sockets.$MOEKIT_ATTEMPT ]]; then
    cat "sockets.$MOEKIT_ATTEMPT"
    sleep 60
fi
for ((rank = 8 * SLURM_NODEID; rank < 8 * SLURM_NODEID + 8; rank++)); do
    echo '{"code": 0, "reason": "", "time": 1.0}' >"attempts/$MOEKIT_ATTEMPT/exit/rank$rank.json"
done
"""
ONE = "base: first_moe_smoke\n"
TWO = "base: first_moe_smoke\nparallel: {gpus: 16}\n"


PAGE = Path(__file__).parents[2] / "docs" / "preflight.md"


def masked(text: str) -> list[str]:
    """A report without what this machine lacks, the job's number and the time."""
    lines = [line for line in text.splitlines() if not line.startswith("  warning ")]
    return [re.sub(r"job \d+, [-\d]+ [:\d]+", "job J, WHEN", line) for line in lines]


class Machine:
    """The cluster, with a profile whose jobs look at their nodes."""

    def __init__(self, slurm: Cluster, root: Path, fabric: str) -> None:
        self.slurm, self.root = slurm, root
        root.mkdir()
        self.bin = gpu_double.install(root / "bin")
        trainer = root / "trainer"
        trainer.write_text(TRAINER)
        trainer.chmod(0o755)
        programs = {"nccl_tests": str(self.bin / "alltoall_perf"), "python": str(trainer)}
        self.fields: dict[str, Any] = {"preflight": True, "fabric": fabric, "shared_root": str(root), **programs}
        self.profile = slurm.profile(root.name, environment={"NCCL_DEBUG": "INFO"}, **self.fields)
        # this machine's limit on locked memory cannot be raised
        self.env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "MOEKIT_PREFLIGHT_ACCEPT": "memlock"}

    def be(self, **machine: Any) -> None:
        gpu_double.be(self.bin, **machine)

    def preflight(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.slurm.moekit("preflight", "--profile", self.profile, *words, **self.env)

    def verdict(self, *words: str) -> dict[str, Any]:
        done = self.preflight("--json", *words)
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def run(self, recipe: str, name: str) -> tuple[Path, int]:
        """A run directory, and the job that was submitted of it."""
        path = self.root / f"{name}.yaml"
        path.write_text(recipe)
        made = self.slurm.moekit("launch", path, "--profile", self.profile, "--no-submit", **self.env)
        assert made.returncode == 0, made.stderr
        return self.root / "runs" / name, self.slurm.submit(self.root / "runs" / name, **self.env)


@pytest.fixture
def machine(slurm: Cluster, request: pytest.FixtureRequest) -> Iterator[Machine]:
    name = re.sub(r"\W+", "-", request.node.name)[:40]
    yield Machine(slurm, slurm.shared_root / name, "efa")
    slurm.ready()


def test_baselines_then_a_slow_node_is_found_and_left_alone(machine: Machine) -> None:
    """The whole flow: clean runs make baselines, a slow allocation is bisected, and never becomes the measure."""
    first = machine.verdict("--nodes", "4")
    assert (first["across"], first["allreduce"], first["share"], first["refused"]) == (39.25, 398.52, None, "")
    assert {one["check"] for one in first["findings"]} <= {"memlock", "fabric", "xid", "inside", "across"}
    assert first["network"] == {node: ["Libfabric"] for node in machine.slurm.nodes}
    said = (machine.bin / "srun.said").read_text()
    assert "--ntasks=32 --ntasks-per-node=8 --gres=gpu:8 --mpi=pmix --cpu-bind=none" in said
    for nodes in ("2", "4"):
        assert machine.preflight("--nodes", nodes, "--baseline").returncode == 0
    root = machine.root / "preflight"
    kept = {path.name.split(".")[1]: json.loads(path.read_text()) for path in (root / "baselines").iterdir()}
    assert {name: (one["median_gb_s"], len(one["runs"])) for name, one in kept.items()} == {
        **{"1x8": (330.0, 18), "2x8": (77.14, 3), "4x8": (39.25, 3)},
    }
    measured = json.loads((root / f"{machine.root.name}.json").read_text())
    assert measured["alltoall_busbw_gbps"] == {"1": 330.0, "2": 77.14, "4": 39.25}

    machine.be(slow={"n3": 20.0})
    done = machine.preflight("--nodes", "4")
    assert done.returncode == 1, done.stderr
    assert "  bad           n3: all-to-all between n3 and n1 is 20.00 GB/s, below 69.43\n" in done.stdout
    (shown,) = re.findall(r"```text\n\$ moekit preflight --nodes 4 [^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert masked(done.stdout) == masked(shown)
    before = {path: path.read_text() for path in (root / "baselines").iterdir()}
    machine.be()
    frozen = machine.verdict("--nodes", "4", "--baseline")
    assert "no baseline of 4 nodes: the newest preflight of its kind was slow" in frozen["refused"]
    assert {path: path.read_text() for path in before} == before
    assert (frozen["inside"], frozen["across"]) == ({}, None)


def test_a_slow_pair_in_a_training_job(machine: Machine) -> None:
    """Before torchrun starts: the job of two nodes goes back into the queue, and trains on two others."""
    assert machine.preflight("--nodes", "2", "--baseline").returncode == 0
    machine.be(slow={"n1": 39.84})
    run, job = machine.run(TWO, "two")
    machine.slurm.wait(job, "PENDING", timeout_s=60)
    machine.slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
    assert machine.slurm.wait(job) == "COMPLETED", [path.read_text() for path in run.glob("slurm-*.log")]
    refused = json.loads((run / "attempts/1/refused.json").read_text())
    assert list(refused["bad"]) == ["n1", "n2"]  # which of the two it is, two nodes cannot tell
    assert not (run / "attempts/1/train.log").exists()
    assert json.loads((run / "attempts/2/decision.json").read_text())["nodes"] == ["n3", "n4"]
    assert json.loads((run / "attempts/2/end.json").read_text())["kind"] == "ended"
    why = machine.slurm.moekit("why", run, COLUMNS="200").stdout
    assert "excluded  n1, n2" in " ".join(why.split()).replace("excluded n1", "excluded  n1")
    shown = machine.slurm.moekit("preflight", run)
    assert (shown.returncode, "77.14 GB/s, 100% of the baseline's 77.14" in shown.stdout) == (0, True)


def test_a_broken_gpu_is_left_out(machine: Machine) -> None:
    machine.be(diag={"n1": {"2": "GPU 2 has uncorrectable memory errors"}})
    run, job = machine.run(ONE, "broken")
    machine.slurm.wait(job, "PENDING", timeout_s=60)
    machine.slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
    assert machine.slurm.wait(job) == "COMPLETED"
    sentence = "preflight: n1: DCGM: software on GPU 2: GPU 2 has uncorrectable memory errors"
    assert json.loads((run / "attempts/1/end.json").read_text())["sentence"] == sentence
    kept = (run / "attempts/1/preflight/nodes/n1.dcgm.txt").read_text()
    assert "GPU 2 has uncorrectable memory errors" in kept
    assert json.loads((run / "attempts/2/decision.json").read_text())["nodes"] == ["n2"]


def test_where_no_node_is_to_blame_the_job_ends(machine: Machine) -> None:
    """A binary without MPI: each rank measures alone, everywhere."""
    (machine.bin / "no_mpi").touch()
    run, job = machine.run(ONE, "no_mpi")
    assert machine.slurm.wait(job) == "FAILED"
    decision = json.loads((run / "decision.json").read_text())
    assert decision["action"] == "stop"
    assert "8 processes each say rank 0: each measured alone" in decision["sentence"]
    assert decision["sentence"].endswith("no node alone is to blame, so others would be refused as well")


def test_sockets_stop_a_launch(machine: Machine) -> None:
    """The first attempt's own log says it, when it has begun; the second takes the fabric."""
    path = machine.root / "sockets.yaml"
    path.write_text(TWO)
    made = machine.slurm.moekit("launch", path, "--profile", machine.profile, "--no-submit", **machine.env)
    assert made.returncode == 0, made.stderr
    run = machine.root / "runs" / "sockets"
    (run / "sockets.1").write_text(nccl_text("n1", "Libfabric") + nccl_text("n2", "Socket"))
    job = machine.slurm.submit(run, **machine.env)
    machine.slurm.wait(job, "PENDING", timeout_s=60)
    machine.slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
    assert machine.slurm.wait(job) == "COMPLETED"
    end = json.loads((run / "attempts/1/end.json").read_text())
    assert end["kind"] == "refused"
    assert "n2: NCCL uses TCP sockets where the fabric is efa: version EFA_1.4 is missing" in end["sentence"]
    assert "n2" not in json.loads((run / "attempts/2/decision.json").read_text())["nodes"]


def test_values_that_arrive_wrong_are_their_nodes_fault(machine: Machine) -> None:
    """And a node whose DCGM does not answer is not: that is said, and is no pass."""
    machine.be(wrong={"n2": 12}, diag={"n1": "no daemon"})
    verdict = machine.verdict("--nodes", "2")
    assert verdict["bad"] == {"n2": "all-to-all inside it: 12 values arrived wrong"}
    assert verdict["across"] is None
    unmade = [one["node"] for one in verdict["findings"] if one["level"] == "skip" and "no DCGM daemon" in one["what"]]
    assert unmade == ["n1"]


def test_two_settings_in_turn(machine: Machine) -> None:
    machine.be(settings={"NCCL_BUFFSIZE=8388608": 1.1})
    verdict = machine.verdict("--nodes", "2", "--try", "NCCL_BUFFSIZE=8388608")
    tried = verdict["tried"]
    assert (tried["as it is"], tried["tried"]) == ([77.14] * 3, pytest.approx([84.85] * 3, abs=0.01))
    root = machine.root / "preflight"
    assert not (root / "baselines").exists()
    assert not list(root.glob("*.json"))


def test_in_an_image_of_its_own(machine: Machine) -> None:
    """As on the handbook's cluster: nodes are asked outside the container, and measured in it."""
    images = {"container": "pyxis", "nccl_tests_image": str(machine.slurm.image), "library_path": ["/training/lib"]}
    mounts = [*what_python_needs(machine.root), str(Path(gpu_double.__file__).parent)]
    machine.profile = machine.slurm.profile("image", **{**machine.fields, **images, "mounts": mounts})
    verdict = machine.verdict("--nodes", "2", "--level", "2")
    assert (verdict["across"], verdict["refused"]) == (77.14, "")
    said = (machine.bin / "srun.said").read_text().splitlines()
    asked, measured = said[0], said[-1]
    assert "--container" not in asked
    assert f"--container-image={machine.slurm.image} " in measured
    folder = machine.root / "preflight" / "jobs" / "1"
    assert f" --no-container-mount-home --no-container-entrypoint --container-workdir={folder} bash" in measured
    assert (machine.bin / "dcgmi.said").read_text().splitlines()[0].endswith(" diag -r 2 --fail-early -j")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--level", "3"),
            "error: level 3 of DCGM's diagnostic is for maintenance: it takes up to hours, and heats the",
        ),
        (("--baseline", "--try", "A=1"), "error: `--try` measures settings that a baseline does not have"),
        (("--try", "A"), "error: `--try A` is no setting\n    hint: `--try NCCL_BUFFSIZE=8388608`"),
        (("--nodes", "9"), "error: sbatch refused the job: "),
    ],
)
def test_what_is_refused(machine: Machine, words: tuple[str, ...], said: str) -> None:
    done = machine.preflight(*words)
    assert done.returncode == 1
    assert said in done.stderr
