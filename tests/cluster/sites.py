"""What Slurm and nodes say, read as `moekit init` does from the files in init/; its README says which were captured."""

from pathlib import Path

from moekit.cluster import init_node, init_text
from moekit.cluster.init_node import NodeReport
from moekit.cluster.init_site import Site

FOLDER = Path(__file__).parent / "init"
SITES = ("22.05", "22.05-accounting", "24.11", "24.11-manual")


def text(site: str, name: str) -> str:
    path = FOLDER / site / f"{name}.txt"
    return path.read_text() if path.exists() else ""


def site(name: str, *, has_pyxis: bool = True) -> Site:
    return Site(
        config=init_text.config(text(name, "config")),
        nodes=tuple(init_text.nodes(text(name, "sinfo"))),
        partitions=tuple(init_text.partitions(text(name, "partition"))),
        has_pyxis=has_pyxis,
        user="ada",
        default_account=init_text.default_account(text(name, "user")),
        associations=tuple(init_text.associations(text(name, "assoc"))),
        qos_limits=tuple(init_text.qos_limits(text(name, "qos")).items()),
    )


def sizes(name: str) -> dict[str, tuple[int, int]]:
    return init_text.sizes(text(name, "node"))


def report(*lines: str) -> NodeReport:
    """A node's report; words are apart by spaces here, `~` is a space in one."""
    return init_node.report("\n".join(line.replace(" ", "\t").replace("~", " ") for line in lines))


P5 = report(
    "host p5-dy-1", "arch x86_64", "net lo", "net enp71s0 ena", "net docker0", "net veth_def_agent", "route enp71s0",
    *(f"rdma rdmap{n}s0 efa Unspecified 4:~ACTIVE" for n in (79, 80, 96, 97)),
    *("gpu NVIDIA~H100~80GB~HBM3",) * 1, "mount /fsx lustre", "mount /home nfs4",
    "file /opt/nccl-tests/build/alltoall_perf", "file /opt/amazon/efa/lib",
)  # fmt: skip
DGX = report(
    "host dgx01", "arch x86_64", "net lo", "net eno1 igb", "net ibp24s0 mlx5_core", "net enxb03af2b6059f cdc_ether",
    "net br-0f2a", "route eno1",
    *(f"rdma mlx5_{n} mlx5_core InfiniBand 4:~ACTIVE" for n in (0, 3, 4, 5, 6, 9, 10, 11)),
    "rdma mlx5_1 mlx5_core Ethernet 4:~ACTIVE", "rdma mlx5_2 mlx5_core InfiniBand 1:~DOWN",
    "gpu NVIDIA~H200", "mount /mnt/weka wekafs",
)  # fmt: skip
ROCE = report("host r1", "net lo", "net eth0 mlx5_core", "route eth0", "gpu NVIDIA~B200",
              *(f"rdma mlx5_{n} mlx5_core Ethernet 4:~ACTIVE" for n in range(9)))  # fmt: skip
CLOUD = report("host vm1", "net lo", "net eth0 hv_netvsc", "route eth0", "rdma mlx5_an0 mlx5_core Ethernet 4:~ACTIVE")
GRACE = report("host tray1", "arch aarch64", "net lo", "net eth0 ena", "route eth0", "gpu NVIDIA~GB200",
               *(f"rdma rdmap{n} efa Unspecified 4:~ACTIVE" for n in range(8)))  # fmt: skip
