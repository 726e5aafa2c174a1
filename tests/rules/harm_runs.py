"""Real training runs of a changed tiny recipe on this CPU, one process, as a launch starts it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cases import HERE

import moekit.job
from moekit.launch.run_files import run_arguments
from moekit.megatron.flags import argv
from moekit.recipe.load import load


def trained(run_dir: Path, change: str, resume: bool = False) -> tuple[int, str]:
    """The exit code and the output of a run of `bases/on_a_cpu.yaml` with a change, in its run directory."""
    run_dir.mkdir(exist_ok=True)
    recipe = run_dir / "recipe.yaml"
    recipe.write_text(f"base: {HERE / 'bases' / 'on_a_cpu.yaml'}\n{change}")
    shutil.copytree(Path(moekit.job.__file__).parent, run_dir / "job", dirs_exist_ok=True)
    arguments = argv(run_arguments(load(str(recipe)).recipe, "run", run_dir, resume=resume))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    variables = {"MOEKIT_ATTEMPT": "1", "MOEKIT_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        [*torchrun, "job/entry.py", *arguments],
        cwd=run_dir,
        env={**os.environ, **variables, "PYTHONPATH": "job"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return run.returncode, run.stdout + run.stderr
