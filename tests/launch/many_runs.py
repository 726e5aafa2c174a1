"""A thousand runs in the records, and clients that answer for their jobs: for the test and the benchmark of listing."""

from __future__ import annotations

import json
from pathlib import Path

from moekit.launch.slurm_text import SACCT_FIELDS, SQUEUE_FIELDS

RECIPE = "megatron: {version: 0.19.2}\n"


def make_runs(shared_root: Path, count: int) -> None:
    """Runs 0001, 0002 ...: of ten, six ended long ago, one finished here, two run, one ended while nobody looked."""
    for number in range(1, count + 1):
        run = shared_root / "runs" / f"run_{number:04}"
        kind = number % 10
        (run / "attempts/1/exit").mkdir(parents=True)
        (run / "checkpoints/iter_0000100").mkdir(parents=True)
        (run / "recipe.yaml").write_text(RECIPE)
        (run / "end").write_text("200\n0\n")
        (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("100")
        steps = [{"step": step, "time": 1.8e9 + step, "metrics": {"lm loss": 8.0}} for step in range(1, 151)]
        (run / "attempts/1/metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
        for rank in range(2):
            (run / f"attempts/1/exit/rank{rank}.json").write_text('{"code": 0, "reason": "", "time": 1.0}')
        if kind == 0:
            continue
        (run / "job.sbatch").write_text("#!/bin/bash\n")
        (run / "jobs").mkdir()
        (run / "jobs" / str(number)).write_text("")
        (run / "submissions").mkdir()
        said: dict[str, object] = {"phase": "submitted", "time": 1.8e9 + number, "job": str(number)}
        if kind < 7:
            ended = {"state": "TIMEOUT", "reason": "", "exit_code": "0:15", "start": 1.8e9, "end": 1.8e9 + 60}
            said |= {"phase": "ended", "nodes": "n[1-2]", "node_count": 2, **ended}
        (run / "submissions/1.json").write_text(json.dumps(said))


def make_clients(folder: Path, shared_root: Path, count: int) -> Path:
    """squeue and sacct that answer for those runs at once, and put each call down in `calls`; their folder."""
    folder.mkdir()
    values = {"start": "1800000000", "StartTime": "1800000000", "NumNodes": "2", "NNodes": "2", "NodeList": "n[1-2]"}
    for client, fields, kinds, state in (
        ("squeue", SQUEUE_FIELDS, (7, 8), "RUNNING"),
        ("sacct", SACCT_FIELDS, (9,), "FAILED"),
    ):
        lines = []
        for number in range(1, count + 1):
            if number % 10 in kinds:
                where = {"JobID": str(number), "State": state, "WorkDir": f"{shared_root}/runs/run_{number:04}"}
                row = [{**values, **where}.get(field, "") for field in fields]
                lines.append("|".join(row) + ("|" if client == "squeue" else ""))
        (folder / f"{client}.txt").write_text("".join(f"{line}\n" for line in lines))
        script = f'#!/bin/sh\necho "{client} $*" >>{folder}/calls\nexec cat {folder}/{client}.txt\n'
        (folder / client).write_text(script)
        (folder / client).chmod(0o755)
    (folder / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (folder / "sbatch").chmod(0o755)
    return folder
