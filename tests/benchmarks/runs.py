"""Time of `moekit list` and `moekit status` with a thousand runs in the records.

    python tests/benchmarks/runs.py [--runs 1000] [--rounds 7]

Baseline: asking Slurm for each run by itself, `squeue --jobs=ID` once a run. Slurm's clients are stand-ins here that
answer at once, so a real cluster makes the baseline slower yet. Whole processes, wall time and CPU time (user and
system, children included); the commands take turns, so that a busy machine slows all of them. Exits with 1 where `list`
or `status` takes a second of CPU time or more, or more than a quarter of the baseline's.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "launch"))

from many_runs import make_clients, make_runs  # noqa: E402

MOST_S = 1.0
LEAST_RATIO = 4
BASELINE = "squeue, a call for each run"


def seconds(command: list[str], folder: Path, must_print: str) -> tuple[float, float]:
    """Wall and CPU time of a process and its children; it has to succeed and to print what it is for."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "MOEKIT_PROFILE": str(folder / "profile.yaml"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or must_print not in done.stdout:
        sys.exit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout[-500:]}{done.stderr}")
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> int:
    """Measure, print a table, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_runs(folder / "shared", asked.runs)
        make_clients(folder / "bin", folder / "shared", asked.runs)
        (folder / "profile.yaml").write_text(
            f"name: here\ngpus_per_node: 8\ngpu: h100\nfabric: ib\ncontainer: none\nshared_root: {folder / 'shared'}\n"
        )
        each = f"for id in $(seq {asked.runs}); do squeue --jobs=$id; done | tail -n 1"
        commands = {
            "moekit list": ([sys.executable, "-m", "moekit", "list"], "run_0007"),
            "moekit status": ([sys.executable, "-m", "moekit", "status"], "run_0007"),
            BASELINE: (["bash", "-c", each], "RUNNING"),
        }
        taken: dict[str, list[tuple[float, float]]] = {command: [] for command in commands}
        for _ in range(asked.rounds):
            for command, (words, must_print) in commands.items():
                taken[command].append(seconds(words, folder, must_print))
    walls = {command: median(wall for wall, _ in times) for command, times in taken.items()}
    cpus = {command: median(cpu for _, cpu in times) for command, times in taken.items()}
    print(f"{asked.runs} runs, median of {asked.rounds}:")
    for command in commands:
        print(f"  {command:30} {walls[command]:6.2f} s, CPU {cpus[command]:6.2f} s")
    slow = [
        command
        for command in commands
        if command != BASELINE and (cpus[command] >= MOST_S or cpus[command] * LEAST_RATIO > cpus[BASELINE])
    ]
    for command in slow:
        print(f"{command} is too slow: at most {MOST_S:g} s, and 1/{LEAST_RATIO} of the baseline's", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
