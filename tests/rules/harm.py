"""What the tests of harm ask of the real Megatron."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cases import Case
from test_rules_real import question

from moekit.launch.cluster import find_cluster
from moekit.megatron.real import Verdict, judge_all
from moekit.recipe.load import load


def few_steps(here: Path, changes: list[str], base: str = "tiny_dense.yaml") -> list[Verdict]:
    """What stage `step` says to each change of a recipe that a CPU trains; none is refused before it."""
    questions = []
    for index, change in enumerate(changes):
        path = Case(base).write(here / f"harm{index}.yaml", change)
        questions.append(question(load(str(path)).recipe, find_cluster(), ("step",)))
    verdicts = [answer[-1] for answer in judge_all(questions)]
    assert [verdict.answer for verdict in verdicts] == ["passed"] * len(changes), verdicts
    return verdicts


def in_megatron(here: Path, program: str) -> str:
    """What a program prints that imports Megatron, in a process of its own."""
    ran = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip().splitlines()[-1]
