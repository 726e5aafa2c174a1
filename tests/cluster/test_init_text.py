import re

import pytest
from sites import SITES, text

from moekit.cluster import init_text
from moekit.cluster.init_text import Gpus, QosLimit


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:h200:8", Gpus("h200", 8)),
        ("gpu:8", Gpus("", 8)),
        ("gpu:8(S:0-1)", Gpus("", 8)),
        ("gpu:h100:8(S:0-1),nvme:2", Gpus("h100", 8)),
        ("nvme:2,gpu:a100:4(S:0,2)", Gpus("a100", 4)),
        ("gpu:nvidia_h100_80gb_hbm3:8(IDX:0-7)", Gpus("nvidia_h100_80gb_hbm3", 8)),
        ("gpu:a100_1g.10gb:7,gpu:a100:2", Gpus("a100", 2)),
        ("gpu:v100:2,gpu:a100:6", Gpus("a100", 6)),
        ("gpu:no_consume:4", Gpus("", 4)),
        ("gpu:1080:4", Gpus("1080", 4)),
        ("gpu:a100_1g.10gb:7", None),
        ("mps:400,shard:8", None),
        ("(null)", None),
        ("", None),
    ],
)
def test_gres(gres: str, gpus: Gpus | None) -> None:
    assert init_text.gres_gpus(gres) == gpus


@pytest.mark.parametrize(
    ("said", "minutes"),
    [
        ("7-00:00:00", 7 * 24 * 60),
        ("1-12", 36 * 60),
        ("2-01:30", 49 * 60 + 30),
        ("1:00:00", 60),
        ("00:30:00", 30),
        ("30:00", 30),
        ("90", 90),
        ("UNLIMITED", None),
        ("infinite", None),
        ("NONE", None),
        ("Partition_Limit", None),
        ("", None),
    ],
)
def test_times(said: str, minutes: int | None) -> None:
    assert init_text.minutes(said) == minutes


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_nodes_of_a_real_sinfo(version: str) -> None:
    found = init_text.nodes("Welcome | to the cluster\n" + text(version, "sinfo"))
    assert [(node.name, node.partition) for node in found].count(("n1", "debug")) == 1
    assert {node.name: node.gpus for node in found} == {
        **dict.fromkeys(("a1", "a2"), Gpus("a100", 4)),
        **dict.fromkeys(("c1", "c2", "c3"), None),
        **dict.fromkeys(("n1", "n2"), Gpus("h200", 8)),
        "v1": Gpus("", 2),
    }
    assert [node.name for node in found if node.usable] == ["n1", "n1", "n2"]


def test_states_of_a_newer_sinfo() -> None:
    usable = {node.name: node.usable for node in init_text.nodes(text("24.11-manual", "sinfo"))}
    assert usable == {
        **dict.fromkeys(("p5-dy-1", "p5-dy-2", "p5-dy-3", "mig-1", "cpu-dy-1", "cpu-dy-2"), True),
        "p5-st-1": False,
    }


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_partitions_of_a_real_scontrol(version: str) -> None:
    gpu, debug, cpu, old = init_text.partitions(text(version, "partition"))
    assert (gpu.name, gpu.is_default, gpu.max_time, gpu.max_nodes, gpu.qos) == ("gpu", True, "7-00:00:00", 2, "")
    assert (debug.is_default, debug.max_time, debug.max_nodes) == (False, "00:30:00", None)
    assert (cpu.max_time, cpu.is_up, old.is_up) == ("UNLIMITED", True, False)
    assert debug.takes("guests") is (version == "22.05")  # DenyAccounts takes the place of AllowAccounts


def test_partitions_with_accounts() -> None:
    ml = init_text.partitions(text("22.05-accounting", "partition"))[0]
    assert (ml.allowed_accounts, ml.allowed_qos) == (("ml", "root"), ("normal", "long"))
    assert [ml.takes("ml"), ml.takes("other"), ml.takes_qos("long"), ml.takes_qos("short")] == [
        True,
        False,
        True,
        False,
    ]


def test_partitions_of_a_newer_scontrol() -> None:
    train = init_text.partitions(text("24.11-manual", "partition"))[0]
    assert (train.max_nodes, train.max_cpus_per_node, train.qos, train.denied) == (16, 190, "train-cap", ("guests",))
    assert [train.takes("guests"), train.takes("lm")] == [False, True]


def test_sizes_are_what_jobs_can_have() -> None:
    """A real node with two cores and 20,000 MiB kept from jobs; one whose comment and kernel have spaces and `=`."""
    assert init_text.sizes(text("22.05", "node"))["a1"] == (124, 980_000)
    assert init_text.sizes(text("24.11", "node")) == init_text.sizes(text("22.05", "node"))
    newer = init_text.sizes(text("24.11-manual", "node"))
    assert newer["p5-dy-2"] == (192, 1_992_294 - 8192)
    assert len(newer) == 4


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("22.05", ("moekit", "22.05.8", 1001, False)),
        ("22.05-accounting", ("moekit", "22.05.8", 1001, True)),
        ("24.11", ("orbit", "24.11.5", 1001, False)),
        ("24.11-manual", ("orbit", "24.11.3", 4001, True)),
    ],
)
def test_configuration(site: str, said: tuple[object, ...]) -> None:
    found = init_text.config(text(site, "config"))
    assert (found.cluster, found.version, found.max_array_size, found.has_accounting) == said


def test_accounts_of_a_real_sacctmgr() -> None:
    assert init_text.default_account(text("22.05-accounting", "user")) == "other"
    found = init_text.associations(text("22.05-accounting", "assoc"))
    assert [(one.account, one.partition, one.qos, one.default_qos) for one in found] == [
        ("other", "", ("short",), "short"),
        ("ml", "", ("long", "normal"), "long"),
        ("root", "", ("normal",), ""),
    ]
    assert init_text.qos_limits(text("22.05-accounting", "qos")) == {
        "normal": QosLimit(None, None, None),
        "long": QosLimit(2880, None, None),
        "short": QosLimit(60, 2, None),
    }


def test_pyxis_is_not_slurms_own_container_option() -> None:
    assert not init_text.has_pyxis("      --container             Path to OCI container bundle\n")
    assert init_text.has_pyxis("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n")


def test_when_a_job_could_start() -> None:
    """The first line was captured from 22.05."""
    said = "sbatch: Job 1 to start at 2026-11-30T03:43:20 using 1 processors on nodes n1 in partition gpu"
    assert init_text.start_of_test(said) == "2026-11-30 03:43:20 using 1 processors on nodes n1 in partition gpu"
    as_number = init_text.start_of_test("sbatch: Job 1 to start at 1796010562 using 1 processors on nodes n1\n")
    assert re.fullmatch(r"2026-11-\d\d \d\d:\d\d:\d\d using 1 processors on nodes n1", as_number)
    assert init_text.start_of_test("allocation failure: Invalid qos specification") == ""


@pytest.mark.parametrize(
    "noise", ["", "\n\n", "* maintenance on Friday *\n", "a|b|c\nx=y z=\n|||||\n", "\x1b[1m=|=\x1b[0m\n" * 3]
)
def test_a_sites_notices_are_no_facts(noise: str) -> None:
    assert init_text.nodes(noise) == init_text.partitions(noise) == init_text.associations(noise) == []
    assert init_text.sizes(noise) == {}
    assert init_text.config(noise) == init_text.Config("", "", None, False)


@pytest.mark.parametrize("site", SITES)
def test_each_node_and_partition_is_read(site: str) -> None:
    """No line of a file is passed over."""
    assert len(init_text.nodes(text(site, "sinfo"))) == text(site, "sinfo").count("\n")
    assert len(init_text.partitions(text(site, "partition"))) == text(site, "partition").count("PartitionName=")
    assert len(init_text.sizes(text(site, "node"))) == text(site, "node").count("NodeName=")
