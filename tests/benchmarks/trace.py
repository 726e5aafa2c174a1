"""How fast the counts of a routing trace are read, against `json` with numpy and `orjson` with numpy.

    python tests/benchmarks/trace.py [--gb 1 10] [--experts 64] [--topk 8] [--tokens 4096] [--json-mb 200] [--dir DIR]

Files are as megatron/core/transformer/moe/router_trace.py writes them: a line a call, `json.dumps` of its record.
All three do the same work, tokens per expert of each call as numpy counts; ours also proves each line. The other two
read a file's first megabytes (`--json-mb`), on one core, since their speed does not depend on the length; ours reads
all of it, on one core and on two. Peak memory is VmHWM of a process of its own and of its worker, added.
Beside the speed by the clock is that by CPU time, a core's, which a busy machine leaves as it is.
Exits with 1 where ours on two cores, by the clock, is below 15 times `json` or 2 times `orjson`, takes 500 MB, or where
peaks of two sizes are more than 10 % apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from moekit.watch.router.trace import Call, over

LEAST = {"json": 15.0, "orjson": 2.0}
MOST_MB = 500.0
MOST_APART = 1.1
DISTINCT = 64
"""Lines that are made; the file repeats them under other steps."""


def make(path: Path, size: int, tokens: int, topk: int, experts: int) -> int:
    """Write about `size` bytes of lines; the number of lines."""
    chooser = np.random.default_rng(0)
    tails = []
    for _ in range(DISTINCT):
        order = np.argsort(chooser.random((tokens, experts), np.float32), axis=1)[:, :topk]
        tails.append(json.dumps(np.sort(order, axis=1).tolist()) + "}\n")
    written = lines = 0
    with path.open("w") as file:
        while written < size:
            head = {"step": lines // 16, "stage": "pre_dispatch", "block": "decoder", "layer": lines % 16, "rank": 0}
            head |= {"num_tokens": tokens, "topk": topk}
            written += file.write(json.dumps(head)[:-1] + ', "top_indices": ' + tails[lines % DISTINCT])
            lines += 1
    return lines


Counted = tuple[int, np.ndarray, int, float]
"""Calls, tokens per expert, and the process that counted them with its peak memory so far in MB."""


def counted(found: Iterator[Call], experts: int) -> Counted:
    """Of a piece, all calls together."""
    calls, total = 0, np.zeros(experts, np.int64)
    for call in found:
        calls += 1
        total += np.bincount(call.experts.ravel(), minlength=experts)
    return calls, total, os.getpid(), peak_mb()


def peak_mb() -> float:
    """The most memory that this process has held."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


class Clock:
    """Bytes a second, by the clock and by the CPU time of this process and those that it has waited for."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), self._cpu()

    def _cpu(self) -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    def speeds(self, size: int) -> tuple[float, float]:
        """In MB/s, of so many bytes since it began."""
        return size / 1e6 / (time.perf_counter() - self.wall), size / 1e6 / (self._cpu() - self.cpu)


Read = tuple[tuple[float, float], int, np.ndarray]
"""Speeds in MB/s, calls, and tokens per expert."""


def ours(path: Path, experts: int, workers: int | None) -> tuple[Read, float]:
    """By our reader, of the whole file; and the peak memory of all its processes in MB."""
    skipped: Counter[str] = Counter()
    clock, calls, total, peaks = Clock(), 0, np.zeros(experts, np.int64), {os.getpid(): 0.0}
    work = partial(counted, experts=experts)
    for some, counts, process, peak in over([path], work, skipped, num_experts=experts, workers=workers):
        calls += some
        total += counts
        peaks[process] = max(peaks.get(process, 0.0), peak)
    assert not skipped, skipped
    peaks[os.getpid()] = peak_mb()
    return (clock.speeds(path.stat().st_size), calls, total), sum(peaks.values())


def with_numpy(path: Path, loads: Callable[[bytes], dict], experts: int, most: int) -> Read:
    """The same by a reader of JSON, of the first `most` bytes."""
    clock, calls, done, total = Clock(), 0, 0, np.zeros(experts, np.int64)
    with path.open("rb") as file:
        for line in file:
            chosen = np.asarray(loads(line)["top_indices"], np.int32)
            total += np.bincount(chosen.ravel(), minlength=experts)
            calls, done = calls + 1, done + len(line)
            if done >= most:
                break
    return clock.speeds(done), calls, total


def alone(path: Path, experts: int, workers: int) -> dict[str, Any]:
    """`ours` in a process of its own, which takes no memory from this one."""
    arguments = [sys.executable, __file__, "--experts", str(experts), "--alone", str(path), str(workers)]
    found: dict[str, Any] = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    return found


def shown(speed: tuple[float, float]) -> str:
    """By the clock, and in brackets by CPU time."""
    return f"{speed[0]:7.0f} ({speed[1]:.0f}) MB/s"


def measure(path: Path, asked: argparse.Namespace, lines: int) -> tuple[dict[str, float], float]:
    """Print what one file says; how many times faster ours is by the clock on two cores, and its peak memory in MB."""
    print(f"{path.stat().st_size / 1e9:.2f} GB, {lines:,} lines, {asked.experts} experts, top {asked.topk}")
    speeds, times, peak = {}, {}, 0.0
    for name, loads in (("json", json.loads), ("orjson", orjson.loads)):
        speeds[name], calls, total = with_numpy(path, loads, asked.experts, int(asked.json_mb * 1e6))
        print(f"{name + ' + numpy':<20}{shown(speeds[name])}", flush=True)
    if calls == lines:
        assert (ours(path, asked.experts, 1)[0][2] == total).all()
    for workers in (1, 2):
        found = alone(path, asked.experts, workers)
        assert found["calls"] == lines
        print(f"ours, {workers} process{'es' * (workers > 1)}".ljust(20) + shown(found["speed"]), end="")
        for name, speed in speeds.items():
            wall, cpu = (mine / other for mine, other in zip(found["speed"], speed, strict=True))
            times[name] = wall
            print(f"; {wall:.1f} ({cpu:.1f}) x {name}", end="")
        print(f"; peak {found['peak_mb']:.0f} MB", flush=True)
        peak = max(peak, found["peak_mb"])
    return times, peak


def main() -> int:
    """Make the files, measure, judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json-mb", type=float, default=200.0)
    parser.add_argument("--dir", type=Path, help="where the files are made; they are deleted again")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        (speed, calls, _), peak = ours(Path(asked.alone[0]), asked.experts, int(asked.alone[1]))
        print(json.dumps({"speed": speed, "calls": calls, "peak_mb": peak}))
        return 0
    slow, peaks = False, []
    for gb in asked.gb:
        with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
            path = Path(folder, "router_trace_rank0.jsonl")
            lines = make(path, int(gb * 1e9), asked.tokens, asked.topk, asked.experts)
            times, peak = measure(path, asked, lines)
        slow = slow or any(times[name] < least for name, least in LEAST.items())
        peaks.append(peak)
    print(f"peak memory of the largest over the smallest: {max(peaks) / min(peaks):.2f}")
    return int(slow or max(peaks) >= MOST_MB or max(peaks) > MOST_APART * min(peaks))


if __name__ == "__main__":
    sys.exit(main())
