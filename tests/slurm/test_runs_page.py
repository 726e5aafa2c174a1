"""docs/runs.md: its commands, run in their order on the real Slurm, print what it shows, but for numbers and times."""

import os
import re
import subprocess
import sys
from pathlib import Path

import checkpoint_double
import pytest
from cluster import Cluster

sys.path.append(str(Path(__file__).parents[1] / "data"))
from made_shards import listed_data_set
from test_runs import jobs_of, profile  # noqa: F401  # a fixture among them

pytestmark = pytest.mark.slurm

PAGE = Path(__file__).parents[2] / "docs/runs.md"
BLOCKS = re.findall(r"^```text slurm\n\$ (.*?)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)

TRAINER = """#!/bin/bash
# Saves at step 100 and stops, at the last one the second time.
save() { mkdir -p checkpoints; cp -r ../../complete "checkpoints/$(printf iter_%07d "$1")"
    echo "$1" >checkpoints/latest_checkpointed_iteration.txt; }
folder=attempts/$MOEKIT_ATTEMPT
sleep 2
mkdir -p "$folder/exit"
for ((r = SLURM_NODEID * 8; r < SLURM_NODEID * 8 + 8; r++)); do
    echo '{"code": 0, "reason": "", "time": 1.0}' >"$folder/exit/rank$r.json"
done
if [[ $MOEKIT_ATTEMPT = 1 ]]; then
    echo '{"step": 100, "time": 1.0, "metrics": {}}' >"$folder/metrics.jsonl" && save 100
else
    echo '{"step": 4768, "time": 1.0, "metrics": {}}' >"$folder/metrics.jsonl" && save 4768
fi
"""


def masked(text: str, root: str) -> str:
    """What every cluster and day has in common."""
    text = text.replace(root, "/fsx/moekit")
    text = re.sub(r"submitted, .*", "submitted, WHEN", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "TIME", text)
    text = re.sub(r"after \d+ (s|min)\b", "after TIME", text)
    text = re.sub(r"/\S*/recipes/", "recipes/", text)
    text = re.sub(r"(job +|local +|completed +|finished +)\d+", r"\1ID", text)
    text = re.sub(r"(\d-[\d,]+ +)\d+ +n\d", r"\1ID NODE", text)
    return re.sub(r" +", " ", text)


def test_the_page_shows_what_is_printed(slurm: Cluster, profile: Path, tmp_path: Path) -> None:  # noqa: F811
    root = slurm.shared_root / "page"
    listed_data_set(root, "fineweb-edu", "llama-3.2", tokens=10_100_000_000)
    checkpoint_double.write(root / "complete")
    trainer = root / "trainer"
    trainer.write_text(TRAINER)
    trainer.chmod(0o755)
    said = {"shared_root": str(root), "python": str(trainer)}
    other = {
        "megatron_path": "/fsx/Megatron-LM",
        "container": "pyxis",
        "image": "/fsx/images/pytorch.sqsh",
        "mounts": None,
    }
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MOEKIT_PROFILE": str(slurm.profile("ours", **said)),
    }
    new = slurm.profile("new", **{**said, "shared_root": "/fsx/new", **other})
    (tmp_path / "new.yaml").symlink_to(new)
    (tmp_path / "typo.yaml").symlink_to(slurm.profile("typo", **said, partition="h200"))
    assert len(BLOCKS) > 6
    for command, shown in BLOCKS:
        done = subprocess.run(
            ["bash", "-c", f"{command} 2>&1"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert masked(done.stdout, str(root)) == masked(shown, str(root)), f"$ {command}\n{done.stdout}"
        for job in [*jobs_of(slurm, "first_moe"), *jobs_of(slurm, "typo")]:
            slurm.wait(int(job))
