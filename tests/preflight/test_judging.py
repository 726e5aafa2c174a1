"""What nodes say of themselves, judged beside each other."""

from collections.abc import Mapping
from typing import Any

import pytest
from gpu_double import diag_json, gpu_rows

from moekit.job.preflight.findings import Finding, bad_nodes, refusal
from moekit.job.preflight.judging import judge_nodes

NODES = ("n1", "n2", "n3")
EFA = [{"name": f"efa_{number}", "driver": "efa", "state": "4: ACTIVE"} for number in range(32)]
EFA += [{"name": "mlx5_0", "driver": "mlx5_core", "state": "4: ACTIVE"}]
ASKED = {"gpus_per_node": 8, "gpu": "h200", "fabric": "efa"}


def report(**changes: Any) -> dict[str, Any]:
    """What a good node says."""
    return {
        "gpus": {"code": 0, "text": gpu_rows([{}] * 8)},
        "rows": {"code": 0, "text": ""},
        "dcgm": {"code": 0, "text": diag_json({})},
        "kernel": {"code": 0, "text": ""},
        "uptime_s": 1e6,
        "memlock": -1,
        "rdma": EFA,
        "locks": {"flock": "kept out", "lockf": "kept out"},
        "speed": {"write_s": 0.1, "read_s": 0.1, "same": True},
        "names": {node: f"10.0.0.{node[1]}" for node in NODES},
        "reach": "reached",
        **changes,
    }


def judged(asked: Mapping[str, Any] = ASKED, **changed: dict[str, Any]) -> list[Finding]:
    """Findings of three nodes, of which those named say something else."""
    return judge_nodes({node: report(**changed.get(node, {})) for node in NODES}, NODES, asked)


def everywhere(**changes: Any) -> list[Finding]:
    return judged(**dict.fromkeys(NODES, changes))


def test_good_nodes_have_nothing() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dcgm": {"code": 226, "text": diag_json({2: "bad memory"})}}, "DCGM: software on GPU 2: bad memory"),
        ({"gpus": {"code": 0, "text": gpu_rows([{}] * 7)}}, "nvidia-smi shows 7 GPUs where the job has 8"),
        ({"gpus": {"code": None, "text": ""}}, "`nvidia-smi` does not answer: a GPU or the driver hangs"),
        ({"gpus": {"code": 15, "text": "No device handle"}}, "`nvidia-smi` ends with 15: No device handle"),
        ({"rdma": EFA[:31]}, "31 of its EFA devices are up, of another node 32"),
        ({"speed": {"write_s": 0.1, "read_s": 0.1, "same": False}},
         "what it read in the shared folder is not what it wrote"),
    ],
)  # fmt: skip
def test_a_broken_node_is_named(changes: dict[str, Any], what: str) -> None:
    findings = judged(n2=changes)
    assert bad_nodes(findings, NODES) == {"n2": what}
    assert refusal(findings, {"n2": what}) == f"n2: {what}"


@pytest.mark.parametrize(
    ("changes", "check", "what"),
    [
        ({"memlock": 65536}, "memlock", "a job may lock 65536 bytes of memory, and efa needs `unlimited`"),
        (
            {"names": {"n1": "10.0.0.1", "n2": "? Name or service not known"}},
            "names",
            "it does not know the name of n2",
        ),
        ({"names": {"n1": "10.0.0.1", "n9": "127.0.1.1"}}, "names", "it takes n9 for itself (127.x)"),
        ({"reach": "timed out"}, "names", "it does not reach a port of the first node: timed out"),
        ({"speed": {"error": "read-only file system"}}, "speed", "the shared folder cannot be written: read-only"),
    ],
)
def test_what_a_site_sets_is_a_nodes_fault_only_where_others_have_it_not(
    changes: dict[str, Any], check: str, what: str
) -> None:
    alone = judged(n2=changes)
    assert [(one.node, one.check, one.level) for one in alone] == [("n2", check, "fail")]
    assert list(bad_nodes(alone, NODES)) == ["n2"]
    of_all = everywhere(**changes)
    assert bad_nodes(of_all, NODES) == {}
    assert refusal(of_all, {}).startswith(f"on every node: {what}")


def test_a_broken_gpu_on_every_node_is_every_nodes() -> None:
    findings = everywhere(dcgm={"code": 226, "text": diag_json({2: "bad memory"})})
    assert list(bad_nodes(findings, NODES)) == list(NODES)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dcgm": {"code": 127, "text": ""}}, "DCGM's diagnostic was not run: there is no `dcgmi`"),
        ({"dcgm": {"code": 235, "text": "Error: unable to establish a connection"}}, "no DCGM daemon answers"),
        ({"gpus": {"code": 127, "text": ""}}, "there is no `nvidia-smi`"),
        ({"kernel": {"code": 1, "text": "dmesg: Operation not permitted"}}, "the kernel's log cannot be read"),
    ],
)
def test_what_could_not_be_looked_at_is_no_fault_and_no_pass(changes: dict[str, Any], what: str) -> None:
    findings = judged(n2=changes)
    assert [(one.node, one.level) for one in findings] == [("n2", "skip")]
    assert what in findings[0].what
    assert refusal(findings, bad_nodes(findings, NODES)) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"dcgm": {"code": 226, "text": diag_json({0: "Persistence mode is disabled"}, severity=5)}},
        {"dcgm": {"code": 0, "text": diag_json({0: "a bit warm"}, status="Warn")}},
        {"locks": {"flock": "let in", "lockf": "kept out"}},
        {"locks": {"flock": "function not implemented", "lockf": "kept out"}},
        {"speed": {"write_s": 9.0, "read_s": 0.1, "same": True}},
    ],
)
def test_what_is_a_warning(changes: dict[str, Any]) -> None:
    assert [(one.node, one.level) for one in judged(n2=changes)] == [("n2", "warn")]


def test_without_a_fabric_its_limits_do_not_count() -> None:
    assert judged({**ASKED, "fabric": "none"}, n2={"memlock": 65536, "rdma": []}) == []


def test_devices_that_no_node_shows() -> None:
    """NCCL's own lines decide then: a site may hide /sys."""
    findings = everywhere(rdma=[])
    assert {one.level for one in findings} == {"warn"}


def test_infiniband_ports_that_are_down() -> None:
    ports = [{"name": f"mlx5_{number}", "driver": "mlx5_core", "state": "4: ACTIVE"} for number in range(8)]
    down = [*ports[:7], {**ports[7], "state": "1: DOWN"}]
    found = judged({**ASKED, "fabric": "ib"}, n1={"rdma": ports}, n2={"rdma": ports}, n3={"rdma": down})
    assert [(one.node, one.what) for one in found] == [("n3", "7 of its IB devices are up, of another node 8")]


def test_a_node_that_says_nothing() -> None:
    findings = judge_nodes({"n1": report(), "n2": report()}, NODES, ASKED)
    assert list(bad_nodes(findings, NODES)) == ["n3"]


def test_a_sentence_names_a_few_of_many() -> None:
    nodes = [f"n{number}" for number in range(64)]
    assert refusal([], dict.fromkeys(nodes[:10], "slow")).endswith("; n7: slow; and 2 more nodes")
    alike = [Finding(node, "inside", "fail", "no such file", own=False) for node in nodes]
    assert (bad_nodes(alike, nodes), refusal(alike, {})) == ({}, "on every node: no such file")
