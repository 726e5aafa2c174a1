"""What node 0 has decided, told to the other nodes of a run: `python agree.py tell PORT NODES TEXT`, `ask HEAD PORT`.

The first gives TEXT to so many askers, then ends; the second prints it. Standard library, Python >= 3.9.
"""

from __future__ import annotations

import socket
import sys
import time

PATIENCE_S = 1800.0
"""The first node may have its container long before the last."""
_CALL_S = 10.0


def tell(port: int, nodes: int, text: str) -> None:
    """Give `text` to `nodes` askers.

    Raises:
        OSError: they do not all come in time.
    """
    deadline = time.monotonic() + PATIENCE_S
    with socket.create_server(("", port), backlog=nodes) as server:
        while nodes:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            call, _ = server.accept()
            with call:
                call.settimeout(_CALL_S)
                try:
                    call.sendall(text.encode() + b"\0")
                    nodes -= call.recv(1) == b"\0"  # heard
                except OSError:
                    continue  # it asks again


def ask(head: str, port: int) -> str:
    """What node 0 says.

    Raises:
        OSError: it says nothing in time.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with socket.create_connection((head, port), timeout=_CALL_S) as call:
                call.settimeout(max(1.0, deadline - time.monotonic()))
                said = b""
                while not said.endswith(b"\0"):
                    part = call.recv(4096)
                    if not part:
                        raise ConnectionError(f"{head} said nothing whole")
                    said += part
                call.sendall(b"\0")
                return said[:-1].decode()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def main(words: list[str]) -> None:
    """Run one of the two commands."""
    try:
        if words[:1] == ["tell"]:
            tell(int(words[1]), int(words[2]), words[3])
        else:
            print(ask(words[1], int(words[2])))
    except OSError as failure:
        sys.exit(f"agree.py: the nodes of this run do not find each other: {failure}")


if __name__ == "__main__":
    main(sys.argv[1:])
