"""Seconds that a rehearsal takes, of every shipped recipe; and the same two processes started by torchrun.

    python tests/benchmarks/rehearse.py [RECIPE ...]

A rehearsal must come in under a minute on 2 cores. What torchrun takes longer is its start, and Megatron's import in
each process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.launch.processes import environment, torchrun
from moekit.launch.rundir import run_dir
from moekit.recipe.load import load
from moekit.rehearse.plan import plan
from moekit.rehearse.rehearsal import rehearse

LIMIT_S = 60
COMPARED = "first_moe"


def main() -> None:
    """Print the slowest, and the ratio to torchrun of one."""
    names = sys.argv[1:] or share.shipped_recipes()
    names = list(dict.fromkeys([COMPARED, *names]))
    plans = [plan(load(name), find_cluster(share.made_for(name))) for name in names]
    taken: dict[str, float] = {}
    trained_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, parts in zip(names, rehearse(plans, Path(folder)), strict=True):
            began = time.monotonic()
            found = list(parts)
            taken[name] = time.monotonic() - began
            if name == COMPARED:
                trained_s = found[-1].seconds
            print(f"{taken[name]:6.1f} s  {name}", file=sys.stderr, flush=True)
        torchrun_s = _by_torchrun(Path(folder, "1"))
    slowest = sorted(taken, key=lambda name: -taken[name])[:3]
    print(
        f"rehearsals of {len(names)} recipes: slowest " + ", ".join(f"{name} {taken[name]:.1f} s" for name in slowest)
    )
    print(f"over {LIMIT_S} s: {[name for name in names if taken[name] > LIMIT_S]}")
    ratio = torchrun_s / trained_s
    print(f"{COMPARED} in two processes: {trained_s:.1f} s, by torchrun {torchrun_s:.1f} s: {ratio:.1f} times")


def _by_torchrun(root: Path) -> float:
    """The same run directory's first start, as a launch makes it."""
    run = run_dir(root, COMPARED)
    number = run.new_attempt()
    command = [*torchrun(2), "job/entry.py", *run.argv_first.read_text(encoding="utf-8").splitlines()]
    began = time.monotonic()
    subprocess.run(
        command,
        cwd=run.path,
        env=environment("cpu", 2, number, {}, {}, os.environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return time.monotonic() - began


if __name__ == "__main__":
    main()
