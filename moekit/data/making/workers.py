"""Worker processes that each turn one input file after the other into a part, and none of which outlives this one."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from moekit.data.making.parts import Part, Progress, Step
from moekit.data.plan import DataFolder, Plan
from moekit.problems import MoekitError, Problem, error

ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""A worker is one thread; else each would start one on every core of what may be a shared login node."""


@dataclass(frozen=True)
class Job:
    """One part to make."""

    task: int
    file: int
    """Which of the task's files."""


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[str]
    errors: IO[bytes]
    job: Job | None = None


def make_parts(
    folder: DataFolder, plan: Plan, jobs: Sequence[Job], workers: int, progress: Progress
) -> Iterator[tuple[Job, Part]]:
    """Make parts by several processes at once, and yield each when it is there.

    To be called by the main thread: the system ends the workers with the thread that started them.

    Raises:
        MoekitError: a file cannot be read or a part not written, or a worker was killed. The others are stopped.
    """
    pending = deque(jobs)
    said: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
    running = [_start(folder, said) for _ in range(min(workers, len(jobs)))]
    try:
        for worker in running:
            _give(worker, pending)
        while running:
            worker, answer = said.get()
            if answer is None:
                _check_end(worker, plan)
                running.remove(worker)
            elif "step" in answer:
                progress(Step(**answer["step"]))
            elif "problem" in answer:
                raise MoekitError(Problem(**answer["problem"]))
            else:
                job, worker.job = worker.job, None
                _give(worker, pending)
                assert job
                yield job, Part(**answer["part"])
    finally:
        for worker in running:
            worker.process.kill()
        for worker in running:
            worker.process.wait()


def _start(folder: DataFolder, said: queue.Queue[tuple[_Worker, dict[str, Any] | None]]) -> _Worker:
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the worker)
    process = subprocess.Popen(
        [sys.executable, "-m", "moekit.data.making.worker", str(folder.path), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ | ONE_THREAD,
        start_new_session=True,  # Ctrl-C is for this process, which stops them
    )
    worker = _Worker(process, errors)

    def listen() -> None:
        assert process.stdout
        with contextlib.suppress(ValueError):  # a line that was cut off by a kill
            for line in process.stdout:
                said.put((worker, json.loads(line)))
        said.put((worker, None))

    threading.Thread(target=listen, daemon=True).start()
    return worker


def _give(worker: _Worker, pending: deque[Job]) -> None:
    """Tell a worker its next job, or that there is none."""
    assert worker.process.stdin
    with contextlib.suppress(BrokenPipeError):  # it has ended; its output says so
        if pending:
            worker.job = pending.popleft()
            worker.process.stdin.write(json.dumps({"task": worker.job.task, "file": worker.job.file}) + "\n")
            worker.process.stdin.flush()
        else:
            worker.process.stdin.close()


def _check_end(worker: _Worker, plan: Plan) -> None:
    """A worker has ended: by itself when there was nothing left, or before it had done its job."""
    code = worker.process.wait()
    if code == 0 and worker.job is None:
        return
    path = plan.files_of(worker.job.task)[worker.job.file].path if worker.job else ""
    if code < 0:
        name = signal.Signals(-code).name
        what = f"the worker of this file was killed by {name}"
        memory = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
        hint = "give it more `memory_gib` or take fewer workers, and run the same again: it goes on where it was"
        raise error(what + memory, hint, path)
    worker.errors.seek(0)
    told = worker.errors.read().decode(errors="replace")
    raise RuntimeError(f"a worker failed on {path or 'no file'} ({code}):\n{told}")
