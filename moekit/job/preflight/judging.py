"""What nodes said of themselves, judged together: a node that differs is told from a site's setting. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from .dcgm import Diag, read_diag
from .findings import Finding
from .gpus import judge_alike, judge_gpus, judge_xids, read_gpus

LEAST_MEMLOCK = 1 << 30
"""Bytes. What nodes have by default, 64 KiB to 8 MiB, is too little to register a GPU's buffers with."""
_SLOW_FILES = 4.0
_SPEED_MIB = 64


def judge_nodes(
    reports: Mapping[str, Mapping[str, Any]], nodes: Iterable[str], asked: Mapping[str, Any]
) -> list[Finding]:
    """All findings on the nodes of an allocation; a node without a report failed to write one."""
    names = list(nodes)
    found = [
        Finding(node, "node", "fail", "it did not say anything of itself in time")
        for node in names
        if node not in reports
    ]
    gpus = {}
    for node in [name for name in names if name in reports]:
        report = reports[node]
        gpus[node] = read_gpus(report["gpus"]["text"]) if report["gpus"]["code"] == 0 else []
        found += _of_gpus(node, report, gpus[node], asked)
        found += _of_dcgm(node, read_diag(report["dcgm"]["text"], report["dcgm"]["code"]))
        if len(names) > 1:
            found += _of_limits(node, report, str(asked["fabric"]))
        found += _of_files(node, report)
        found += _of_names(node, report)
    found += judge_alike(gpus)
    found += _fabric(reports, names, str(asked["fabric"]))
    found += _speeds(reports)
    return found


def _of_gpus(node: str, report: Mapping[str, Any], gpus: Any, asked: Mapping[str, Any]) -> Iterator[Finding]:
    said = report["gpus"]
    if said["code"] == 127:
        yield Finding(node, "gpus", "skip", "there is no `nvidia-smi`, so its GPUs were not looked at")
    elif said["code"] is None:
        yield Finding(node, "gpus", "fail", "`nvidia-smi` does not answer: a GPU or the driver hangs")
    elif said["code"]:
        why = " ".join(said["text"].split())[:200]
        yield Finding(node, "gpus", "fail", f"`nvidia-smi` ends with {said['code']}: {why}")
    else:
        rows = report["rows"]["text"] if report["rows"]["code"] == 0 else ""
        yield from judge_gpus(node, gpus, int(asked["gpus_per_node"]), str(asked["gpu"]), rows)
    if report["kernel"]["code"] == 0:
        yield from judge_xids(node, report["kernel"]["text"], float(report["uptime_s"]))
    else:
        yield Finding(node, "xid", "skip", "the kernel's log cannot be read, so Xids were not looked for")


def _of_dcgm(node: str, diag: Diag) -> Iterator[Finding]:
    said = "; ".join(diag.said)
    if diag.state == "failed":
        level = "warn" if diag.is_setting else "fail"
        yield Finding(node, "dcgm", level, f"DCGM: {said}", own=not diag.is_setting)
    elif diag.state == "warned":
        yield Finding(node, "dcgm", "warn", f"DCGM: {said}")
    elif diag.state != "passed":
        yield Finding(node, "dcgm", "skip", f"DCGM's diagnostic was not run: {said}")


def _of_limits(node: str, report: Mapping[str, Any], fabric: str) -> Iterator[Finding]:
    """What a fabric needs of a job: Slurm hands on the limit of the shell that submitted it."""
    limit = int(report["memlock"])
    if fabric != "none" and 0 <= limit < LEAST_MEMLOCK:
        what = f"a job may lock {limit} bytes of memory, and {fabric} needs `unlimited`"
        yield Finding(node, "memlock", "fail", f"{what} (`ulimit -l`, and LimitMEMLOCK of slurmd)", own=False)


def _of_files(node: str, report: Mapping[str, Any]) -> Iterator[Finding]:
    for kind, said in report["locks"].items():
        if said == "let in":
            what = f"{kind} in the shared folder keeps nobody out: caches that several nodes write would be damaged"
            yield Finding(node, "locks", "warn", what, own=False)
        elif said != "kept out":
            yield Finding(node, "locks", "warn", f"{kind} in the shared folder does not work: {said}", own=False)
    speed = report["speed"]
    if "error" in speed:
        yield Finding(node, "speed", "fail", f"the shared folder cannot be written: {speed['error']}", own=False)
    elif not speed["same"]:
        yield Finding(node, "speed", "fail", "what it read in the shared folder is not what it wrote")


def _of_names(node: str, report: Mapping[str, Any]) -> Iterator[Finding]:
    unknown = [other for other, address in report["names"].items() if address.startswith("?")]
    loops = [name for name, address in report["names"].items() if _is_loopback(address) and name != node]
    if unknown:
        yield Finding(node, "names", "fail", f"it does not know the name of {', '.join(unknown)}", own=False)
    if loops:
        yield Finding(node, "names", "fail", f"it takes {', '.join(loops)} for itself (127.x)", own=False)
    if report["reach"] != "reached":
        yield Finding(
            node, "names", "fail", f"it does not reach a port of the first node: {report['reach']}", own=False
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _fabric(reports: Mapping[str, Mapping[str, Any]], names: list[str], fabric: str) -> Iterator[Finding]:
    """Each node's devices of the fabric, beside the other nodes'."""
    if fabric == "none" or len(names) < 2:
        return
    count = {node: _devices(reports[node]["rdma"], fabric) for node in names if node in reports}
    most = max(count.values(), default=0)
    for node, here in count.items():
        if not most:
            what = f"no {fabric.upper()} device is seen on it, as on no other; what NCCL takes decides"
            yield Finding(node, "fabric", "warn", what, own=False)
        elif here < most:
            what = f"{here} of its {fabric.upper()} devices are up, of another node {most}"
            yield Finding(node, "fabric", "fail", what)


def _devices(rdma: Iterable[Mapping[str, str]], fabric: str) -> int:
    if fabric == "efa":
        return sum(device["driver"] == "efa" and "DOWN" not in device.get("state", "") for device in rdma)
    return sum("ACTIVE" in device.get("state", "") for device in rdma)


def _speeds(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Nodes to which the shared folder is much slower than to the others."""
    taken = {node: report["speed"]["write_s"] for node, report in reports.items() if "write_s" in report["speed"]}
    if len(taken) < 3:
        return
    usual = median(taken.values())
    for node, seconds in taken.items():
        if seconds > max(1.0, _SLOW_FILES * usual):
            rates = f"{_SPEED_MIB / seconds:.0f} MiB/s, of other nodes {_SPEED_MIB / usual:.0f}"
            yield Finding(node, "speed", "warn", f"it writes to the shared folder with {rates}")
