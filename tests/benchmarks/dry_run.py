"""CPU time of moekit's commands against NeMo-Run's dry run of an equal Slurm script, all in one run.

    python tests/benchmarks/dry_run.py [--nemo-python PATH] [--runs 7]

Whole processes, user and system time, children included; the commands take turns, so that a busy machine slows all of
them. Exits with 1 where `launch --dry-run` takes more than a twelfth of NeMo-Run's time or `check` more than 0.15 s.
Without `--nemo-python` NeMo-Run is installed once, in build/nemo-run (about 0.5 GB).
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECIPE = "recipes/first_moe.yaml"
NEMO = "NeMo-Run 0.11.1 dry run"
CHECK = "moekit check"
DRY_RUN = "moekit launch --dry-run"
MOST_CHECK_S = 0.15
LEAST_RATIO = 12


def cpu_seconds(command: list[str], must_print: str) -> float:
    """User and system time of a process and its children; it has to succeed and to print what it is for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "COLUMNS": "200"}
    environment.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # installed packages have their bytecode; the first round writes it
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or must_print not in done.stdout + done.stderr:
        sys.exit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def nemo_python() -> str:
    """The Python of a virtual environment with NeMo-Run, made where there is none."""
    folder = ROOT / "build" / "nemo-run"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing NeMo-Run in {folder.relative_to(ROOT)}, once", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-r", str(HERE / "requirements.txt")]
        subprocess.run(install, check=True)
        (folder / "complete").touch()
    return str(python)


def measure(nemo: str, runs: int) -> dict[str, list[float]]:
    """CPU seconds of each command, `runs` times in turn after one unmeasured round."""
    moekit = [sys.executable, "-m", "moekit"]
    with tempfile.TemporaryDirectory() as temporary:
        written = Path(temporary) / "run"
        subprocess.run([*moekit, "launch", RECIPE, f"--dry-run={written}"], cwd=ROOT, check=True, capture_output=True)
        commands = {
            CHECK: ([*moekit, "check", RECIPE], "no problems"),
            DRY_RUN: ([*moekit, "launch", RECIPE, "--dry-run"], "#SBATCH"),
            NEMO: ([nemo, str(HERE / "nemo_dry_run.py"), str(written / "argv.first"), temporary], "#SBATCH"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(runs + 1):
            for name, (command, must_print) in commands.items():
                seconds[name].append(cpu_seconds(command, must_print))
    return {name: values[1:] for name, values in seconds.items()}


def main() -> None:
    """Measure, print a table, and fail where a target is missed."""
    parser = argparse.ArgumentParser(description="CPU time of moekit's commands against NeMo-Run's dry run")
    parser.add_argument("--nemo-python", help="a Python that has NeMo-Run 0.11.1")
    parser.add_argument("--runs", type=int, default=7, help="measured runs of each command, at least 5")
    options = parser.parse_args()
    if options.runs < 5:
        parser.error("--runs must be at least 5")
    seconds = measure(options.nemo_python or nemo_python(), options.runs)
    middle = {name: median(values) for name, values in seconds.items()}
    print(f"CPU seconds of whole processes, {options.runs} runs each\n{'':26}median    least     most   NeMo-Run is")
    for name, values in seconds.items():
        ratio = f"{middle[NEMO] / middle[name]:9.1f}x" if name != NEMO else ""
        print(f"{name:26}{middle[name]:6.3f}   {min(values):6.3f}   {max(values):6.3f}   {ratio}")
    missed = []
    if middle[CHECK] > MOST_CHECK_S:
        missed.append(f"`{CHECK}` takes {middle[CHECK]:.3f} CPU seconds, more than {MOST_CHECK_S}")
    if middle[NEMO] < LEAST_RATIO * middle[DRY_RUN]:
        missed.append(f"`{DRY_RUN}` takes more than 1/{LEAST_RATIO} of {NEMO}")
    print("\n".join(missed) or "both targets are met")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
