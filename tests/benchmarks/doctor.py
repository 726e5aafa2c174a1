"""Time and memory of reading a log for causes, beside `grep -c` of one word.

    python tests/benchmarks/doctor.py [--mb 1000] [--dir DIR]

Three logs. What a real run on a CPU printed, its training again and again with other numbers, and at its end a
watchdog's flood of 4,096 ranks, with a GPU's fault behind it; and, of a tenth of the size, the same words in lines that
are all different, without and with words that causes have too. Prints a line each; exits with 1 where the fault is not
said first, or the peak memory is above 128 MiB.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from moekit.doctor.triage import read_log

MOST_MIB = 128
NOISE = Path(__file__).parents[1] / "doctor" / "data" / "noise.log"
FLOOD = (
    "[rank{rank}]:[E1130 ProcessGroupNCCL.cpp:616] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=100, OpType=ALLREDUCE) ran for 600012 milliseconds.\n"
)
TELLING = ["error", "failed", "invalid", "memory", "CUDA", "NCCL", "must", "socket", "device", "Xid", "signal", "timed"]
"""Words of messages, which say nothing alone."""


def main() -> int:
    """Make, read, judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        first = _measure(folder, "a real run and a flood", options.mb * 10**6, _real)
        _measure(folder, "lines that are all different", options.mb * 10**5, _different)
        _measure(folder, "and have words of causes", options.mb * 10**5, _telling)
    finally:
        shutil.rmtree(folder)
    peak = _peak_mib()
    print(f"peak memory {peak:.0f} MiB; first cause of the flood: {first}")
    return 0 if first == "gpu_ecc" and peak < MOST_MIB else 1


def _measure(folder: Path, name: str, size: int, write: Callable[[Path, int], None]) -> str:
    path = folder / "train.log"
    write(path, size)
    mb = path.stat().st_size / 1e6
    began, cpu = time.monotonic(), time.process_time()
    with path.open("rb") as file:
        triage = read_log(file)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    began = time.monotonic()
    # captured: GNU grep stops at the first match where its output is thrown away
    subprocess.run(["grep", "-c", "rror", str(path)], capture_output=True, check=False)
    grep = time.monotonic() - began
    print(
        f"{name}: {mb:,.0f} MB, {triage.lines:,} lines in {seconds:.1f} s ({cpu:.1f} s of CPU, {mb / cpu:.0f} MB/s);"
        f" grep -c {grep:.1f} s",
        flush=True,
    )
    return triage.found[0].key if triage.found else "nothing"


def _peak_mib() -> float:
    """Of this process alone."""
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak) / 1024


def _steps() -> tuple[list[str], str]:
    lines = NOISE.read_text().splitlines(keepends=True)
    start = next(at for at, line in enumerate(lines) if "elapsed time per iteration" in line)
    return lines[:start], "".join(lines[start:])


def _real(path: Path, size: int) -> None:
    """A log of about so many bytes."""
    (begin, steps), random_numbers = _steps(), random.Random(0)
    with path.open("w") as file:
        file.writelines(begin)
        while file.tell() < size:
            file.write(re.sub(r"\d{3,}", lambda _: str(random_numbers.randrange(10**5)), steps))
        file.writelines(FLOOD.format(rank=rank) for rank in range(4096))
        file.write("n7 kernel: NVRM: Xid (PCI:0000:97:00): 48, pid=1, name=python, DBE (double bit error) ECC\n")


def _different(path: Path, size: int, telling: list[str] | None = None) -> None:
    """Words of the real log in lines that are never alike."""
    words, chance = sorted(set(NOISE.read_text().split())), random.Random(0)
    with path.open("w") as file:
        while file.tell() < size:
            said = [*chance.choices(words, k=10), *chance.choices(telling or words, k=2)]
            chance.shuffle(said)
            file.write(f"{' '.join(said)} {chance.getrandbits(64):x}\n")


def _telling(path: Path, size: int) -> None:
    _different(path, size, TELLING)


if __name__ == "__main__":
    sys.exit(main())
