"""Which network NCCL took, from its lines; and what was missing where it took sockets (handbook 2.2, 3.7)."""

from pathlib import Path

import pytest
from gpu_double import nccl_text

from moekit.job.preflight.findings import bad_nodes, refusal
from moekit.job.preflight.network import judge_network, read_network

EFA_14 = (
    "version EFA_1.4 is missing in /lib/x86_64-linux-gnu/libefa.so.1, which /opt/amazon/efa/lib/libfabric.so.1 needs"
)
NODES = tuple(f"n{number}" for number in range(1, 17))


def log(**networks: str) -> list[str]:
    """Lines of 16 nodes, on Libfabric where nothing else is said."""
    return [line for node in NODES for line in nccl_text(node, networks.get(node, "Libfabric")).splitlines()]


def refused(lines: list[str], fabric: str = "efa", nodes: tuple[str, ...] = NODES) -> tuple[str, dict[str, str]]:
    findings = list(judge_network(fabric, read_network(lines), nodes))
    bad = bad_nodes(findings, nodes)
    return refusal(findings, bad), bad


def test_all_on_the_fabric() -> None:
    assert refused(log()) == ("", {})


def test_one_node_of_sixteen_is_named() -> None:
    sentence, bad = refused(log(n7="Socket"))
    assert list(bad) == ["n7"]
    assert sentence == (
        f"n7: NCCL uses TCP sockets where the fabric is efa: {EFA_14}; the plug-in libnccl-net-ofi.so is not found"
    )


def test_all_on_sockets_is_nothing_of_a_nodes() -> None:
    sentence, bad = refused(log(**dict.fromkeys(NODES, "Socket")))
    assert bad == {}
    assert sentence.startswith(
        "on every node: NCCL uses TCP sockets where the fabric is efa: version EFA_1.4 is missing"
    )


@pytest.mark.parametrize(
    "said",
    [
        "n1:1:1 [0] NCCL INFO Using network AWS Libfabric",
        "n1:1:1 [0] NCCL INFO Assigned NET plugin Libfabric to comm",
        "0: n1:1:1 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)\n"
        "n1:1:1 [3] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0/GDRDMA",
        "[2026-11-29 19:32:57] n1:1:1 [0] net.cc:12 NCCL INFO Using network Libfabric",
    ],
)  # fmt: skip
def test_ways_to_say_the_fabric(said: str) -> None:
    assert refused(said.splitlines(), nodes=("n1", "n2")) == ("", {})


@pytest.mark.parametrize(
    "said",
    [
        "n1:1:1 [0] NCCL INFO Using network Socket",
        "n1:1:1 [0] NCCL INFO Assigned NET plugin Socket to comm",
        "n1:1:1 [0] NCCL INFO Channel 00 : 0[0] -> 8[0] [receive] via NET/Socket/0",
        "n1:1:1 [0] NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm (found 1 nics)\n"
        "n1:1:1 [0] NCCL INFO Using network Libfabric",
    ],
)  # fmt: skip
def test_ways_to_say_sockets(said: str) -> None:
    lines = [*said.splitlines(), "n2:1:1 [0] NCCL INFO Using network Libfabric"]
    assert list(refused(lines, nodes=("n1", "n2"))[1]) == ["n1"]


def test_what_is_no_fallback() -> None:
    """A bootstrap is over sockets with every network, and plug-ins lack parts that nobody needs (field report B60)."""
    lines = [
        "n1:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>",
        "n1:1:1 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin symbol",
        "n1:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.4<0>",
        "n1:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>",
        "n1:1:1 [0] NCCL INFO Using network IB",
    ]
    assert refused(lines, "ib", ("n1", "n2")) == ("", {})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("NCCL INFO NET/Plugin: Could not find: libnccl-net.so", "the plug-in libnccl-net.so is not found"),
        ("NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).", "the plug-in libnccl-net.so is not found"),
        (
            "NCCL INFO NET/Plugin: libnccl-net-aws-ofi.so: cannot open shared object file: No such file or directory",
            "libnccl-net-aws-ofi.so is not found",
        ),
        ("NCCL WARN NET/OFI No eligible providers were found", "the plug-in found no provider for the fabric"),
        (
            "NCCL INFO NET/Plugin: dlerror=libfabric.so.1: version `FABRIC_1.7' not found. "
            "No plugin found (libnccl-net)",
            "version FABRIC_1.7 is missing in libfabric.so.1; the plug-in libnccl-net is not found",
        ),
        ("NCCL INFO NET/IB : No device found.", "NCCL found no InfiniBand device"),
    ],
)
def test_what_is_missing_is_named(line: str, reason: str) -> None:
    lines = [f"n1:1:1 [0] {line}", "n1:1:1 [0] NCCL INFO Using network Socket"]
    sentence, _ = refused(lines, nodes=("n1", "n2"))
    assert sentence.endswith(reason)


def test_where_nothing_is_said() -> None:
    (found,) = judge_network("efa", {}, NODES)
    assert (found.level, "NCCL_DEBUG" in found.what) == ("skip", True)
    (found,) = judge_network("efa", read_network(log()), [*NODES, "n17"])
    assert (found.level, found.what) == ("skip", "NCCL says nothing of its network on n17")


def test_what_is_not_judged() -> None:
    taken = read_network(log(n1="Socket"))
    assert list(judge_network("none", taken, NODES)) == list(judge_network("efa", taken, ["n1"])) == []


def test_hosts_that_slurm_calls_otherwise() -> None:
    sentence, bad = refused([line.replace("n1:", "ip-10-0-0-4:") for line in log(n1="Socket")], nodes=("n1", "n2"))
    assert (bad, sentence.startswith("ip-10-0-0-4: NCCL uses TCP sockets")) == ({}, True)


def test_a_line_captured_without_a_gpu() -> None:
    text = (Path(__file__).parent / "samples" / "nccl-2.29.7-cpu-only.txt").read_text()
    taken = read_network(text.splitlines())
    assert {node: (one.used, list(one.reasons)) for node, one in taken.items()} == {"vm": ("", [])}
