"""`moekit compare` on real trainings: the quickstart against its dense twin, with one difference planted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from launched import STEPS, Launch, Launched

pytestmark = [pytest.mark.megatron, pytest.mark.train, pytest.mark.timeout(4000)]

COMMON = 40
PLANTED = f"""
base: settings/quickstart_dense
train: {{iters: {STEPS}, exit_interval: {COMMON}}}
schedule: {{decay_iters: {STEPS}, lr: 1.0e-3}}
checkpoint: {{save: null, save_interval: null}}
"""
"""As long a schedule as `trained` has, so the same data at each step, but a third of its learning rate."""


@pytest.fixture(scope="module")
def twin(launch: Launch) -> Launched:
    launched = launch("twin", PLANTED)
    assert launched.wait() == 0, launched.text
    return launched


def compared(root: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "moekit", "compare", "trained", "twin", *words],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_planted_difference_is_found(trained: Launched, twin: Launched, root: Path) -> None:
    """Beside the experts, which are one difference; in the recipes, and in the loss."""
    found: dict[str, Any] = json.loads(compared(root, "--json", "--plot", "both.svg"))
    assert {fact["name"]: fact["same"] for fact in found["facts"]} == dict.fromkeys(
        [fact["name"] for fact in found["facts"]], True
    )
    assert found["not_comparable"] == []
    groups = found["difference"]["groups"]
    assert list(groups) == ["experts", "schedule"]
    assert groups["schedule"] == [["schedule.lr", 0.003, 0.001]]
    assert found["interval"] == {"first": 21, "last": COMMON, "steps": 20, "common": COMMON, "warmup": 20}
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert figures["lm loss"]["is_clear"] is True
    assert figures["lm loss"]["difference"] > 0.1  # so much more slowly it learns
    assert figures["router/max_vio"]["one"] > 0
    assert figures["router/max_vio"]["other"] is None
    assert figures["grad-norm"]["steps"] == 20
    ElementTree.parse(root / "both.svg")
    text = compared(root)
    assert "DIFFER in 2 groups" in text
    assert "schedule  lr 0.003 → 0.001" in text
    assert "No verdict" in text
