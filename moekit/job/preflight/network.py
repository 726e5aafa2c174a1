"""The network that NCCL took, by what it prints when it starts with `NCCL_DEBUG=INFO` (handbook 2.2, 3.7). Pure.

A node's bootstrap is over sockets with every network, and says so in other words (`Bootstrap: Using eth0`): that is no
fallback. Nor is a plug-in that lacks one of its parts (`Failed to find ncclCollNetPlugin symbol`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Union

from .findings import Finding

MOST_NODES = 1 << 14
LINE = re.compile(r"([A-Za-z0-9][\w.-]*):\d+:\d+ \[\d+\] (?:\S+:\d+ )?NCCL (?:INFO|WARN) (.*)")
"""A node's name, and what its NCCL says."""
_USING = re.compile(r"(?:Using network |Assigned NET plugin )(\S.*?)(?: to comm\b.*)?\s*$")
"""The second from NCCL 2.27 on."""
_CHANNEL = re.compile(r" via NET/([^/]+)/\d")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;.-]+)")
_VERSION = re.compile(r"(?:(\S+): )?version [`'\"]?([\w.]+)[`'\"]? not found(?: \(required by ([^)]+)\))?")
_MISSING = re.compile(r"(?:Could not find: ?|No plugin found \()(libnccl-net[^\s,)]*)")
_NO_LIBRARY = re.compile(r"([\w./+-]+\.so[\w.]*): cannot open shared object file")
_NO_PROVIDER = re.compile(
    r"No eligible providers were found|aws-ofi-nccl initialization failed|initialize libfabric|output empty list"
)
_MISSED = re.compile(
    r"[Nn]o plugin found|[Cc]ould not find: libnccl-net|dlerror=|not found|[Nn]o device found|[Ff]ailed to open"
    r"|[Ff]ailed to init|cannot open shared object|output empty list|[Cc]ould not find any|[Nn]o eligible|incompatible"
)
"""Lines that say that something is missing, also where no sentence below knows what."""
_NO_DEVICE = re.compile(r"NET/IB ?: ?No device found")


@dataclass
class Taken:
    """What one node's processes say."""

    networks: set[str] = field(default_factory=set)
    """`Libfabric`, `AWS Libfabric`, `IB`, `Socket`, ..."""
    providers: set[str] = field(default_factory=set)
    """Of Libfabric: `efa`, `tcp;ofi_rxm`, ..."""
    reasons: dict[str, None] = field(default_factory=dict)
    """What was missing, in order: sentences."""

    missed: str = ""
    """The first line that says that something is missing, as NCCL printed it."""

    @property
    def is_socket(self) -> bool:
        """Whether a process of the node took TCP: by NCCL's own sockets, or below Libfabric."""
        return is_sockets(self.used)

    @property
    def used(self) -> str:
        """The network in one word, TCP where any process took it; empty where none was named."""
        words = [*sorted(self.networks), *sorted(one.partition(";")[0] for one in self.providers)]
        return next((word for word in words if is_sockets(word)), words[0] if words else "")


def is_sockets(network: str) -> bool:
    """Whether a network is TCP, by NCCL's name or by Libfabric's provider."""
    return network in ("Socket", "tcp", "sockets", "udp")


class Network:
    """Reads lines as they come, of all nodes, in any order."""

    def __init__(self) -> None:
        self.nodes: dict[str, Taken] = {}
        """By the node's name, as NCCL prints it: without its domain."""

    def take(self, line: Union[str, bytes]) -> None:
        """One line of a log; others than NCCL's are passed over."""
        text = line.decode(errors="replace") if isinstance(line, bytes) else line
        found = LINE.search(text) if "NCCL" in text else None
        if not found or (found[1] not in self.nodes and len(self.nodes) >= MOST_NODES):
            return
        taken, said = self.nodes.setdefault(found[1], Taken()), found[2]
        if using := _USING.search(said) or _CHANNEL.search(said):
            taken.networks.add(using[1])
        elif provider := _PROVIDER.search(said):
            taken.providers.add(provider[1])
        elif _MISSED.search(said):
            taken.missed = taken.missed or said.strip()[:200]
        taken.reasons.update(dict.fromkeys(_reasons(said)))


def read_network(lines: Iterable[Union[str, bytes]]) -> dict[str, Taken]:
    """What a log says, by node."""
    network = Network()
    for line in lines:
        network.take(line)
    return network.nodes


def _reasons(said: str) -> Iterator[str]:
    """What a line says is missing."""
    for library, version, by in _VERSION.findall(said):
        place = f" in {library.rpartition('=')[2]}" if library else ""
        yield f"version {version} is missing{place}{f', which {by} needs' if by else ''}"
    for plugin in _MISSING.findall(said):
        yield f"the plug-in {plugin} is not found"
    for library in _NO_LIBRARY.findall(said):
        yield f"{library} is not found"
    if _NO_PROVIDER.search(said):
        yield "the plug-in found no provider for the fabric"
    if _NO_DEVICE.search(said):
        yield "NCCL found no InfiniBand device"


def judge_network(fabric: str, taken: Mapping[str, Taken], nodes: Sequence[str]) -> Iterator[Finding]:
    """Each node's network against the profile's `fabric`; of one node nothing leaves it, and nothing is judged."""
    if len(nodes) < 2 or fabric == "none":
        return
    silent = []
    for node in nodes:
        one = taken.get(node) or taken.get(node.partition(".")[0])
        if one is None or not one.used:
            silent.append(node)
        elif one.is_socket:
            yield Finding(node, "network", "fail", _fallback(one, fabric), own=False)
        elif fabric == "efa" and not any("libfabric" in name.lower() or "OFI" in name for name in one.networks):
            what = f"NCCL uses {', '.join(sorted(one.networks))} where EFA is reached through Libfabric"
            yield Finding(node, "network", "warn", what, own=False)
    known = {node.partition(".")[0] for node in nodes}
    for host, one in taken.items():  # where Slurm calls nodes otherwise than they call themselves
        if host not in known and one.is_socket:
            yield Finding("", "network", "fail", f"{host}: {_fallback(one, fabric)}", own=False)
    if silent and len(silent) < len(nodes):
        yield Finding("", "network", "skip", f"NCCL says nothing of its network on {', '.join(silent)}")
    elif silent:
        what = "NCCL says nothing of its network: `NCCL_DEBUG: INFO` in the profile makes it"
        yield Finding("", "network", "skip", what)


def _fallback(taken: Taken, fabric: str) -> str:
    below = "" if "Socket" in taken.networks else f" below Libfabric ({', '.join(sorted(taken.providers))})"
    why = "; ".join(taken.reasons) or taken.missed or "its lines do not say what was missing"
    return f"NCCL uses TCP sockets{below} where the fabric is {fabric}: {why}"
