"""CPU time of moekit's rules against the real Megatron's stages, over all shipped recipes, in one run.

    python tests/benchmarks/rules.py [--runs 5]

`moekit check` of all shipped recipes in one call, against `moekit check --real` of the same: whole processes, user and
system time, children included; the two take turns. Exits with 1 where `check` takes a CPU second or more, or more than
a thirtieth of the time that the real stages take beyond it.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from statistics import median

from moekit import share

MOST_CHECK_S = 1.0
LEAST_RATIO = 30


def cpu_seconds(options: list[str]) -> float:
    """User and system time of `moekit check` over all shipped recipes and of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "moekit", "check", *options, *share.shipped_recipes()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if " recipes: " not in done.stderr:
        sys.exit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Measure, print a table, and fail where a target is missed."""
    parser = argparse.ArgumentParser(description="CPU time of the rules against the real Megatron's stages")
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each, at least 3")
    runs = parser.parse_args().runs
    if runs < 3:
        parser.error("--runs must be at least 3")
    seconds: dict[str, list[float]] = {"moekit check": [], "moekit check --real": []}
    for _ in range(runs + 1):
        for name, values in seconds.items():
            values.append(cpu_seconds(name.split()[2:]))
    seconds = {name: values[1:] for name, values in seconds.items()}  # the first round compiles
    check, real = (median(values) for values in seconds.values())
    ratio = (real - check) / check
    print(f"CPU seconds over {len(share.shipped_recipes())} shipped recipes, {runs} runs each")
    for name, values in seconds.items():
        print(f"{name:20} median {median(values):7.3f}   least {min(values):7.3f}   most {max(values):7.3f}")
    print(f"the real stages take {ratio:.0f} times the rules' whole process")
    missed = []
    if check >= MOST_CHECK_S:
        missed.append(f"`check` takes {check:.2f} CPU seconds, not under {MOST_CHECK_S}")
    if ratio < LEAST_RATIO:
        missed.append(f"the rules are only {ratio:.0f} times faster than the real stages, not {LEAST_RATIO}")
    print("\n".join(missed) or "both targets are met")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
