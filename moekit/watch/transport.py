"""Which network each node took, by what NCCL says of itself when it starts; and what was missing where it took sockets.

Its lines need `NCCL_DEBUG=INFO`. They differ by version: `Using network`, from 2.27 on
`Assigned NET plugin`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

SAYS = (
    r"NCCL INFO .*(?:Using network |Assigned NET plugin )",
    r"NCCL INFO .* via NET/\w+",
    r"NET/OFI Selected [Pp]rovider is ",
    r"NCCL INFO NET/(?:Plugin|IB|OFI) ?:? ",
    r"NCCL (?:INFO|WARN) .*(?:dlerror|libnccl-net)",
)
"""Lines that say something of it."""
_NODE = re.compile(rb"([\w.-]+):\d+:\d+ \[\d+\] ")
_USED = re.compile(rb"(?:Using network |Assigned NET plugin )([\w./ -]+?)(?: to comm\b.*)?\s*$")
_PROVIDER = re.compile(rb"Selected [Pp]rovider is ([\w;-]+)")
_VIA = re.compile(rb" via NET/(\w+)")
_MISSING = re.compile(
    rb"[Nn]o plugin found|[Cc]ould not find: libnccl-net|dlerror=|not found|[Nn]o device found|[Ff]ailed to open"
    rb"|[Ff]ailed to init|cannot open shared object|output empty list|[Cc]ould not find any|[Nn]o eligible|incompatible"
)
_MOST_BYTES = 1 << 28
_MOST_HOSTS = 16
_LINES = re.compile(rb"^.*NCCL .*(?:Socket|Selected [Pp]rovider).*$", re.MULTILINE)
_SOCKETS = ("Socket", "tcp", "sockets", "udp")
_MOST = 1 << 14
"""Nodes."""


@dataclass
class Networks:
    """What the nodes of a log took, or may have."""

    used: dict[str, str] = field(default_factory=dict)
    """Node to network in NCCL's words (`Socket`, `IB`, `AWS Libfabric`); a node on sockets stays so."""
    missing: dict[str, str] = field(default_factory=dict)
    """Node to the first line that says what was not found."""

    def take(self, line: bytes) -> None:
        """A line of NCCL's; others change nothing."""
        if b"NCCL " not in line or not (node := _NODE.search(line)) or len(self.used) + len(self.missing) > _MOST:
            return
        name = node[1].decode(errors="replace")
        found = _USED.search(line) or _PROVIDER.search(line) or _VIA.search(line)
        if found:
            network = found[1].decode(errors="replace").split(";")[0]
            if is_sockets(network) or name not in self.used:
                self.used[name] = network
        elif _MISSING.search(line):
            said = line[line.index(b"NCCL ") :].decode(errors="replace").strip()
            self.missing.setdefault(name, said.removeprefix("NCCL INFO ").removeprefix("NCCL WARN ")[:200])

    @property
    def on_sockets(self) -> list[str]:
        """The nodes that move data over TCP sockets, in the order in which they said so."""
        return [node for node, network in self.used.items() if is_sockets(network)]

    def sentence(self) -> str:
        """Which nodes are on sockets, which are not, and what was missing; empty where none is."""
        nodes = self.on_sockets
        if not nodes:
            return ""
        others = sorted({network for network in self.used.values() if not is_sockets(network)})
        said = f"{len(nodes)} of {len(self.used)} nodes on sockets: {shortened_names(nodes)}"
        if others:
            said += f"; the others on {', '.join(others)}"
        lacks = dict.fromkeys(self.missing[node] for node in nodes if node in self.missing)
        return f"{said}; NCCL missed: {'; '.join(list(lacks)[:2])}" if lacks else said


def is_sockets(network: str) -> bool:
    """Whether a network is TCP, by NCCL's name or by libfabric's provider."""
    return network in _SOCKETS


def shortened_names(names: list[str], most: int = 8) -> str:
    """The first of them, and how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def socket_hosts(log: Path) -> tuple[str, ...]:
    """The nodes whose NCCL uses sockets, at most 16, from the first 256 MiB of a log; none where it does not say."""
    found = Networks()
    try:
        file = log.open("rb")
    except OSError:
        return ()
    with file:
        rest, left = b"", _MOST_BYTES
        while left > 0 and len(found.on_sockets) < _MOST_HOSTS and (block := file.read(1 << 20)):
            left -= len(block)
            lines, _, rest = (rest + block).rpartition(b"\n")
            if b"NCCL " in lines:
                for line in _LINES.finditer(lines):
                    found.take(line[0])
            rest = rest[-4096:]
    return tuple(found.on_sockets)[:_MOST_HOSTS]
