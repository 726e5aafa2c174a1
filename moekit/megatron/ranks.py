"""Real training processes as copies of one that has Megatron imported: torchrun's work without its seconds of start-up.

Each copy is one rank and runs `job/entry.py` of the run directory, as it would under torchrun; they find each other on
the loopback and exchange over gloo. Line numbers are megatron-core 0.19.2's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from moekit.lifeline import die_with_parent
from moekit.megatron import step
from moekit.megatron.forks import in_forks
from moekit.megatron.verdict import Verdict, refusal

LIMIT_S = 120.0
GRACE_S = 15.0
"""Between the end of the first rank and of the last: what is left to write of a checkpoint."""

_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""In gloo's words of a rank that misses another: never a cause."""


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    run: str
    """The run directory, with `job/` in it."""
    attempt: str
    """Its folder, below the run directory."""
    argv: Sequence[str]
    """Megatron's arguments."""
    environment: Mapping[str, str]
    """All variables of the training processes, as torchrun would be given them."""


@dataclass(frozen=True)
class Training:
    """Starts to be made one after the other, each where those before it went well."""

    starts: Sequence[Start]
    processes: int


def answer(training: Training) -> list[dict[str, Any]]:
    """A verdict of stage `train` on each start, the last one that is made being the first that does not pass."""
    step.prepare()
    verdicts = []
    for start in training.starts:
        began = time.monotonic()
        verdict = _train(start, training.processes)
        verdicts.append(replace(verdict, seconds=time.monotonic() - began))
        if verdicts[-1].answer != "passed":
            break
    return [asdict(verdict) for verdict in verdicts]


def _train(start: Start, processes: int) -> Verdict:
    with socket.socket() as held:
        # Bound and not listening: nobody else is given this port, and rank 0's store may listen on it all the same.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]

        def works(rank: int) -> Any:
            return lambda: _rank(start, rank, processes, port)

        ended = in_forks([works(rank) for rank in range(processes)], LIMIT_S, GRACE_S)
    found = [Verdict(**values[0]) for values, _ in ended if values]
    if refused := [verdict for verdict in found if verdict.answer != "passed"]:
        causes = [verdict for verdict in refused if not any(words in verdict.message for words in _PEER_LOST)]
        return (causes or refused)[0]
    for rank, (_, why) in enumerate(ended):
        if why:
            what = f"it does not end in {LIMIT_S:.0f} s" if why == "time" else f"its process ends with {why}"
            return Verdict("train", "not_judged", f"rank {rank}: {what}", feature=why.split()[0])
    return found[0]


def _rank(start: Start, rank: int, processes: int, port: int) -> Iterator[dict[str, Any]]:
    """Be this rank, and say how it ended."""
    os.chdir(start.run)
    log = os.open(Path(start.attempt, "train.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(start.environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes), GROUP_RANK="0")
    with _queue_by_fork():
        verdict = _run(Path(start.run, "job", "entry.py").absolute(), start.argv)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    yield asdict(verdict)


def _run(entry: Path, argv: Sequence[str]) -> Verdict:
    sys.argv = [str(entry), *argv]
    sys.path.insert(0, str(entry.parent))
    try:
        runpy.run_path(str(entry), run_name="__main__")
    except SystemExit as end:
        return refusal("train", end, "") if end.code else Verdict("train", "passed")
    except Exception as problem:
        return step.answer_to("train", problem)
    return Verdict("train", "passed")


@contextlib.contextmanager
def _queue_by_fork() -> Iterator[None]:
    """Fork the process of the queue through which a checkpoint's writers report: spawned, it imports torch anew.

    core/dist_checkpointing/strategies/filesystem_async.py:64
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Linux's abstract name: that of a file in a long TMPDIR does not fit a socket's address.
    manager = SyncManager(f"\0moekit-{os.getpid()}-{uuid.uuid4().hex}", ctx=multiprocessing.get_context("fork"))
    manager.start(die_with_parent)
    with manager:
        filesystem_async._results_queue = manager.Queue()
        yield
