"""What the tests of harm ask of the real Megatron."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cases import Case
from test_rules_real import question

from moekit.cluster.profile import find_cluster
from moekit.megatron.real import judge_all
from moekit.megatron.verdict import Verdict
from moekit.recipe.load import load


def few_steps(here: Path, changes: list[str], base: str = "tiny_dense.yaml") -> list[Verdict]:
    """What stage `step` says to each change of a recipe that a CPU trains; none is refused before it."""
    return steps_of(here, *((base, change) for change in changes))


def steps_of(here: Path, *changes: tuple[str, str]) -> list[Verdict]:
    """`few_steps` of changes of several recipes, each with its base."""
    questions = []
    for index, (base, change) in enumerate(changes):
        path = Case(base).write(here / f"harm{index}.yaml", change)
        questions.append(question(load(str(path)).recipe, find_cluster(), ("step",)))
    verdicts = [answer[-1] for answer in judge_all(questions)]
    assert [verdict.answer for verdict in verdicts] == ["passed"] * len(changes), verdicts
    return verdicts


def numbers_of(here: Path, *changes: tuple[str, str]) -> list[tuple[object, object]]:
    """The losses and gradient norms of `steps_of`, exactly as Megatron has them."""
    return [(verdict.losses, verdict.grad_norms) for verdict in steps_of(here, *changes)]


def in_megatron(here: Path, program: str) -> str:
    """What a program prints that imports Megatron, in a process of its own."""
    ran = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip().splitlines()[-1]
