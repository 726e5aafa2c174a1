"""Time and memory of watching a long stream: a run of so many steps is made and read as `moekit watch` reads it.

    python tests/benchmarks/watch.py [--steps 10000000] [--dir DIR]

Prints a line; exits with 1 where the peak memory is above 64 MiB. The stream takes about 210 bytes a step on disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from moekit.watch.watching import Watching

MOST_MIB = 64
CONFIG = {
    "world_size": 1,
    "num_experts": 8,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "global_batch_size": 16,
    "seq_length": 256,
}


def main() -> int:
    """Make, read, judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        _write(folder, options.steps)
        begun, watching = time.process_time(), Watching(folder)
        while watching.poll(5_000) is not None:
            pass
        seconds, picture = time.process_time() - begun, watching.picture()
    finally:
        shutil.rmtree(folder)
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{picture.step:,} steps in {seconds:.0f} CPU seconds, {mib:.0f} MiB")
    return int(mib > MOST_MIB or picture.step != options.steps or bool(picture.active))


def _write(folder: Path, steps: int) -> None:
    attempt, counts = folder / "attempts" / "1", folder / "checkpoints" / "tokens_per_expert"
    attempt.mkdir(parents=True)
    counts.mkdir(parents=True)
    with (attempt / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"event": "config", "config": CONFIG, "time": 1.0}) + "\n")
        for i in range(1, steps + 1):
            loss = 3 + 5000 / (i + 1000) + i * 7919 % 1000 / 50000
            metrics = f'"lm loss": {loss:.6f}, "grad-norm": 0.5{i % 10}, "load_balancing_loss": 1.01{i % 10}'
            timing = f'"z_loss": 4.2{i % 10}, "iteration-time": 0.1{i % 10}, "throughput": 14{i % 10}.5'
            file.write(f'{{"step": {i}, "time": {1_764_000_000 + i}.5, "metrics": {{{metrics}, {timing}}}}}\n')
    with (counts / "rank0.jsonl").open("w") as file:
        for i in range(100, steps + 1, 100):
            file.write(
                f'{{"iter": {i}, "block": "decoder", "layer": 0, "tpe": [[5, 6, 7, 8, 9, 8, 7, {i % 9 + 1}]]}}\n'
            )


if __name__ == "__main__":
    sys.exit(main())
