"""From what Slurm and a node say to a profile: which partition, account, limits, network, and the text itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sites import CLOUD, DGX, FOLDER, GRACE, P5, ROCE, report, site, sizes

from moekit.cluster import init_choice, init_node
from moekit.cluster.init_choice import choose
from moekit.cluster.init_profile import Answers, profile_lines, profile_text, shipped_library_path, shipped_variables
from moekit.cluster.init_text import Gpus
from moekit.cluster.profile import parse_cluster
from moekit.problems import MoekitError

ANSWERS = Answers(
    shared_root="/fsx/ada/moekit", container="pyxis", image="/fsx/i.sqsh", megatron_path="/fsx/Megatron-LM"
)


def written(name: str, node: init_node.NodeReport | None, answers: Answers = ANSWERS, **choice: str) -> str:
    where = site(name)
    lines = profile_lines(where, choose(where, **choice), sizes(name), node, answers)
    return profile_text(lines, "schema.json", ["A test's."])


# Which nodes


def test_nodes_in_service_come_first_then_the_default_partition() -> None:
    kind = choose(site("22.05"))
    assert (kind.partition.name, str(kind.gpus), [node.name for node in kind.nodes]) == (
        "gpu",
        "gpu:h200:8",
        ["n1", "n2"],
    )
    assert [(other.partition.name, str(other.gpus)) for other in init_choice.others(site("22.05"), kind)] == [
        ("debug", "gpu:h200:8"), ("gpu", "gpu:a100:4"), ("old", "gpu:2"),
    ]  # fmt: skip


def test_both_versions_lead_to_the_same_profile() -> None:
    """22.05 and 24.11, configured alike, say the same in their own forms."""
    older, newer = written("22.05", DGX), written("24.11", DGX)
    assert newer.replace("name: orbit ", "name: moekit") == older


def test_a_partition_and_a_gpu_can_be_asked_for() -> None:
    assert str(choose(site("22.05"), "gpu", "a100").gpus) == "gpu:a100:4"
    assert str(choose(site("22.05"), None, "a100").gpus) == "gpu:a100:4"
    assert choose(site("22.05"), "debug").partition.name == "debug"
    assert choose(site("22.05"), "gpu", "b200").gpus == Gpus("h200", 8)  # then nvidia-smi or the person knows better


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("gqu", "error: there is no partition `gqu`\n    hint: did you mean `gpu`?"),
        ("cpu", "error: partition `cpu` has no GPUs\n    hint: there are `gpu` (4 nodes, gpu:a100:4, gpu:h200:8),"
         " `debug` (1 nodes, gpu:h200:8), `cpu` (3 nodes, no GPUs in their gres), `old` (1 nodes, gpu:2)"),
    ],
)  # fmt: skip
def test_partitions_that_cannot_be(asked: str, said: str) -> None:
    with pytest.raises(MoekitError) as refused:
        choose(site("22.05"), asked)
    assert str(refused.value) == said


def test_a_cluster_without_gpus() -> None:
    where = site("22.05")
    bare = replace(where, nodes=tuple(replace(node, gpus=None) for node in where.nodes if node.partition == "cpu"))
    with pytest.raises(MoekitError) as refused:
        choose(bare)
    assert str(refused.value).startswith(
        "error: no partition of this cluster has GPUs\n    hint: there are `gpu` (0 nodes, no GPUs in their gres), "
    )
    with pytest.raises(MoekitError, match="there are no partitions at all"):
        choose(replace(where, nodes=(), partitions=()))


def test_the_partition_for_work_without_gpus() -> None:
    assert init_choice.cpu_partition(site("22.05"), choose(site("22.05"))) == ("cpu", "sinfo: 3 nodes without GPUs")
    assert (
        init_choice.cpu_partition(site("24.11-manual"), choose(site("24.11-manual")))[0] == "batch"
    )  # the default; `quick` is down
    assert init_choice.cpu_partition(site("22.05-accounting"), choose(site("22.05-accounting")))[0] == "gpu"


# Accounts and limits


def test_an_account_that_the_partition_takes() -> None:
    """The default account is not allowed in one, and denied in the other, where another is for a partition only."""
    real, newer = site("22.05-accounting"), site("24.11-manual")
    gpu, train = choose(real).partition, choose(newer).partition
    assert init_choice.account(real, gpu) == ("ml", "sacctmgr: of the accounts of ada, the first that `gpu` takes")
    assert init_choice.account(newer, train)[0] == "lm"
    assert init_choice.account(real, replace(gpu, allowed_accounts=())) == (
        "other",
        "sacctmgr: the default account of ada",
    )
    assert init_choice.account(real, replace(gpu, allowed_accounts=("astro",)))[0] is None
    assert init_choice.account(site("22.05"), gpu) == (None, "scontrol show config: no accounting here")


def test_a_qos_that_the_partition_takes() -> None:
    real, newer = site("22.05-accounting"), site("24.11-manual")
    gpu = choose(real).partition
    assert init_choice.qos(real, gpu, "ml") == ("long", "sacctmgr: the default QOS of `ml`")
    assert init_choice.qos(real, replace(gpu, allowed_qos=("normal",)), "ml")[0] == "normal"
    assert init_choice.qos(real, replace(gpu, allowed_qos=("astro",)), "ml")[0] is None
    assert init_choice.qos(newer, choose(newer).partition, "lm")[0] is None


def test_limits_are_the_least_of_partition_and_qos() -> None:
    real, newer = site("22.05-accounting"), site("24.11-manual")
    gpu, train = choose(real), choose(newer)
    assert init_choice.most_time(real, gpu.partition, "long") == (2880, "sacctmgr show qos: MaxWall of `long`")
    assert init_choice.most_time(real, gpu.partition, None) == (10080, "scontrol show partition: MaxTime=7-00:00:00")
    assert init_choice.most_time(newer, train.partition, "train")[0] == 720
    assert init_choice.most_nodes(newer, train, None) == (3, "sacctmgr show qos: MaxTRES of `train-cap`")  # 24 GPUs
    assert init_choice.most_nodes(newer, train, "train")[0] == 2
    assert init_choice.most_nodes(real, gpu, "short")[0] == 2
    assert init_choice.most_nodes(real, gpu, None) == (None, "scontrol show partition: MaxNodes=UNLIMITED")


# What a node says


@pytest.mark.parametrize(
    ("node", "fabric", "cards", "interfaces"),
    [
        (P5, "efa", None, "^lo,docker,veth"),
        (DGX, "ib", "=mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11", "^lo,enxb03af2b6059f,br-"),
        (ROCE, "ib", "mlx5", "^lo"),
        (CLOUD, "none", None, "^lo"),
        (GRACE, "efa", None, "^lo"),
        (report("host x", "net lo", "net eth0"), "none", None, "^lo"),
    ],
)
def test_what_a_nodes_devices_mean(node: init_node.NodeReport, fabric: str, cards: str | None, interfaces: str) -> None:
    assert init_node.fabric(node, 8)[0] == fabric
    said = init_node.variables(node, fabric)
    assert (said["NCCL_SOCKET_IFNAME"][0], said.get("NCCL_IB_HCA", (None,))[0]) == (interfaces, cards)


def test_the_interface_in_use_is_never_excluded() -> None:
    """Names are excluded by how they begin: not where that would take a used one along."""
    assert init_node.excluded(report("net lo", "net br-prod", "net br-1", "route br-prod").interfaces) == ["lo"]
    assert init_node.excluded(report("net lo", "net usb0 cdc_ether", "net usb0n").interfaces) == ["lo"]
    assert init_node.excluded(report("net lo", "net lo1").interfaces) == []


@pytest.mark.parametrize(
    ("gres", "node", "model"),
    [
        (Gpus("h200", 8), None, "h200"),
        (Gpus("nvidia_h100_80gb_hbm3", 8), None, "h100"),
        (Gpus("", 8), P5, "h100"),
        (Gpus("gb200", 4), None, "gb200"),
        (Gpus("", 4), GRACE, "gb200"),
        (Gpus("hopper", 4), None, None),
        (Gpus("h100", 8), DGX, "h200"),  # nvidia-smi knows better
    ],
)
def test_gpu_models(gres: Gpus, node: init_node.NodeReport | None, model: str | None) -> None:
    assert init_choice.gpu_model(gres, node)[0] == model


# The profile


@pytest.mark.parametrize(
    ("name", "where", "node", "answers", "choice"),
    [
        ("p5", "24.11-manual", P5, ANSWERS, {}),
        ("dgx", "22.05", DGX, ANSWERS, {"gpu": "h200"}),
        ("accounting", "22.05-accounting", ROCE, replace(ANSWERS, gpu="h200", megatron_path=None), {}),
        ("grace", "24.11-manual", GRACE, replace(ANSWERS, qos="train"), {}),
        (
            "no_container",
            "24.11-manual",
            P5,
            Answers(shared_root="/fsx", container="none", setup_script="/fsx/env.sh"),
            {},
        ),
        ("no_node", "22.05", None, replace(ANSWERS, fabric="efa", account="ml"), {"partition": "debug"}),
    ],
)
def test_profiles(
    name: str,
    where: str,
    node: init_node.NodeReport | None,
    answers: Answers,
    choice: dict[str, str],
    golden_file: Callable[[Path, str], None],
) -> None:
    text = written(where, node, answers, **choice)
    assert parse_cluster(text, "p.yaml").gpus_per_node in (2, 4, 8)
    golden_file(FOLDER / "profiles" / f"{name}.yaml", text)


@pytest.mark.parametrize("where", ["22.05", "24.11", "24.11-manual"])
def test_every_value_says_where_it_comes_from(where: str) -> None:
    for line in written(where, P5).splitlines():
        assert not line or line.startswith(("#", "  - ")) or " # " in line, line


@pytest.mark.parametrize(
    "hostile",
    ["null", "yes", "007", "1e3", "a: b", "#x", "'q'", '"', "~", "ünïcode", "- x", "{a}", "a #b", "*x", "&y", "!z"],
)
def test_hostile_names_come_back_as_they_were(hostile: str) -> None:
    where = site("22.05")
    where = replace(where, config=replace(where.config, cluster=hostile))
    text = profile_text(profile_lines(where, choose(where), {}, DGX, ANSWERS), "schema.json", [hostile])
    assert parse_cluster(text, "p.yaml").name == hostile


def test_a_path_no_job_can_have_is_refused_at_its_line() -> None:
    for text in ("relative", "/a b", "/a:b", "/a\nb", "/fsx\\040x y"):
        with pytest.raises(MoekitError, match=r"p.yaml:\d+: `shared_root`"):
            parse_cluster(written("22.05", DGX, replace(ANSWERS, shared_root=text)), "p.yaml")


def test_the_fields_of_shipped_profiles_are_found() -> None:
    assert list(shipped_variables("aws-p5")) == [
        "NCCL_NET_PLUGIN", "FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG",
    ]  # fmt: skip
    assert shipped_variables("aws-p5")["FI_PROVIDER"][0] == "efa"
    assert shipped_library_path("aws-p5") == ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/efa/lib")
    assert shipped_library_path("h100-ib") == ()
