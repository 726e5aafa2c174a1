"""Time of `moekit router` on counts of many ranks, made here as Megatron writes them.

    python tests/benchmarks/counts.py [--ranks 4096] [--steps 3] [--last 1] [--dir DIR]

58 MoE layers, 256 experts over 64 expert parallel ranks, 8 micro batches. Prints a line; exits with 1 where reading and
working out take 10 CPU seconds or more. The files take about 14 KB a rank and step.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from moekit.launch.rundir import RunDir
from moekit.watch.router.report import report

MOST_S = 10
LAYERS, DENSE, EXPERTS, EXPERT_PARALLEL, MICRO_BATCHES = 61, 3, 256, 64, 8


def main() -> int:
    """Make, read, judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--last", type=int, default=1)
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        write(folder, options.ranks, options.steps)
        begun, wall = time.process_time(), time.perf_counter()
        (section,) = report(RunDir(folder), options.last).sections
        seconds, wall = time.process_time() - begun, time.perf_counter() - wall
    finally:
        shutil.rmtree(folder)
    whole = section.found == section.expected == options.ranks * (LAYERS - DENSE) * options.last
    mib = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
    what = f"counts of {options.ranks:,} ranks, {section.found:,} records"
    print(f"{what}: {seconds:.1f} CPU seconds, {wall:.1f} by the clock, {mib:.0f} MiB")
    return int(seconds >= MOST_S or not whole)


def write(folder: Path, ranks: int, steps: int) -> None:
    """A run's directory with such counts; replicas of an expert parallel rank are alike."""
    recipe = {
        "megatron": {"version": '"0.19.2"'},
        "model": {"num_layers": LAYERS, "seq_length": 4096},
        "moe": {"num_experts": EXPERTS, "layer_freq": f"([0]*{DENSE}+[1]*{LAYERS - DENSE})"},
        "parallel": {"gpus": ranks, "expert_model": min(EXPERT_PARALLEL, ranks)},
        "train": {"micro_batch_size": 1, "global_batch_size": MICRO_BATCHES * ranks},
    }
    sections = (f"{name}:\n" + "".join(f"  {k}: {v}\n" for k, v in fields.items()) for name, fields in recipe.items())
    (folder / "recipe.yaml").write_text("".join(sections))
    counts, rng = folder / "checkpoints" / "tokens_per_expert", random.Random(0)
    counts.mkdir(parents=True)
    local = EXPERTS // min(EXPERT_PARALLEL, ranks)
    for ep_rank in range(min(EXPERT_PARALLEL, ranks)):
        text = "".join(
            json.dumps({"iter": step * 100, "block": "decoder", "layer": layer, "tpe": tpe}) + "\n"
            for step in range(1, steps + 1)
            for layer in range(DENSE, LAYERS)
            for tpe in [[[rng.randrange(4000) for _ in range(local)] for _ in range(MICRO_BATCHES)]]
        )
        for rank in range(ep_rank, ranks, EXPERT_PARALLEL):
            (counts / f"rank{rank}.jsonl").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
