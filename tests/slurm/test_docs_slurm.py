"""The sessions with Slurm that the documents show, run: numbers and what a job does just then are masked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster

import moekit

sys.path.append(str(Path(__file__).parents[1] / "data"))
from made_shards import listed_data_set

pytestmark = pytest.mark.slurm

DOCS = Path(moekit.__file__).parents[1] / "docs"
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", ["sweeps.md"])
def test_sessions_print_what_they_show(document: str, slurm: Cluster, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    trainer = shared / "waits"
    shared.mkdir()
    trainer.write_text("#!/bin/bash\nexec sleep 600\n")
    trainer.chmod(0o755)
    listed_data_set(shared, "fineweb-edu", "llama-3.2", tokens=10_100_000_000)
    fields = {"python": str(trainer), "cpus_per_task": 2, "cpu_partition": "cpu", "shared_root": str(shared)}
    profile = slurm.profile("mine", **fields)
    (tmp_path / "mine.yaml").write_text(profile.read_text())
    found = FENCE.findall((DOCS / document).read_text())
    for _, name, text in (block for block in found if block[0] == "yaml" and block[1]):
        (tmp_path / name).write_text(text)
    sessions = [text for language, _, text in found if language == "slurm"]
    assert sessions
    try:
        for command, expected in re.findall(r"^\$ moekit (.*?)\n(.*?)(?=^\$|\Z)", "".join(sessions), re.M | re.S):
            words = [sys.executable, "-m", "moekit", *command.split()]
            done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=slurm.env(), cwd=tmp_path)
            shown = (done.stdout + done.stderr).replace(str(shared), "/shared")
            assert masked(shown) == masked(expected), command
    finally:
        slurm.call("scancel", "--user=root")


def masked(text: str) -> str:
    """Without the numbers of jobs, and without what they do just now."""
    text = re.sub(r"(submitted(?: behind \d+(?:, \d+)*)?), .*", r"\1, ...", text)
    return re.sub(r"(jobs?|behind) \d+(?:, \d+)*", r"\1 N", text)
