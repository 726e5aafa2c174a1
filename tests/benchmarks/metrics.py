"""What the stream of metrics costs an iteration of the last rank.

    python tests/benchmarks/metrics.py [--iterations 100] [--rounds 7]

An iteration is a matrix product of some milliseconds and then what Megatron does with 60 or 200 tensors of one number:
each to TensorBoard's writer and, in the runs with the stream, to `wandb` (moekit/job/wandb_face.py), whose lines go to
a file. Baseline: the same loop with TensorBoard alone. Runs with and without take turns, so that a busy machine slows
both; wall time, which is what the training waits, and CPU time of the process, its threads included. Exits with 1 where
the stream takes a millisecond of CPU time an iteration or more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from moekit.job.wandb_face import WandbFace

MOST_MS = 1.0
SCALARS = (60, 200)


def seconds(folder: Path, scalars: int, iterations: int, with_stream: bool) -> tuple[float, float]:
    """Wall and CPU seconds of an iteration; what ends a run (`finish`) is no part of one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [f"moe/load_balancing_loss_layer_{number}" for number in range(scalars)]
    matrix = torch.randn(600, 600, device=device)
    face = WandbFace(folder / "metrics.jsonl") if with_stream else None
    add_scalar = SummaryWriter.add_scalar
    with SummaryWriter(str(folder / "tensorboard"), max_queue=1000) as writer:
        if face is not None:
            face.init(config={"scalars": scalars})
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(1, iterations + 1):
            log_step(matrix @ matrix, names, step, writer, face and face.log)
        taken = time.perf_counter() - wall, time.process_time() - cpu
    SummaryWriter.add_scalar = add_scalar
    if face is not None:
        face.finish()
        written = len((folder / "metrics.jsonl").read_text().splitlines())
        assert written == iterations + 2, f"{written} lines of {iterations + 2}"  # the config's and the end's
    return taken[0] / iterations, taken[1] / iterations


def log_step(product: Any, names: list[str], step: int, writer: Any, log: Callable[..., object] | None) -> None:
    """As megatron/training/training.py: training_log does: a call a scalar, TensorBoard first."""
    for name, value in zip(names, product[0], strict=False):
        writer.add_scalar(name, value, step)
        if log is not None:
            log({name: value}, step)


def main() -> int:
    """Measure, print a table, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    print(f"{'scalars':>8}{'without, ms':>14}{'with, ms':>12}{'cost, wall ms':>16}{'cost, CPU ms':>15}")
    worst = 0.0
    for scalars in SCALARS:
        rounds = []
        for _ in range(asked.rounds):
            with tempfile.TemporaryDirectory() as name:
                pair = [seconds(Path(name, str(stream)), scalars, asked.iterations, stream) for stream in (False, True)]
                rounds.append([1e3 * value for taken in pair for value in taken])
        without, _, with_it, _ = (median(column) for column in zip(*rounds, strict=True))
        wall, cpu = median(r[2] - r[0] for r in rounds), median(r[3] - r[1] for r in rounds)
        print(f"{scalars:>8}{without:>14.2f}{with_it:>12.2f}{wall:>16.2f}{cpu:>15.2f}", flush=True)
        worst = max(worst, cpu)
    return int(worst >= MOST_MS)


if __name__ == "__main__":
    sys.exit(main())
