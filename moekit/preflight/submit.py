"""A preflight as a job of its own: its folder, its submission, and its end.

The folder is `<shared_root>/preflight/jobs/<n>/`; `out/verdict.json` in it is what came of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moekit
from moekit.cluster.profile import Cluster, over_limits
from moekit.launch import slurm
from moekit.launch.folders import claim, write
from moekit.launch.script import environment_script
from moekit.launch.slurm_text import Job
from moekit.preflight.files import preflight_files
from moekit.problems import MoekitError, Problem, error, shortened

TIME_MIN = {1: 60, 2: 120, 3: 240, 4: 480}
"""Minutes that the job asks for, by the level of DCGM's diagnostic; a slow allocation is measured in pairs, too."""
MAINTENANCE = 3
"""From this level on a diagnostic is one for maintenance: NVIDIA means it for administrators (handbook 2.1)."""
_POLL_S = (1.0, 15.0)


@dataclass(frozen=True)
class Wanted:
    """What a preflight is to do."""

    nodes: int = 1
    nodelist: str = ""
    """Slurm's short form; empty: whichever are free."""
    level: int = 1
    baseline: bool = False
    tried: tuple[tuple[str, str], ...] = ()


def problems_of(wanted: Wanted, cluster: Cluster, maintenance: bool) -> list[Problem]:
    """Why a preflight cannot be done so on this cluster."""
    found = [Problem("", what, hint) for what, hint in over_limits(cluster, nodes=wanted.nodes)]
    if wanted.level >= MAINTENANCE and not maintenance:
        what = f"level {wanted.level} of DCGM's diagnostic is for maintenance: it takes up to hours, and heats the GPUs"
        found.append(Problem("", what, "add `--maintenance`; level 1 is for readiness, 2 looks longer"))
    if wanted.baseline and wanted.tried:
        found.append(Problem("", "`--try` measures settings that a baseline does not have", "one of both at a time"))
    if (wanted.baseline or wanted.tried) and not cluster.nccl_tests:
        what = f"profile `{cluster.name}` names no `nccl_tests`, so nothing can be measured"
        found.append(Problem("", what, "`moekit image import` brings an image that has it (handbook 2.1)"))
    return found


def settings(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`NAME=VALUE` words as pairs.

    Raises:
        MoekitError: one is none.
    """
    found = []
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise error(f"`--try {shortened(word)}` is no setting", "`--try NCCL_BUFFSIZE=8388608`")
        found.append((name, value))
    return tuple(found)


def job_files(wanted: Wanted, cluster: Cluster) -> dict[str, str]:
    """The text of every file of the job's folder; the same every time."""
    variables: dict[str, str | None] = {"MOEKIT_SETUP_SCRIPT": cluster.setup_script, **(cluster.environment or {})}
    looked = preflight_files(cluster, variables, level=wanted.level, baseline=wanted.baseline, tried=dict(wanted.tried))
    return {
        "job.sbatch": _job_script(wanted, cluster),
        "environment.sh": environment_script(variables, ()),
        **looked,
    }


def _job_script(wanted: Wanted, cluster: Cluster) -> str:
    minutes = min(TIME_MIN[wanted.level], cluster.max_time_min or TIME_MIN[wanted.level])
    options: Mapping[str, object] = {
        "job-name": "moekit-preflight",
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": wanted.nodes,
        "nodelist": wanted.nodelist or None,
        "ntasks-per-node": 1,
        "cpus-per-task": cluster.cpus_per_task,
        "gres": f"{cluster.gres}:{cluster.gpus_per_node}",
        "mem": 0,
        "time": minutes,
        "output": "slurm-%j.log",
    }
    header = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    first = f"# A look at {wanted.nodes} nodes, by moekit {moekit.__version__}. In this folder: sbatch job.sbatch"
    last = ["#SBATCH --exclusive", "#SBATCH --no-requeue", "exec bash preflight.sh out", ""]
    return "\n".join(["#!/bin/bash", first, *header, *last])


def submit(wanted: Wanted, cluster: Cluster) -> tuple[Path, str]:
    """Write the job's folder and submit it; the folder and the job's id.

    Raises:
        MoekitError: the folder cannot be written, or Slurm refuses the job.
    """
    root = Path(cluster.shared_root, "preflight", "jobs")
    folder = _claim_next(root)
    write(folder, job_files(wanted, cluster))
    return folder, slurm.submit(folder)


def _claim_next(root: Path) -> Path:
    """The first free number's folder; two moekits never get the same one."""
    number = 1 + max((int(path.name) for path in root.glob("*") if path.name.isdecimal()), default=0)
    for folder in (root / str(number + more) for more in range(100)):
        try:
            claim(folder)
        except MoekitError:
            if not folder.exists():
                raise
        else:
            return folder
    raise error(f"no folder can be made in `{root}`")


def wait(job: str, say: Callable[[str], None]) -> Job | None:
    """Wait until a job has ended, and say its states on the way; None where Slurm has forgotten it.

    Raises:
        MoekitError: Slurm does not answer, time and again.
    """
    shown, pause_s, silent = "", _POLL_S[0], 0
    while True:
        try:
            found, silent = slurm.jobs([job]).get(job), 0
        except slurm.Unanswered:
            silent += 1
            if silent > 10:
                raise
            found = None
        else:
            if found is None or found.ended:
                return found
            where = f" on {found.nodes}" if found.nodes else f" ({found.reason})" if found.reason else ""
            if (said := f"{found.state.lower()}{where}") != shown:
                say(f"job {job} is {said}")
                shown = said
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, _POLL_S[1])


def read_verdict(folder: Path) -> dict[str, Any] | None:
    """What a preflight came to; None where it did not come so far. `folder` has `verdict.json`."""
    try:
        said = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None
