"""The processes of a local run: one launch at a time, torchrun and its workers, none of them left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from moekit.launch import guard
from moekit.problems import error

LOCK = ".lock"
"""In the run directory: locked, not merely there, while a launch or anything it started is running."""


@contextmanager
def only_launch(run_dir: Path) -> Iterator[int]:
    """Hold the run against other launches; the lock's descriptor, for the processes that must hold it too.

    The kernel lets go of it when the last of its holders is gone, however that one ends.

    Raises:
        MoekitError: another launch of the run is going on.
    """
    with (run_dir / LOCK).open("a+") as file:
        deadline = time.monotonic() + 2 * guard.GRACE_S
        while not _taken(file):
            file.seek(0)
            pid = file.read().strip()
            # A launch that was killed leaves a guard, which holds the lock until it has stopped everything.
            if Path("/proc", pid or "0").exists() or time.monotonic() > deadline:
                what = f"run `{run_dir.name}` is being launched already, by process {pid}"
                raise error(what, "wait for it, or give this one a name of its own: `--name`", str(run_dir))
            time.sleep(0.2)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def torchrun(processes: int) -> list[str]:
    """torchrun on this machine alone; the program's words follow.

    `--standalone` takes a free port by holding it, so that no other process can get between. The address is the
    loopback's, since a laptop's own name may mean nothing to it.
    """
    where = ["--standalone", "--local-addr=127.0.0.1", "--nnodes=1", f"--nproc-per-node={processes}"]
    return [sys.executable, "-m", "torch.distributed.run", *where, "--max-restarts=0"]


def environment(
    device: str,
    processes: int,
    attempt: int,
    job: Mapping[str, str | None],
    recipe: Mapping[str, str | None],
    outer: Mapping[str, str],
) -> dict[str, str]:
    """The variables of the training processes: the launching shell's, ours over them, the recipe's over all.

    A PYTHONPATH of the shell's stays outside: a Megatron there would be trained in place of the installed one.
    """
    cores = len(os.sched_getaffinity(0))
    ours = {
        "MOEKIT_ATTEMPT": str(attempt),
        "MOEKIT_DEVICE": device,
        "OMP_NUM_THREADS": str(max(1, cores // processes)),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",  # data and tokenizer are on disk
        "TOKENIZERS_PARALLELISM": "false",  # else it warns at every fork
        "PYTHONPATH": "job",
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        ours["CUDA_VISIBLE_DEVICES"] = ""
    inherited = {name: value for name, value in outer.items() if not name.startswith("MOEKIT_")}
    merged: dict[str, str | None] = {**inherited, **ours, **job, **recipe}
    return {name: value for name, value in merged.items() if value is not None}


@contextmanager
def guarded(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], output: Path, lock: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends, and nothing of it any longer; its output is added to a file."""
    with output.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, *command],
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is the launch's, which then ends this in order
        )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        while process.returncode is None:
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C makes nothing faster
                process.wait()


def visible_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that a training process would see; no driver is asked."""
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return len(devices)
    return min(len(devices), len([word for word in chosen.split(",") if word.strip() not in ("", "-1")]))
