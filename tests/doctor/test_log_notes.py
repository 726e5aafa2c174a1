"""What a log says besides causes: the network of each node, and Megatron's tests of the GPUs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from moekit.doctor.evidence import Log
from moekit.doctor.report import Finding, of_logs
from moekit.doctor.triage import read_log
from moekit.watch.transport import Networks, socket_hosts


def networks(*lines: str) -> Networks:
    found = Networks()
    for line in lines:
        found.take(line.encode())
    return found


def findings(text: str) -> list[Finding]:
    return of_logs([Log(1, Path(), read_log(io.BytesIO(text.encode())))])


@pytest.mark.parametrize(
    ("said", "network"),
    [
        ("NCCL INFO Using network AWS Libfabric", "AWS Libfabric"),
        ("NCCL INFO Using network Libfabric", "Libfabric"),
        ("NCCL INFO Using network IB", "IB"),
        ("NCCL INFO Using network Socket", "Socket"),
        ("NCCL INFO Assigned NET plugin Socket to comm", "Socket"),
        ("NCCL INFO Assigned NET plugin AWS Libfabric to comm", "AWS Libfabric"),
        ("NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)", "efa"),
        ("NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm (found 1 nics)", "tcp"),
        ("NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0", "Socket"),
        ("NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA", "IB"),
    ],
)
def test_a_nodes_network(said: str, network: str) -> None:
    found = networks(f"gpu-3.cluster:93:128 [0] {said}")
    assert found.used == {"gpu-3.cluster": network}
    assert found.on_sockets == (["gpu-3.cluster"] if network in ("Socket", "tcp") else [])


@pytest.mark.parametrize(
    "said",
    [
        "NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>",
        "NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>",
        "NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0",
        "NCCL INFO Initialized NET plugin Socket",
    ],
)
def test_what_says_nothing_of_the_network(said: str) -> None:
    found = networks(f"n1:93:128 [0] {said}")
    assert (found.used, found.sentence()) == ({}, "")


def test_sockets_win_over_what_a_node_says_besides() -> None:
    """Of a node whose ranks differ."""
    found = networks("n1:1:1 [0] NCCL INFO Using network Socket", "n1:2:2 [1] NCCL INFO Using network IB")
    assert found.on_sockets == ["n1"]


def test_one_node_of_sixteen_is_named_with_what_was_missing() -> None:
    lines = [f"n{node}:93:128 [0] NCCL INFO Using network AWS Libfabric" for node in range(15)]
    missing = "NET/Plugin: dlerror=libfabric.so.1: version `FABRIC_1.7' not found No plugin found (libnccl-net.so)"
    lines += [f"n15:93:128 [0] NCCL INFO {missing}", "n15:93:128 [0] NCCL INFO Using network Socket"]
    (one,) = findings("\n".join(lines) + "\n")
    assert one.key == "fabric_abi"
    assert one.shown_by[-1] == (f"1 of 16 nodes on sockets: n15; the others on AWS Libfabric; NCCL missed: {missing}")


def test_within_one_node_no_network_is_used() -> None:
    """NCCL finds sockets there too, and says so."""
    log = "n1:9:9 [0] NCCL INFO NET/IB : No device found.\nn1:9:9 [0] NCCL INFO Using network Socket\n"
    spans = "n1:9:9 [0] NCCL INFO comm 0x7f25 rank 0 nRanks 8 nNodes {} localRanks 8 localRank 0 MNNVL 0\n"
    assert [one.key for one in findings(log)] == ["plugin_missing"]
    assert findings(log + spans.format(1)) == []
    assert [one.key for one in findings(log + spans.format(1) + spans.format(2))] == ["plugin_missing"]


def test_of_a_file_the_same(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "x\nn9:1:1 [0] NCCL INFO Assigned NET plugin Socket to comm\nn1:1:1 [0] NCCL INFO Using network IB\n"
    )
    assert socket_hosts(log) == ("n9",)
    assert socket_hosts(tmp_path / "none") == ()


METRIC = "All-to-all busbw (EP PG, size=8, 268 MB) [GB/s]"


def sniff(tag: str, *outliers: str) -> str:
    """As Megatron prints a test, with `logging`'s own form before it."""
    begin = "INFO:megatron.training.gpu_sniff_test:  "
    warn = begin.replace("INFO", "WARNING")
    rows = [f"{begin}GPU sniff test -- {tag}", f"{begin}{METRIC}: median=300.00, mean=290.00, min=200.00, max=310.00"]
    rows += [f"{warn}  OUTLIER rank {one}" for one in outliers]
    rows.append(f"{warn}Result: OUTLIERS DETECTED" if outliers else f"{begin}Result: ALL RANKS OK")
    return "\n".join(rows) + "\n"


def test_a_test_that_all_pass_is_silent() -> None:
    text = sniff("before training")
    assert findings(text) == []
    assert read_log(io.BytesIO(text.encode())).sniff.done == 1


def test_a_rank_that_is_slow_once_is_possible_only() -> None:
    (one,) = findings(sniff("before training", "11 (n4): 200.00 (-33.3%)") + sniff("iteration     100"))
    assert (one.key, one.sure) == ("gpu_outlier", "possible")
    assert one.shown_by[-1] == f"tests of the GPUs: rank 11 (n4) slow in 1 of 2, -33.3% in `{METRIC}`"


def test_a_rank_that_is_slow_again_is_likely_and_fast_ones_are_not_named() -> None:
    text = sniff("before training", "2 (n1): 400.00 (+33.3%)", "11 (n4): 200.00 (-33.3%)")
    text += sniff("iteration     100", "11 (n4): 210.00 (-30.0%)")
    (one,) = findings(text)
    assert one.sure == "likely"
    assert one.shown_by[-1] == f"tests of the GPUs: rank 11 (n4) slow in 2 of 2, -33.3% in `{METRIC}`"


def test_many_slow_ranks_are_told_by_their_host() -> None:
    (one,) = findings(sniff("iteration 1", *(f"{rank} (n{rank // 8}): 2.00 (-50.0%)" for rank in range(9))))
    assert one.shown_by[-1].endswith("and 5 more ranks; 8 of them all on n0")


@pytest.mark.megatron
def test_megatron_still_prints_it_so() -> None:
    import megatron.core

    source = (Path(megatron.core.__file__).parents[1] / "training" / "gpu_sniff_test.py").read_text()
    for text in ("GPU sniff test", "OUTLIER rank {i}{node}: ", ": median={median:.2f}, mean=", "  Result: {status}"):
        assert text in source
    assert '"OUTLIERS DETECTED" if any_outliers else "ALL RANKS OK"' in source
