"""Time and memory of reading a log for causes, beside `grep -c` of one word.

    python tests/benchmarks/doctor.py [--mb 1000] [--dir DIR]

The log is what a real run on a CPU printed, its training again and again with other numbers, and at its end a
watchdog's flood of 4,096 ranks, with a GPU's fault behind it. Prints a line; exits with 1 where the fault is not said
first, or the peak memory is above 128 MiB.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moekit.doctor.triage import read_log

MOST_MIB = 128
NOISE = Path(__file__).parents[1] / "doctor" / "data" / "noise.log"
FLOOD = (
    "[rank{rank}]:[E1130 ProcessGroupNCCL.cpp:616] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=100, OpType=ALLREDUCE) ran for 600012 milliseconds.\n"
)


def main() -> int:
    """Make, read, judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        path = folder / "train.log"
        _write(path, options.mb * 10**6)
        size = path.stat().st_size / 1e6
        began, cpu = time.monotonic(), time.process_time()
        with path.open("rb") as file:
            triage = read_log(file)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        began = time.monotonic()
        # captured: GNU grep stops at the first match where its output is thrown away
        subprocess.run(["grep", "-c", "rror", str(path)], capture_output=True, check=False)
        grep = time.monotonic() - began
    finally:
        shutil.rmtree(folder)
    first = triage.found[0].key if triage.found else "nothing"
    print(
        f"{size:,.0f} MB, {triage.lines:,} lines: {seconds:.1f} s ({cpu:.1f} s of CPU, {size / seconds:.0f} MB/s),"
        f" grep -c {grep:.1f} s; peak memory {peak_mib:.0f} MiB; first cause {first}"
    )
    return 0 if first == "gpu_ecc" and peak_mib < MOST_MIB else 1


def _write(path: Path, size: int) -> None:
    """A log of about so many bytes."""
    lines = NOISE.read_text().splitlines(keepends=True)
    start = next(at for at, line in enumerate(lines) if "elapsed time per iteration" in line)
    steps, random_numbers = "".join(lines[start:]), random.Random(0)
    with path.open("w") as file:
        file.writelines(lines[:start])
        while file.tell() < size:
            file.write(re.sub(r"\d{3,}", lambda _: str(random_numbers.randrange(10**5)), steps))
        file.writelines(FLOOD.format(rank=rank) for rank in range(4096))
        file.write("n7 kernel: NVRM: Xid (PCI:0000:97:00): 48, pid=1, name=python, DBE (double bit error) ECC\n")


if __name__ == "__main__":
    sys.exit(main())
