"""One node looks at itself: `python3 -m preflight.node OUT ENDPOINT`, one task on each node, outside the container.

It writes what programs printed and files say into `OUT/nodes/NODE.json`, and judges nothing: `judging.py` does, where
all nodes' answers are. `preflight.json` in the working directory says what to ask.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .baselines import write_json
from .gpus import FIELDS, ROW_FIELDS, are_held_back

DIAG_TIMEOUT_S = {1: 300, 2: 1800, 3: 7200, 4: 14400}
"""DCGM's own words for the levels: seconds, 2 minutes, half an hour, 1 to 2 hours."""
LOCKS = ("flock", "lockf")
_SPEED_BYTES = 64 << 20
_SHORT_S = 60
_COOLS_TIMES, _COOLS_S = 3, 10.0
_CSV = "--format=csv,noheader,nounits"
_LOG_BYTES = 4 << 20


def look(out: Path, endpoint: str, asked: dict[str, Any]) -> dict[str, Any]:
    """All that this node says."""
    gpus = _gpus()
    for _ in range(_COOLS_TIMES):
        if not are_held_back(gpus["text"]):
            break
        time.sleep(_COOLS_S)
        gpus = _gpus()
    level = int(asked.get("level") or 1)
    return {
        "host": platform.node().partition(".")[0],
        "gpus": gpus,
        "rows": _call(["nvidia-smi", f"--query-remapped-rows={','.join(ROW_FIELDS)}", _CSV]),
        "dcgm": _call(["dcgmi", "diag", "-r", str(level), "--fail-early", "-j"], DIAG_TIMEOUT_S[level]),
        "kernel": _kernel_log(),
        "uptime_s": time.clock_gettime(time.CLOCK_MONOTONIC),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "rdma": _rdma(Path("/sys/class/infiniband")),
        "locks": {kind: _lock(out / f"held.{kind}", kind) for kind in LOCKS},
        "speed": _speed(out),
        "names": {node: _address(node) for node in asked["nodes"]},
        "reach": _reach(endpoint),
    }


def _gpus() -> dict[str, Any]:
    """What nvidia-smi says of the GPUs; an older driver has another name for one of the fields."""
    said = _call(["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", _CSV])
    if said["code"] in (0, 127, None):
        return said
    older = ",".join(FIELDS).replace("clocks_event_reasons", "clocks_throttle_reasons")
    return _call(["nvidia-smi", f"--query-gpu={older}", _CSV])


def _call(command: Sequence[str], timeout_s: float = _SHORT_S) -> dict[str, Any]:
    """What a program printed, and its exit code: 127 where there is none, None where it was ended for its time."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s)
    except FileNotFoundError:
        return {"code": 127, "text": ""}
    except subprocess.TimeoutExpired as late:
        return {"code": None, "text": (late.output or b"").decode(errors="replace")}
    except OSError as reason:
        return {"code": 126, "text": str(reason)}
    return {"code": done.returncode, "text": done.stdout.decode(errors="replace")}


def _kernel_log() -> dict[str, Any]:
    """The kernel's log with seconds since the node's start; most sites let only root read it."""
    for command in (["dmesg"], ["journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-monotonic"]):
        said = _call(command)
        if said["code"] == 0:
            return {"code": 0, "text": said["text"][-_LOG_BYTES:]}
    return said


def _rdma(folder: Path) -> list[dict[str, str]]:
    """Devices of InfiniBand, RoCE and EFA: `name`, `driver`, and its first port's `state` and `rate`."""
    found = []
    for device in sorted(folder.iterdir()) if folder.is_dir() else []:
        said = {"name": device.name, "driver": ""}
        with suppress(OSError):
            said["driver"] = (device / "device" / "driver").resolve(strict=True).name
        for name in ("state", "rate"):
            with suppress(OSError):
                said[name] = (device / "ports" / "1" / name).read_text().strip()
        found.append(said)
    return found


def _lock(path: Path, kind: str) -> str:
    """Whether a lock that the first node holds keeps this process out: `kept out`, `let in`, or what went wrong."""
    try:
        with path.open("r+b") as file:
            (fcntl.flock if kind == "flock" else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "let in"
    except BlockingIOError:
        return "kept out"
    except OSError as reason:
        return "kept out" if reason.errno in (11, 13) else (reason.strerror or str(reason)).lower()


def _speed(out: Path) -> dict[str, Any]:
    """Seconds to write and to read back 64 MiB in the shared folder."""
    path, block = out / f".speed.{platform.node()}.{os.getpid()}", os.urandom(1 << 20)
    try:
        began = time.monotonic()
        with path.open("wb") as file:
            for _ in range(_SPEED_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        wrote = time.monotonic()
        same = all(part == block for part in _blocks(path))
        return {"write_s": wrote - began, "read_s": time.monotonic() - wrote, "same": same}
    except OSError as reason:
        return {"error": (reason.strerror or str(reason)).lower()}
    finally:
        with suppress(OSError):
            path.unlink()


def _blocks(path: Path) -> Any:
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            yield part


def _address(node: str) -> str:
    try:
        return str(socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as reason:
        return f"? {reason.strerror or reason}"


def _reach(endpoint: str) -> str:
    """Whether this node reaches the port on the first node: `reached`, or why not."""
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=10) as there:
            there.sendall(platform.node().encode())
        return "reached"
    except (OSError, ValueError) as reason:
        return str(reason)


def main(words: Sequence[str]) -> None:
    """Look, and write it down under Slurm's name for this node."""
    out, endpoint = Path(words[0]), words[1]
    asked = json.loads(Path("preflight.json").read_text())
    asked["nodes"] = words[2:]
    name = os.environ.get("SLURMD_NODENAME") or platform.node()
    write_json(out / "nodes" / f"{name}.json", look(out, endpoint, asked))


if __name__ == "__main__":
    main(sys.argv[1:])
