"""Stands in for programs that need a GPU: nvidia-smi, dcgmi, nccl-tests.

What they print is rendered after their sources.
`install` puts them into a folder for PATH; `machine.json` there says what is wrong with which node. Run as a program,
`python gpu_double.py PROGRAM ARGUMENT...`, this file is each of them. Nothing printed was captured from a GPU.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIZE = 8 << 30
BUSBW = {"1": 330.0, "2": 77.14, "4": 39.25, "8": 30.91}
"""GB/s by nodes: the handbook's two, four and eight (2.1); the first is made up."""
PROGRAMS = ("nvidia-smi", "dcgmi", "alltoall_perf", "all_reduce_perf")
_SRUN = """#!/bin/bash
# This machine's Slurm has no PMIx: what is asked for is put down, and done without.
echo "$*" >>"{folder}/srun.said"
exec {srun} "${{@/--mpi=pmix/--mpi=none}}"
"""
_PROGRAM = """#!/bin/bash
[[ -z ${{SLURM_LOCALID:-}} || $SLURM_LOCALID == 0 || {alone} ]] || exit 0
GPU_DOUBLE={folder} exec {python} {here} {name} "$@"
"""


def install(folder: Path, srun: str = "/usr/bin/srun") -> Path:
    """Write the programs; the folder to put in front of PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"srun": _SRUN.format(folder=folder, srun=srun)}
    for name in PROGRAMS:
        alone = f"-e {folder}/no_mpi"
        words = {"folder": folder, "python": sys.executable, "here": Path(__file__), "name": name, "alone": alone}
        texts[name] = _PROGRAM.format(**words)
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    be(folder)
    return folder


def be(folder: Path, **machine: Any) -> None:
    """What is wrong, by node: `slow`, `inside`, `wrong`, `diag`, `gpus`, `network`; and `settings`, by `NAME=VALUE`."""
    (folder / "machine.json").write_text(json.dumps(machine))


def perf_text(
    collective: str, hosts: Sequence[str], busbw: float, *, gpus: int = 8, wrong: int = 0, size: int = SIZE
) -> str:
    """What nccl-tests 2.19 print for one size (src/common.cu)."""
    ranks = len(hosts) * gpus
    algbw = busbw / (max(ranks - 1, 1) / ranks * (2 if collective == "all_reduce_perf" else 1))
    time = f"{size / max(algbw, 1.0) / 1e3:8.0f}"
    lines = [
        "# nccl-tests version 2.19.6 nccl-headers=23007 nccl-library=23007",
        f"# Collective test starting: {collective}",
        f"# nThread 1 nGpus 1 minBytes {size} maxBytes {size} step: 1048576(bytes) warmup iters: 1 iters: 20 agg iters:"
        " 1 validation: 1 graph: 0 unalign: 0",
        "#",
        "# Using devices",
    ]
    for rank in range(ranks):
        host, device = hosts[rank // gpus], rank % gpus
        place = f"on {host:>10} device {device:2} [0000:{89 + device:x}:00] NVIDIA H200"
        lines.append(f"#  Rank {rank:2} Group  0 Pid {41000 + rank:6} {place}")
    half = "    time   algbw   busbw  #wrong "
    units = "    (us)  (GB/s)  (GB/s)         "
    row = f"{size:>12} {size // 4 // ranks:>13} {'float':>9} {'none':>7} {-1:>7}"
    row += f" {time} {algbw:7.2f} {busbw:7.2f} {wrong:7} {time} {algbw:7.2f} {busbw * 0.99:7.2f} {'N/A':>7}"
    lines += [
        "#",
        f"#       size         count      type   redop    root {half}{half}",
        f"#        (B)    (elements)                           {units}{units}",
        row,
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {busbw:g} ",
        "#",
        f"# Collective test concluded: {collective}",
        "#",
    ]
    return "\n".join(lines) + "\n"


def alone_text(hosts: Sequence[str], gpus: int = 8) -> str:
    """What a binary without MPI prints: each process is a world of its own, and rank 0 of it."""
    return "".join(perf_text("alltoall_perf", [host], 0.0, gpus=1) for host in hosts for _ in range(gpus))


def nccl_text(host: str, network: str) -> str:
    """What a process says of its network with `NCCL_DEBUG=INFO`; `Socket` is the fallback of EFA_1.4 (handbook 2.2)."""
    begin = f"{host}:41000:41099 [0] NCCL INFO "
    lines = [f"{host}:41000:41000 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.4<0>"]
    if network == "Socket":
        lines.append(
            f"{begin}NET/Plugin: dlerror=/lib/x86_64-linux-gnu/libefa.so.1: version `EFA_1.4' not found (required by "
            "/opt/amazon/efa/lib/libfabric.so.1) No plugin found (libnccl-net-ofi.so), using internal implementation"
        )
    else:
        lines.append(f"{begin}NET/OFI Selected provider is efa, fabric is efa (found 32 nics)")
    return "\n".join([*lines, f"{begin}Using network {network}"]) + "\n"


def gpu_rows(gpus: Sequence[Mapping[str, str]]) -> str:
    """What `nvidia-smi --query-gpu=...` prints for `gpus.FIELDS`, each GPU with what is said of it."""
    lines = []
    for index, said in enumerate(gpus):
        usual = {
            "index": str(index),
            "name": "NVIDIA H200",
            "uuid": f"GPU-{index:08}-0000",
            "serial": f"165092300000{index}",
            "pci.bus_id": f"00000000:{89 + index:X}:00.0",
            "driver_version": "580.95.05",
            "ecc.mode.current": "Enabled",
            "ecc.errors.uncorrected.volatile.total": "0",
            "temperature.gpu": "33",
            "clocks_event_reasons.active": "0x0000000000000001",
        }
        lines.append(", ".join({**usual, **said}.values()))
    return "\n".join(lines) + "\n"


def diag_json(fails: Mapping[int, str], gpus: int = 8, severity: int = 2, status: str = "Fail") -> str:
    """`dcgmi diag -r 1 -j` of DCGM 4, with a warning for each GPU of `fails`."""
    results = []
    for gpu in range(gpus):
        result: dict[str, Any] = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": gpu, "status": "Pass"}
        if gpu in fails:
            warning = {"error_category": 7, "error_id": 5, "error_severity": severity, "warning": fails[gpu]}
            result |= {"status": status, "warnings": [warning]}
        results.append(result)
    test = {"name": "software", "results": results, "test_summary": {"status": "Fail" if fails else "Pass"}}
    body = {"test_categories": [{"category": "Deployment", "tests": [test]}]}
    return json.dumps({"DCGM Diagnostic": body, "metadata": {"version": "4.4.2"}}, indent=1) + "\n"


# What follows runs as the programs.


def _nvidia_smi(machine: Mapping[str, Any], node: str, words: Sequence[str]) -> int:
    of_node = machine.get("gpus", {}).get(node, {})
    gpus = [of_node.get(str(index), {}) for index in range(int(of_node.get("count", 8)))]
    if words[0].startswith("--query-gpu="):
        print(gpu_rows(gpus), end="")
    else:
        print("".join(f"GPU-{index:08}-0000, No, No\n" for index in range(len(gpus))), end="")
    return 0


def _dcgmi(machine: Mapping[str, Any], node: str, words: Sequence[str]) -> int:
    with (_folder() / "dcgmi.said").open("a") as said:
        said.write(f"{node} {' '.join(words)}\n")
    fails = machine.get("diag", {}).get(node)
    if fails == "no daemon":
        print("Error: unable to establish a connection to the specified host: localhost\n")
        print("Error: Unable to connect to host engine. Host engine connection invalid/disconnected.")
        return 235
    print(diag_json({int(gpu): text for gpu, text in (fails or {}).items()}), end="")
    return 226 if fails else 0


def _perf(machine: Mapping[str, Any], node: str, words: Sequence[str], name: str, folder: Path) -> int:
    hosts = _hosts(os.environ["SLURM_STEP_NODELIST"])
    assert tuple(words) == ("-b", "8G", "-e", "8G", "-g", "1", "-c", "1", "-n", "20"), words
    if (folder / "no_mpi").exists():
        print(perf_text(name, [node], 0.0, gpus=1), end="", flush=True)
        return 0
    print(nccl_text(node, machine.get("network", {}).get(node, "Libfabric")), end="", flush=True)
    if os.environ["SLURM_PROCID"] != "0":
        return 0
    slow = [value for host, value in machine.get("slow", {}).items() if host in hosts]
    busbw = min([float(BUSBW[str(len(hosts))]), *slow]) if len(hosts) > 1 else BUSBW["1"]
    busbw = machine.get("inside", {}).get(hosts[0], busbw) if len(hosts) == 1 else busbw
    for setting, factor in machine.get("settings", {}).items():
        busbw *= factor if os.environ.get(setting.partition("=")[0]) == setting.partition("=")[2] else 1.0
    wrong = machine.get("wrong", {}).get(hosts[0], 0) if len(hosts) == 1 else 0
    print(perf_text(name, hosts, 398.52 if name == "all_reduce_perf" else busbw, wrong=wrong), end="", flush=True)
    return 1 if wrong else 0


def _hosts(nodes: str) -> list[str]:
    """`n[1-2,4]` as names; no client of Slurm is in an image."""
    name, _, inner = nodes.rstrip("]").partition("[")
    spans = [part.split("-") for part in inner.split(",")] if inner else []
    return [f"{name}{at}" for span in spans for at in range(int(span[0]), int(span[-1]) + 1)] or [name]


def _folder() -> Path:
    """Where the programs were put: on PATH, or where this one was called from."""
    return Path(os.environ["GPU_DOUBLE"])


def main(words: Sequence[str]) -> int:
    """Be the program that the first word names."""
    name, rest = words[0], words[1:]
    folder = _folder()
    machine, node = json.loads((folder / "machine.json").read_text()), socket.gethostname().partition(".")[0]
    if name == "nvidia-smi":
        return _nvidia_smi(machine, node, rest)
    return _dcgmi(machine, node, rest) if name == "dcgmi" else _perf(machine, node, rest, name, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
