"""Runs nccl-tests through srun, on all nodes, on each alone, or on pairs at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .nccl_tests import Measured, read_perf

SIZE_BYTES = 8 << 30
"""Of each rank's buffer (handbook 2.1)."""
ARGUMENTS = ("-b", "8G", "-e", "8G", "-g", "1", "-c", "1", "-n", "20")
AT_ONCE = 32
"""So many runs at the same time: each has an srun on the first node."""
TIMEOUT_S = 900.0
_PROGRAMS = {"alltoall": "alltoall_perf", "allreduce": "all_reduce_perf"}


@dataclass(frozen=True)
class Asked:
    """One run that is wanted."""

    collective: str
    """`alltoall` or `allreduce`."""
    nodes: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables tried on top of the profile's."""


class Measurer:
    """Measures in one allocation, and keeps what each run printed in `folder`."""

    def __init__(self, folder: Path, profile: Mapping[str, Any]) -> None:
        self._folder = folder
        self._profile = profile
        self._number = 0

    def program(self, collective: str) -> str:
        """The path of a collective's program: nccl-tests builds them into one folder."""
        given = str(self._profile["nccl_tests"])
        return given if collective == "alltoall" else str(Path(given).with_name(_PROGRAMS[collective]))

    def measure(self, asked: Sequence[Asked]) -> list[tuple[Measured, Path]]:
        """Run them at the same time, on nodes that none shares; what each measured, and where what it printed lies."""
        self._folder.mkdir(parents=True, exist_ok=True)
        parts = [asked[at : at + AT_ONCE] for at in range(0, len(asked), AT_ONCE)]
        return [one for part in parts for one in self._at_once(part)]

    def _at_once(self, asked: Sequence[Asked]) -> list[tuple[Measured, Path]]:
        logs = [self._log(one) for one in asked]
        running = [self._start(one, log) for one, log in zip(asked, logs)]  # noqa: B905
        deadline = time.monotonic() + TIMEOUT_S
        codes = [_wait(process, deadline) for process in running]
        return [self._read(one, log, code) for one, log, code in zip(asked, logs, codes)]  # noqa: B905

    def _log(self, asked: Asked) -> Path:
        self._number += 1
        few = "-".join(asked.nodes[:2]) + (f"-and-{len(asked.nodes) - 2}" if len(asked.nodes) > 2 else "")
        return self._folder / f"{self._number:03}.{asked.collective}.{few}.log"

    def _start(self, asked: Asked, log: Path) -> subprocess.Popen[bytes]:
        gpus = int(self._profile["gpus_per_node"])
        words = [
            "srun",
            f"--nodes={len(asked.nodes)}",
            f"--nodelist={','.join(asked.nodes)}",
            f"--ntasks={len(asked.nodes) * gpus}",
            f"--ntasks-per-node={gpus}",
            *self._profile["srun"],
            "bash",
            "preflight.sh",
            "collective",
            self.program(asked.collective),
            *ARGUMENTS,
        ]
        if any(word.startswith("--container-image=") for word in words):
            words.insert(words.index("bash"), f"--container-workdir={Path.cwd()}")
        env = {**os.environ, **{f"MOEKIT_TRY_{name}": value for name, value in asked.settings.items()}}
        if self._profile["library_path"]:
            env["MOEKIT_PREFLIGHT_LIBRARY_PATH"] = self._profile["library_path"]
        with log.open("wb") as out:
            return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)

    def _read(self, asked: Asked, log: Path, code: int) -> tuple[Measured, Path]:
        text = log.read_text(errors="replace")
        if code == -signal.SIGKILL:
            return Measured(problem=f"it did not end within {TIMEOUT_S:.0f} s"), log
        return read_perf(text, SIZE_BYTES, asked.nodes, int(self._profile["gpus_per_node"]), code), log


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int:
    """The exit code of an srun; one that takes too long is ended, first so that it can end its tasks."""
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return -signal.SIGKILL
