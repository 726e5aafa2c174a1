"""What the test cluster asks of this machine: a network for its nodes, ports, names, and what an image needs of it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def make_bridge() -> str | None:
    """Make the network that joins the nodes; its first three numbers, None where it cannot be made."""
    _remove_left_bridges()
    taken = subprocess.run(["ip", "-o", "-4", "addr", "show"], capture_output=True, text=True).stdout
    numbers = [(os.getpid() + number) % 256 for number in range(256)]  # not all that start now begin with the same
    network = next(f"10.77.{number}" for number in numbers if f"inet 10.77.{number}." not in taken)
    steps = (
        ("ip", "link", "add", bridge(), "type", "bridge"),
        ("ip", "addr", "add", f"{network}.254/24", "dev", bridge()),
        ("ip", "link", "set", bridge(), "up"),
    )
    try:
        for step in steps:
            run(*step)
    except subprocess.CalledProcessError:
        subprocess.run(["ip", "link", "del", bridge()], capture_output=True)
        return None
    return network


def _remove_left_bridges() -> None:
    """Those of processes that were killed and so left them."""
    shown = subprocess.run(["ip", "-o", "link", "show", "type", "bridge"], capture_output=True, text=True).stdout
    for name, pid in re.findall(r"^\d+: (mk([0-9a-f]+)): ", shown, re.MULTILINE):
        if not Path("/proc", str(int(pid, 16))).exists():
            subprocess.run(["ip", "link", "del", name], capture_output=True)


def bridge() -> str:
    """An interface's name has 15 characters at most; the process in it tells clusters apart."""
    return f"mk{os.getpid():x}"


def has_own_network(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    return False


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def name_nodes(lines: list[str]) -> None:
    """Where nodes cannot have a list of names of their own, put theirs into this machine's; none takes them out."""
    mark, path = "  # moekit's test cluster", Path("/etc/hosts")
    kept = [line for line in path.read_text().splitlines() if not line.endswith(mark)]
    path.write_text("".join(f"{line}\n" for line in [*kept, *(line.strip() + mark for line in lines)]))


def what_python_needs(shared_root: Path) -> list[str]:
    """Folders of this machine to mount into an image that has nothing, for this interpreter to run there."""
    wanted = [Path(name) for name in ("/usr", "/bin", "/lib", "/lib64", sys.prefix, sys.base_prefix, *sys.path) if name]
    there = sorted({path.absolute() for path in wanted if path.is_dir()})
    return [str(path) for path in there if not any(other in path.parents for other in [*there, shared_root])]


def processes(words: tuple[str, ...], **variables: str) -> list[int]:
    """This machine's processes whose command line has `words` in a row and whose environment has `variables`, the
    oldest first. Those of a node are among them, under other numbers than the node's own."""
    line, wanted = b"\0".join(map(os.fsencode, words)), {os.fsencode(f"{n}={v}") for n, v in variables.items()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"\0" + line + b"\0" in b"\0" + (folder / "cmdline").read_bytes() and wanted <= set(
                (folder / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(folder.name))
    return sorted(found)


def version() -> str:
    """Slurm's, `22.05.8`."""
    return subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def until(done: Callable[[], bool], otherwise: str, timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} after {timeout_s} s")
        time.sleep(0.02)
