"""`moekit data check` beside `cat` and `sha256sum`, over the same file of about 1.5 GB in the page cache.

    python tests/benchmarks/check_shards.py [GB]

Each is timed three times, the fastest counts; the check is one shard on one thread, as a function, so that neither the
interpreter's start nor several shards at once flatter or hide its speed. `cat` writes to a pipe that is read.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moekit.data.checking.pair import Expected, check_pair
from moekit.data.shards import HEADER, MAGIC, bin_path, idx_path

END, VOCABULARY, DOCUMENT_TOKENS = 128_001, 128_256, 1_000
MOST_TIMES_CAT = 4.0


def write(prefix: Path, documents: int) -> None:
    """A shard of documents of the same length, of random tokens of Llama 3's vocabulary."""
    random = np.random.default_rng(0)
    with bin_path(prefix).open("wb") as file:
        for first in range(0, documents, 10_000):
            block = random.integers(0, 128_000, (min(10_000, documents - first), DOCUMENT_TOKENS), "<i4")
            block[:, -1] = END
            file.write(block.tobytes())
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 4, documents, documents + 1))
        file.write(np.full(documents, DOCUMENT_TOKENS, "<i4").tobytes())
        file.write((np.arange(documents, dtype="<i8") * DOCUMENT_TOKENS * 4).tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())


def fastest_s(act: Callable[[], object]) -> float:
    """Seconds of the fastest of three."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return min(times)


def main(gigabytes: float = 1.5) -> int:
    """Print the times; exit code 1 where the check takes too many times as long as `cat`."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        prefix = Path(folder) / "shard"
        write(prefix, int(gigabytes * 1e9 / (4 * DOCUMENT_TOKENS)))
        path, right = str(bin_path(prefix)), Expected("<i4", END, VOCABULARY)
        gigabyte = bin_path(prefix).stat().st_size / 1e9

        def check(sha256: bool) -> None:
            assert check_pair(prefix, right, sha256).problem is None

        times = {
            "cat": fastest_s(lambda: subprocess.run(f"cat {path} | cat > /dev/null", shell=True, check=True)),
            "check": fastest_s(lambda: check(False)),
            "sha256sum": fastest_s(lambda: subprocess.run(["sha256sum", path], capture_output=True, check=True)),
            "check --sha256": fastest_s(lambda: check(True)),
        }
    for name, seconds in times.items():
        print(f"{name:15} {seconds:6.2f} s  {gigabyte / seconds:6.2f} GB/s")
    ratio = times["check"] / times["cat"]
    hashed = times["check --sha256"] / times["sha256sum"]
    print(f"check takes {ratio:.2f} times as long as cat, check --sha256 {hashed:.2f} times as long as sha256sum")
    return int(ratio > MOST_TIMES_CAT)


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:])))
