"""Time of moekit's rules against the real Megatron's stages, over all shipped recipes, in one run.

    python tests/benchmarks/rules.py [--runs 5]

`moekit check` of all shipped recipes in one call (a whole process, user and system time); the rules alone; and the real
stages of the same recipes, from parser to model, one after the other, with and without the import of Megatron. Exits
with 1 where `check` takes a CPU second or more, or the rules more than a thirtieth of the stages without the import.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from statistics import median

from moekit import share
from moekit.cluster.profile import find_cluster
from moekit.launch.judges import questions
from moekit.megatron.real import judge_each
from moekit.recipe.load import load
from moekit.recipe.rules import violations

MOST_CHECK_S = 1.0
LEAST_RATIO = 30


def check_cpu_s() -> float:
    """User and system time of `moekit check` over all shipped recipes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "moekit", "check", *share.shipped_recipes()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if " recipes: " not in done.stderr:
        sys.exit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Measure, print a table, and fail where a target is missed."""
    parser = argparse.ArgumentParser(description="time of the rules against the real Megatron's stages")
    parser.add_argument("--runs", type=int, default=5, help="measured runs of the rules, at least 3")
    runs = parser.parse_args().runs
    if runs < 3:
        parser.error("--runs must be at least 3")
    check_cpu_s()  # compiles
    check = median(check_cpu_s() for _ in range(runs))
    cluster, loaded = find_cluster(), [load(name) for name in share.shipped_recipes()]
    rules_s = []
    for _ in range(runs):
        start = time.perf_counter()
        for one in loaded:
            list(violations(one.recipe, cluster))
        rules_s.append(time.perf_counter() - start)
    start = time.perf_counter()
    answers = judge_each([questions(one, cluster)["first"] for one in loaded], at_once=1)
    next(answers)
    imported = time.perf_counter()
    rest = sum(1 for _ in answers)
    ended = time.perf_counter()
    stages = (ended - imported) / rest * len(loaded)
    ratio = stages / median(rules_s)
    print(f"{len(loaded)} shipped recipes, {runs} runs; seconds")
    print(f"moekit check, whole process  {check:8.3f}")
    print(f"the rules                    {median(rules_s):8.3f}")
    print(f"Megatron's own stages        {stages:8.3f}   and {imported - start:.1f} to import it and judge the first")
    print(f"the stages take {ratio:.0f} times as long as the rules")
    missed = []
    if check >= MOST_CHECK_S:
        missed.append(f"`check` takes {check:.2f} CPU seconds, not under {MOST_CHECK_S}")
    if ratio < LEAST_RATIO:
        missed.append(f"the rules are only {ratio:.0f} times faster than the real stages, not {LEAST_RATIO}")
    print("\n".join(missed) or "both targets are met")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
