"""How fast the counts of a routing trace are read, against `json` with numpy and `orjson` with numpy.

    python tests/benchmarks/trace.py [--gb 1] [--experts 64] [--topk 8] [--tokens 4096] [--json-mb 200]

The file is one as megatron/core/transformer/moe/router_trace.py writes it: a line a call, `json.dumps` of its record.
All three do the same work, tokens per expert of each call as numpy counts; ours also proves each line. The other two
read the file's first megabytes (`--json-mb`), on one core, since their speed does not depend on the length; ours reads
all of it, on one core and on all. Peak memory is that of a process of its own with all its workers, each at its most.
Beside the speed by the clock is that by CPU time, a core's, which a busy machine leaves as it is.
Exits with 1 where ours, by the clock, is below 15 times `json` or 2 times `orjson`, or takes 500 MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import orjson

from moekit.watch.router.trace import Call, over

LEAST = {"json": 15.0, "orjson": 2.0}
MOST_MB = 500.0
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


def counted(found: Iterator[Call], experts: int) -> tuple[int, np.ndarray]:
    """Calls of a piece, and their tokens per expert together."""
    calls, total = 0, np.zeros(experts, np.int64)
    for call in found:
        calls += 1
        total += np.bincount(call.experts.ravel(), minlength=experts)
    return calls, total


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


def ours(path: Path, experts: int, workers: int | None) -> Read:
    """By our reader, of the whole file."""
    skipped: Counter[str] = Counter()
    clock, calls, total = Clock(), 0, np.zeros(experts, np.int64)
    for some, counts in over([path], partial(counted, experts=experts), skipped, num_experts=experts, workers=workers):
        calls += some
        total += counts
    assert not skipped, skipped
    return clock.speeds(path.stat().st_size), calls, total


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


def alone(path: Path, experts: int, workers: int) -> None:
    """In a process of its own: read, and print speed and peak memory in MB."""
    speed, calls, _ = ours(path, experts, workers)
    own, one = (resource.getrusage(who).ru_maxrss / 1e3 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"speed": speed, "calls": calls, "peak_mb": own + one * (workers if workers > 1 else 0)}))


def shown(speed: tuple[float, float]) -> str:
    """By the clock, and in brackets by CPU time."""
    return f"{speed[0]:7.0f} ({speed[1]:.0f}) MB/s"


def main() -> int:
    """Make the file, measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json-mb", type=float, default=200.0)
    parser.add_argument("--workers", type=int, default=2, help="processes of the reading on all cores")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        alone(Path(asked.alone[0]), asked.experts, int(asked.alone[1]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "router_trace_rank0.jsonl")
        lines = make(path, int(asked.gb * 1e9), asked.tokens, asked.topk, asked.experts)
        print(f"{path.stat().st_size / 1e9:.2f} GB, {lines} lines, {asked.experts} experts, top {asked.topk}")
        speeds, ratios, peak = {}, {}, 0.0
        for name, loads in (("json", json.loads), ("orjson", orjson.loads)):
            speeds[name], calls, total = with_numpy(path, loads, asked.experts, int(asked.json_mb * 1e6))
            print(f"{name + ' + numpy':<20}{shown(speeds[name])}", flush=True)
        if calls == lines:
            assert (ours(path, asked.experts, 1)[2] == total).all()
        for workers in (1, asked.workers):
            arguments = [sys.executable, __file__, "--experts", str(asked.experts), "--alone", str(path), str(workers)]
            found = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
            assert found["calls"] == lines
            for name, speed in speeds.items():
                ratios[name] = [mine / other for mine, other in zip(found["speed"], speed, strict=True)]
            print(f"ours, {workers} process{'es' * (workers > 1)}".ljust(20) + shown(found["speed"]), end="")
            print("".join(f"; {wall:.1f} ({cpu:.1f}) x {name}" for name, (wall, cpu) in ratios.items()), end="")
            print(f"; peak {found['peak_mb']:.0f} MB", flush=True)
            peak = max(peak, found["peak_mb"])
    return int(peak >= MOST_MB or any(ratios[name][0] < least for name, least in LEAST.items()))


if __name__ == "__main__":
    sys.exit(main())
