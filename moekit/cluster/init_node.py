"""What a node says of itself, and what it means: the fabric, the interfaces and cards that NCCL is told. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

VIRTUAL = (
    *("br-", "cali", "cilium", "cni", "docker", "dummy", "erspan", "flannel", "gre", "ifb", "ip6tnl", "kube", "lxc"),
    *("lxdbr", "nodelocaldns", "podman", "sit", "tap", "tun", "veth", "virbr", "vxlan", "weave", "wg"),
)
"""How the names of interfaces begin that containers, virtual machines and tunnels make: no other node is there."""

SERVICE_DRIVERS = ("cdc_ether", "cdc_eem", "cdc_ncm", "rndis_host")
"""Of interfaces to a node's own service processor: each node has the same address there."""


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of a node."""

    name: str
    driver: str
    """Of the card behind it; empty: there is none, or it cannot be seen."""
    is_default_route: bool


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an InfiniBand, RoCE or EFA device."""

    device: str
    driver: str
    link: str
    """InfiniBand, Ethernet, ..."""
    is_active: bool


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node said of itself."""

    host: str
    arch: str
    interfaces: tuple[Interface, ...]
    rdma: tuple[RdmaPort, ...]
    gpus: tuple[str, ...]
    """Names by nvidia-smi; empty where there is none."""
    shared: tuple[tuple[str, str], ...]
    """(folder, type) of its network file systems."""
    files: frozenset[str]
    """Those of the files looked for that it has."""


def report(text: str) -> NodeReport:
    """What `slurm/ask_node.sh` prints: one fact a line, its words apart by tabs."""
    rows = [line.split("\t") for line in text.splitlines() if "\t" in line]

    def all_of(kind: str, width: int) -> list[list[str]]:
        return [[*row[1:], *[""] * width][:width] for row in rows if row[0] == kind]

    one = {row[0]: row[1] for row in rows}
    routes = {name for (name,) in all_of("route", 1)}
    return NodeReport(
        host=one.get("host", ""),
        arch=one.get("arch", ""),
        interfaces=tuple(Interface(name, driver, name in routes) for name, driver in all_of("net", 2)),
        rdma=tuple(
            RdmaPort(device, driver, link, "ACTIVE" in state) for device, driver, link, state in all_of("rdma", 4)
        ),
        gpus=tuple(name for (name,) in all_of("gpu", 1)),
        shared=tuple(dict.fromkeys((folder, kind) for folder, kind in all_of("mount", 2))),
        files=frozenset(name for (name,) in all_of("file", 1)),
    )


def fabric(report: NodeReport, gpus: int) -> tuple[str, str]:
    """The profile's `fabric`, and why."""
    cards: dict[str, list[str]] = {"efa": [], "InfiniBand": [], "Ethernet": []}
    for port in report.rdma:
        if port.driver == "efa":
            cards["efa"].append(port.device)
        elif port.is_active and port.link in cards:
            cards[port.link].append(port.device)
    if cards["efa"]:
        return "efa", f"{report.host} has {_few(cards['efa'])} with the driver efa"
    if cards["InfiniBand"]:
        return "ib", f"{report.host} has {_few(cards['InfiniBand'])}, InfiniBand and active"
    if len(cards["Ethernet"]) * 2 >= gpus:  # fewer are a cloud's ordinary network cards, which have RDMA too
        return "ib", f"{report.host} has {_few(cards['Ethernet'])}, RoCE: RDMA over Ethernet, for {gpus} GPUs"
    seen = f"only {_few([port.device for port in report.rdma])}" if report.rdma else "no InfiniBand or EFA device"
    return "none", f"{report.host} has {seen}"


def variables(report: NodeReport, of_fabric: str) -> dict[str, tuple[str, str]]:
    """NCCL's variables that name this node's devices, each with why."""
    found = {}
    if out := excluded(report.interfaces):
        names = _few([interface.name for interface in report.interfaces])
        found["NCCL_SOCKET_IFNAME"] = (
            "^" + ",".join(out),
            f"{report.host} has {names}: not what begins so for NCCL's first contact",
        )
    if of_fabric == "ib" and (cards := _cards(report)):
        found["NCCL_IB_HCA"] = (cards, f"the cards of {report.host} that GPUs talk through")
    return found


def excluded(interfaces: tuple[Interface, ...]) -> list[str]:
    """How the names of the interfaces begin that NCCL must not use, never one with the default route."""
    kept, out = [], []
    for interface in interfaces:
        family = next((name for name in VIRTUAL if interface.name.startswith(name)), None)
        if interface.name == "lo":
            out.append("lo")
        elif interface.is_default_route or not (family or interface.driver in SERVICE_DRIVERS):
            kept.append(interface.name)
        else:
            out.append(family or interface.name)
    return [name for name in dict.fromkeys(out) if not any(other.startswith(name) for other in kept)]


def _cards(report: NodeReport) -> str:
    """NCCL_IB_HCA: the active cards of the faster kind; by the beginning of their names where that is all of them."""
    links = [link for link in ("InfiniBand", "Ethernet") if any(p.link == link and p.is_active for p in report.rdma)]
    chosen = sorted({p.device for p in report.rdma if links and p.link == links[0] and p.is_active}, key=_by_number)
    stems = {re.sub(r"_?\d+$", "", name) for name in chosen}
    if len(stems) == 1 and len(chosen) == len({port.device for port in report.rdma}):
        return stems.pop()
    return "=" + ",".join(chosen) if chosen else ""


def _by_number(name: str) -> tuple[str, int]:
    found = re.search(r"\d+$", name)
    return (name.removesuffix(found[0]), int(found[0])) if found else (name, -1)


def _few(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
