"""Traces made here, with answers known beforehand: Kineto's format, and Nsight Systems' documented schema."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)"
GROUPED = "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<cute::tuple<int>>>>"
GEMM = "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT"
PERMUTE = "_permute_kernel"
NORM = "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<float>"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

KERNELS = [
    # (name, stream, begin, end) in microseconds of a step of 100
    (FLASH, 7, 0, 10),
    (NORM, 7, 10, 14),
    (PERMUTE, 7, 14, 20),
    (SEND, 30, 20, 50),  # dispatch: 10 behind the GEMM, 20 exposed
    (GEMM, 7, 40, 50),
    (GROUPED, 7, 50, 70),
    (GATHER, 31, 65, 75),  # 5 behind the grouped GEMM
    (SEND, 30, 80, 100),  # combine, exposed; 75 to 80 idle
]
SHARE_US = {
    "attention": 10,
    "grouped GEMM": 20,
    "other GEMM": 10,
    "permute and copy": 6,
    "other compute": 4,
    "all-to-all": 40,
    "other communication": 5,
    "idle": 5,
}
EXPOSED_US, HIDDEN_US = 40, 10

Kernel = tuple[str, int, float, float]


def kernel(name: str, stream: int, begin: float, end: float, **args: Any) -> dict[str, Any]:
    """An event of a kernel, as Kineto writes one."""
    said = {"External id": 1, "queued": 0, "device": 0, "context": 1, "stream": stream, "correlation": 9, **args}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": 5161411334374.711 + begin,
        "dur": end - begin,
        "args": said,
    }


def operator(name: str, begin: float, end: float, thread: int = 5) -> dict[str, Any]:
    """An event of an operator on the CPU."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 5, "tid": thread, "ts": begin, "dur": end - begin}


def step(number: int, begin: float, end: float) -> dict[str, Any]:
    """The annotation of a profiled step."""
    name = f"ProfilerStep#{number}"
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 5, "tid": 5, "ts": begin, "dur": end - begin}


def gpu_events(kernels: Iterable[Kernel] = KERNELS, collective: str = "all_to_allv") -> list[dict[str, Any]]:
    """One step's events, with operators and annotations around the kernels."""
    named = {
        SEND: {"Collective name": collective} if collective else {},
        GATHER: {"Collective name": "_allgather_base"},
    }
    return [
        operator("aten::mm", 0, 50),
        step(3, 0, 90),
        *(kernel(name, stream, begin, end, **named.get(name, {})) for name, stream, begin, end in kernels),
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "all", "pid": 0, "tid": 7, "ts": 0, "dur": 1e9},
    ]


def write(path: Path, events: list[Any], rank: int = 0, indent: int | None = 2) -> Path:
    """A trace file, gzipped where its name says so."""
    whole = {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 8, "pg_config": [{"ranks": [0, 1]}]},
        "traceEvents": events,
        "traceName": "/tmp/x.json",
    }
    data = json.dumps(whole, indent=indent).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def write_nsys(
    path: Path, kernels: Iterable[Kernel] = KERNELS, devices: int = 1, pids: tuple[int, ...] = (77,)
) -> Path:
    """An export after the documented schema: what is read here, and a column more."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,"
            " deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,"
            " globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER NOT NULL)"
        )
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,"
            " deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, globalPid INTEGER,"
            " bytes INTEGER NOT NULL)"
        )
        names: dict[str, int] = {}
        for device, pid in product(range(devices), pids):
            for name, stream, begin, end in kernels:
                number = names.setdefault(name, len(names))
                times = 10**9 + round(begin * 1000), 10**9 + round(end * 1000)
                if name == "memcpy":
                    database.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,1,?,?,64)",
                        (*times, device, stream, pid << 24),
                    )
                else:
                    database.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,1,?,1,?,?,?,1)",
                        (*times, device, stream, pid << 24, number, number),
                    )
        database.executemany("INSERT INTO StringIds VALUES (?,?)", [(number, name) for name, number in names.items()])
    database.close()
    return path
