"""Whether NCCL fell back to TCP sockets, from what it prints when it starts (`NCCL_DEBUG=INFO`)."""

from __future__ import annotations

import re
from pathlib import Path

_MOST_BYTES = 1 << 28
_MOST_HOSTS = 16
_SOCKET = re.compile(
    rb"^.*?([\w.-]+):\d+:\d+ \[\d+\] NCCL INFO (?:Using network Socket|.* via NET/Socket/).*$", re.MULTILINE
)
"""A node's bootstrap is over sockets with every network, and says so in other words (`Bootstrap : Using eth0`)."""


def socket_hosts(log: Path) -> tuple[str, ...]:
    """The nodes whose NCCL uses sockets, at most 16, from the first 256 MiB of a log; none where it does not say."""
    found: dict[str, None] = {}
    try:
        file = log.open("rb")
    except OSError:
        return ()
    with file:
        rest, left = b"", _MOST_BYTES
        while left > 0 and len(found) < _MOST_HOSTS and (block := file.read(1 << 20)):
            left -= len(block)
            lines, _, rest = (rest + block).rpartition(b"\n")
            if b"Socket" in lines:
                found |= dict.fromkeys(match[1].decode(errors="replace") for match in _SOCKET.finditer(lines))
            rest = rest[-4096:]
    return tuple(found)[:_MOST_HOSTS]
