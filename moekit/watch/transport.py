"""Which network each node took, by what NCCL says of itself when it starts; and what was missing where it took sockets.

Its lines need `NCCL_DEBUG=INFO`. They differ by version: `Using network`, from 2.27 on
`Assigned NET plugin`.
"""

from __future__ import annotations

import re
from pathlib import Path

from moekit.job.preflight.network import Network, is_sockets

SAYS = (
    r"NCCL INFO .*(?:Using network |Assigned NET plugin )",
    r"NCCL INFO .* via NET/\w+",
    r"NET/OFI Selected [Pp]rovider is ",
    r"NCCL INFO NET/(?:Plugin|IB|OFI) ?:? ",
    r"NCCL (?:INFO|WARN) .*(?:dlerror|libnccl-net)",
    r"NCCL INFO comm .* nNodes \d+",
)
"""Lines that say something of it."""
_MOST_BYTES = 1 << 28
_MOST_HOSTS = 16
_NODES = re.compile(rb"NCCL INFO comm .* nNodes (\d+)")
_LINES = re.compile(rb"^.*NCCL .*(?:Socket|Selected [Pp]rovider).*$", re.MULTILINE)


class Networks:
    """What the nodes of a log took, or may have; read by the same code as before a training (`job/preflight/`)."""

    def __init__(self) -> None:
        self._network = Network()
        self.nodes = 0
        """The most that a communicator says it spans; 0 where none does, as of old versions."""

    def take(self, line: bytes) -> None:
        """A line of NCCL's; others change nothing."""
        self._network.take(line)
        if b" nNodes " in line and (spans := _NODES.search(line)):
            self.nodes = max(self.nodes, int(spans[1]))

    @property
    def used(self) -> dict[str, str]:
        """Node to network in NCCL's words (`Socket`, `IB`, `AWS Libfabric`); a node on sockets stays so."""
        return {node: one.used for node, one in self._network.nodes.items() if one.used}

    @property
    def missing(self) -> dict[str, str]:
        """Node to the first line that says what was not found."""
        return {node: one.missed for node, one in self._network.nodes.items() if one.missed}

    @property
    def on_sockets(self) -> list[str]:
        """The nodes that move data over TCP sockets, in the order in which they said so."""
        return [node for node, network in self.used.items() if is_sockets(network)]

    @property
    def needless(self) -> bool:
        """Whether all communicators stay within a node, where no network is used, whichever NCCL found."""
        return self.nodes == 1

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
