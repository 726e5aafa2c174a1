"""`moekit image verify`: what a container says, judged against a profile; srun and the libraries that want a GPU are
stand-ins."""

import json
import sys
from pathlib import Path

import pytest
from image_site import ROOT, Machine

from moekit.cluster.profile import find_cluster
from moekit.image.verify import Finding, command, is_version, judge_gpus, judge_network, remedies

AWS = find_cluster("aws-p5")
HANDBOOK = {
    "torch": "2.13.0a0+8145d630e8.nv26.06",
    "transformer_engine": "2.16.0+4220403e",
    "devices": [{"name": "NVIDIA H100 80GB HBM3", "sum": 499500.0, "right": True}] * 8,
}


def said(**changed: object) -> str:
    return f"==== PyTorch ====\nmoekit-image: {json.dumps({**HANDBOOK, **changed})}\n"


def wrong(findings: list[Finding]) -> dict[str, tuple[str, str]]:
    return {one.what: (one.found, one.wanted) for one in findings if one.wanted}


def test_the_handbooks_image_is_as_its_profile_says() -> None:
    findings = list(judge_gpus(said(), AWS))
    assert wrong(findings) == {}
    assert [one.found for one in findings] == [
        HANDBOOK["torch"],
        HANDBOOK["transformer_engine"],
        "8 NVIDIA H100 80GB HBM3",
        "right on each",
    ]


def test_what_is_another() -> None:
    broken = [*HANDBOOK["devices"][:6], {"name": "NVIDIA H100 80GB HBM3", "sum": 1.0, "right": False}]
    found = wrong(
        list(judge_gpus(said(torch="2.12.0", transformer_engine="not there: No module", devices=broken), AWS))
    )
    assert found == {
        "torch": ("2.12.0", "2.13.0"),
        "transformer_engine": ("not there: No module", "2.16.0"),
        "devices": ("7 NVIDIA H100 80GB HBM3", "8"),
        "sum": ("wrong on device 6", "right"),
    }


@pytest.mark.parametrize(
    ("found", "wanted", "is_it"),
    [
        ("2.13.0a0+8", "2.13.0", True),
        ("2.13.01", "2.13.0", False),
        ("2.13.0.1", "2.13.0", False),
        ("2x13.0", "2.13.0", False),
    ],
)
def test_versions(found: str, wanted: str, is_it: bool) -> None:
    assert is_version(found, wanted) is is_it


NCCL = "0: {host}:4211:4211 [0] NCCL INFO Using network {network}\n"
SUMS = 'moekit-image: {"rank": 0, "sum": 2.0, "right": true}\nmoekit-image: {"rank": 1, "sum": 2.0, "right": true}\n'


def test_the_network_of_each_node() -> None:
    both = NCCL.format(host="ip-10-0-0-1", network="Libfabric") + NCCL.format(
        host="ip-10-0-0-2", network="AWS Libfabric"
    )
    assert wrong(list(judge_network(both + SUMS, AWS, 2))) == {}
    one = NCCL.format(host="ip-10-0-0-1", network="Libfabric") + NCCL.format(host="ip-10-0-0-2", network="Socket")
    findings = list(judge_network(one + SUMS, AWS, 2))
    assert wrong(findings) == {"network of ip-10-0-0-2": ("Socket", "Libfabric")}
    assert "library version" in remedies(findings)
    silent = list(judge_network(SUMS, AWS, 2))
    assert wrong(silent) == {"network": ("NCCL named it on 0 of 2 nodes", "Libfabric")}
    ib = NCCL.format(host="a", network="IB") + NCCL.format(host="b", network="IB")
    assert wrong(list(judge_network(ib + SUMS, find_cluster("h100-ib"), 2))) == {}


def test_first_of_a_list_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # nothing of it travels in the wheel
    monkeypatch.syspath_prepend(str(ROOT / "images"))
    from look_inside import first_of  # type: ignore[import-not-found]

    lists = {"n1": "n1", "gpu[03-04,7],login": "gpu03", "a-[9,10]": "a-9", "ip-10-1-2-3,ip-10-1-2-4": "ip-10-1-2-3"}
    assert {nodes: first_of(nodes) for nodes in lists} == lists


def test_srun_is_asked_as_for_training() -> None:
    words = command("/i/x.sqsh", AWS, "network", 2)
    assert words[:5] == ["srun", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--time=15"]
    assert {"--container-image=/i/x.sqsh", "--no-container-mount-home", "--no-container-entrypoint"} <= set(words)
    script = words[words.index("-c") + 1]
    assert "export NCCL_NET_PLUGIN=ofi\n" in script
    assert 'export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib"${LD_LIBRARY_PATH:+' in script
    assert words[-1] == "network"


TORCH = '''"""A stand-in for torch, where there is no GPU."""
import os
from datetime import timedelta
__version__ = "2.13.0a0+8145d630e8.nv26.06"
float32 = None
class Value:
    def __init__(self, value): self.value = value
    def sum(self): return self
    def item(self): return self.value
    def __getitem__(self, at): return self
def arange(number, **_): return Value(float(sum(range(number))))
def ones(number, **_): return Value(1.0)
class cuda:
    device_count = staticmethod(lambda: int(os.environ["DEVICES"]))
    get_device_name = staticmethod(lambda number: "NVIDIA H100 80GB HBM3")
class distributed:
    @staticmethod
    def init_process_group(backend, init_method, rank, world_size, timeout):
        assert init_method == "tcp://n1:29513", init_method
        distributed.world = world_size
    @staticmethod
    def all_reduce(value):
        value.value *= distributed.world
        network = os.environ["NETWORK"] if int(os.environ["SLURM_PROCID"]) else "Libfabric"
        assert os.environ["NCCL_DEBUG"] == "INFO" and os.environ["NCCL_NET_PLUGIN"] == "ofi"
        print(f"n{int(os.environ['SLURM_PROCID']) + 1}:7:7 [0] NCCL INFO Using network {network}")
    destroy_process_group = staticmethod(lambda: None)
'''
SRUN = """#!/bin/bash
for word in "$@"; do case $word in --nodes=*) nodes=${word#*=} ;; esac; done
while [[ $1 == --* ]]; do shift; done
export SLURM_NTASKS=$nodes SLURM_STEP_NODELIST="n[1-$nodes]"
for ((SLURM_PROCID = 0; SLURM_PROCID < nodes; SLURM_PROCID++)); do export SLURM_PROCID; "$@" || exit; done
"""


@pytest.fixture
def site(machine: Machine) -> Machine:
    """A login node whose srun runs tasks here."""
    (machine.folder / "bin" / "srun").write_text(SRUN)
    (machine.folder / "bin" / "srun").chmod(0o755)
    (machine.folder / "bin" / "python").symlink_to(sys.executable)
    modules = machine.folder / "modules"
    (modules / "transformer_engine").mkdir(parents=True)
    (modules / "torch.py").write_text(TORCH)
    (modules / "transformer_engine" / "__init__.py").write_text('__version__ = "2.16.0+4220403e"\n')
    machine.env |= {"PYTHONPATH": f"{ROOT}:{modules}", "DEVICES": "8", "NETWORK": "Libfabric"}
    return machine


def test_the_whole_flow(site: Machine) -> None:
    done = site.moekit("image", "verify", "--profile", "aws-p5")
    assert done.returncode == 0, done.stderr
    assert "8 NVIDIA H100 80GB HBM3" in done.stdout
    assert "network of n2" in done.stdout
    assert done.stdout.endswith("/fsx/moekit/images/pytorch-26.06-efa.sqsh: as profile `aws-p5` says\n")
    slow = site.moekit("image", "verify", "/i/other.sqsh", "--profile", "aws-p5", NETWORK="Socket")
    assert slow.returncode == 1
    assert "Socket   should be Libfabric" in slow.stdout
    assert "error: 1 of 7 things are not as they should be" in slow.stderr
    few = site.moekit("image", "verify", "--profile", "aws-p5", "--json", DEVICES="7")
    assert few.returncode == 1
    assert [one["wanted"] for one in json.loads(few.stdout)] == ["", "", "8", ""]  # and the network is not tried


def test_an_image_that_does_not_start(site: Machine, tmp_path: Path) -> None:
    (site.folder / "bin" / "srun").write_text("#!/bin/sh\necho 'slurmstepd: error: pyxis: no such image'\nexit 1\n")
    done = site.moekit("image", "verify", "--profile", "aws-p5")
    assert done.returncode == 1
    assert "the image cannot be asked, srun ended with 1: slurmstepd: error: pyxis: no such image" in done.stderr
    assert "no `--profile` says on which nodes" in site.moekit("image", "verify").stderr
