"""Time and memory of reading a profiler's trace, beside `json.load` of the same file.

    python tests/benchmarks/traces_of_kernels.py [--mb 1000] [--gzip] [--dir DIR] [--without-json]

The trace is made here in Kineto's form: of ten events six are operators on the CPU, two launches, and two kernels on
three streams. Each reader is a process of its own, so each has its own peak of memory. Prints a line for each; exits
with 1 where `moekit profile` takes more than 400 MiB, or half of what `json.load` takes.
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

MOST_MIB = 400
NAMES = ("void flash_fwd_kernel<128>", "nvjet_hsh_128x256", "_permute_kernel", "GemmUniversal<GroupProblemShape<int>>")
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
_CHILD = """
import time
begun = time.process_time()
{work}
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
mib = int(peak.split()[1]) / 1024
print(f"{{time.process_time() - begun:.1f}} {{mib:.0f}}")
"""
_OURS = """
from pathlib import Path
from moekit.profile.traces import read
read({path!r}, [], None)
"""
_THEIRS = """
import gzip, json
with (gzip.open if {path!r}.endswith(".gz") else open)({path!r}, "rb") as file:
    json.load(file)
"""


def main() -> int:
    """Make, read twice, judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--without-json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        path = Path(folder) / ("rank-0.json.gz" if options.gzip else "rank-0.json")
        events, kernels = write(path, options.mb * 10**6)
        size = path.stat().st_size / 1e6
        print(f"{size:,.0f} MB, {events:,} events, {kernels:,} of them kernels")
        seconds, mib = measured(_OURS, path)
        print(f"moekit profile: {seconds:.1f} CPU seconds, {mib:.0f} MiB")
        if options.without_json:
            return int(mib > MOST_MIB)
        their_seconds, their_mib = measured(_THEIRS, path)
        print(f"json.load:      {their_seconds:.1f} CPU seconds, {their_mib:.0f} MiB")
    return int(mib > MOST_MIB or mib > their_mib / 2)


def measured(work: str, path: Path) -> tuple[float, float]:
    """(CPU seconds, peak MiB) of a Python process of its own, its start excluded from the seconds."""
    script = _CHILD.format(work=work.format(path=str(path)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-400:])
    seconds, mib = done.stdout.split()
    return float(seconds), float(mib)


def write(path: Path, size: int) -> tuple[int, int]:
    """A trace of about `size` bytes unpacked; how many events, how many kernels."""
    written, rounds, begun = 0, 0, time.monotonic()
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(b'{"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": [\n')
        while written < size:
            text = b",\n".join(orjson.dumps(event, option=orjson.OPT_INDENT_2) for event in ten(rounds))
            written += file.write((b",\n" if rounds else b"") + text)
            rounds += 1
        file.write(b'], "traceName": "made"}')
    print(f"made in {time.monotonic() - begun:.0f} s")
    return 10 * rounds, 2 * rounds


def ten(number: int) -> list[dict[str, Any]]:
    """Ten events of 100 microseconds."""
    at = 5161411334374.711 + 100 * number
    host = {"ph": "X", "pid": 32251, "tid": 32251}
    shapes = {"External id": number, "Record function id": 0, "Ev Idx": number, "Input Dims": [[4096, 2048], [2048]]}
    launch = {"External id": number, "cbid": 211, "correlation": number}
    stream = 7 + number % 2
    kernel = {"External id": number, "device": 0, "context": 1, "correlation": number, "grid": [128, 1, 1]}
    exchange = {**kernel, "Collective name": "all_to_allv", "Process Group Name": "25"}
    return [
        *({**host, "cat": "cpu_op", "name": f"aten::op{i}", "ts": at + i, "dur": 9, "args": shapes} for i in range(6)),
        *(
            {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 4, "args": launch}
            for _ in "12"
        ),
        {
            **{"ph": "X", "cat": "kernel", "name": NAMES[number % 4], "pid": 0, "tid": stream, "ts": at, "dur": 60.5},
            "args": {**kernel, "stream": stream},
        },
        {
            **{"ph": "X", "cat": "kernel", "name": SEND, "pid": 0, "tid": 30, "ts": at + 40, "dur": 55.25},
            "args": {**exchange, "stream": 30},
        },
    ]


if __name__ == "__main__":
    sys.exit(main())
