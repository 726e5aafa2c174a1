"""Tokenizes a data set on this machine, all its shards, and says what came of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from moekit.data.dataset import Dataset
from moekit.data.locking import locked
from moekit.data.making.progress import shown
from moekit.data.making.shards import find_shard, make_shards
from moekit.data.plan import DataFolder, Plan, ShardRecord
from moekit.data.planning import folder_of, make_plan, settle_plan


class Stopped(KeyboardInterrupt):
    """A signal that asks this process to end; nothing but the command may catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise `Stopped`, so that what is running is ended in order."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Tokenized:
    """A data set whose shards are all there."""

    folder: DataFolder
    plan: Plan
    records: Sequence[ShardRecord]
    made: int
    """Shards that this call has made; the others were there."""
    tokens_made: int
    """In those."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """What a script needs."""
        sums = ("documents", "tokens", "rows", "empty", "not_kept")
        return {
            "name": self.plan.name,
            "folder": str(self.folder.path),
            "sample": self.plan.is_sample,
            "shards": len(self.records),
            "made": self.made,
            **{name: sum(getattr(record, name) for record in self.records) for name in sums},
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_made / self.seconds),
            "records": [asdict(record) for record in self.records],
        }


def tokenize_here(
    dataset: Dataset, shared_root: Path, limit: int | None = None, workers: int | None = None
) -> Tokenized:
    """Tokenize a data set, or finish what an earlier call has left; progress is shown on standard error.

    Args:
        dataset: its description.
        shared_root: holds `tokenizers/` and gets `data/<name>`.
        limit: documents of each file at most: a sample, in `data/<name>-sample`.
        workers: processes of one thread each; None: `cpus_per_task`, but no more than this machine has CPUs.

    Raises:
        MoekitError: as `make_plan`, `settle_plan` and `make_shards`, or another process is tokenizing there.
    """
    started = time.monotonic()
    folder = folder_of(shared_root, dataset.name, limit)
    plan = make_plan(dataset, shared_root, limit)
    workers = workers or min(dataset.cpus_per_task, len(os.sched_getaffinity(0)))
    with locked(folder, 0, plan.tasks):
        settle_plan(folder, plan)
        there = {task for task in range(plan.tasks) if find_shard(folder, plan, task)}
        with shown(sum(file.size_bytes for file in plan.files)) as progress:
            records = make_shards(folder, plan, range(plan.tasks), workers, progress)
    made = [record for record in records if record.task not in there]
    return Tokenized(folder, plan, records, len(made), sum(one.tokens for one in made), time.monotonic() - started)


def summary(done: Tokenized) -> str:
    """What came of it and what to do next, for a person."""
    said = done.as_json()
    was = "" if done.made else ", all there before"
    shards = f"{said['shards']} shard{'s' if said['shards'] != 1 else ''}"
    lines = [f"{done.plan.name}: {shards}, {said['documents']:,} documents, {said['tokens']:,} tokens{was}"]
    if done.made:
        some = "" if done.made == len(done.records) else f"; {done.made} of the shards"
        lines.append(f"  speed       {said['tokens_per_second']:,} tokens/s in {done.seconds:,.0f} s{some}")
    left = [f"{said['empty']:,} without text"] if said["empty"] else []
    left += [f"{said['not_kept']:,} by `keep_fraction`"] if said["not_kept"] else []
    if left:
        lines.append(f"  left out    {', '.join(left)}, of {said['rows']:,} rows")
    lines.append(f"  directory   {done.folder.path}")
    if done.plan.is_sample:
        lines.append(f"  next        moekit data look {done.plan.name}; a sample is not trained on")
    else:
        lines.append(f"  next        moekit data manifest {done.plan.name}")
    return "\n".join(lines)
