"""One element of a data set's array: makes one shard, or finishes what an earlier start of it has left.

    python -m moekit.data.array.task FOLDER WORKERS SHARD

Its output is the element's log. Told to end, by a time limit or a person, it stops its workers and keeps what is
finished. The exit code is 0 for a whole shard, 1 for a problem, 128 + the signal's number after one.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from moekit.data.making.here import Stopped, stoppable
from moekit.data.making.parts import find_part, part_prefix
from moekit.data.making.progress import shown
from moekit.data.making.shards import make_shard
from moekit.data.places import load_plan
from moekit.data.plan import DataFolder, Plan
from moekit.problems import MoekitError, error, print_problems


def main(folder: DataFolder, workers: int, task: int) -> int:
    """Make a shard; the exit code."""
    try:
        plan = load_plan(folder)
        if plan is None or task >= plan.tasks:
            raise error(f"there is no shard {task} in the plan of this folder", "submit anew", str(folder.path))
        files = plan.files_of(task)
        try:
            with stoppable(), shown(sum(file.size_bytes for file in files)) as progress:
                record = make_shard(folder, plan, task, workers, progress)
        except Stopped as stopped:
            print(f"ended by {signal.Signals(stopped.number).name}: {_kept(folder, plan, task)}", flush=True)
            return 128 + stopped.number
    except MoekitError as refused:
        print_problems(refused.problems, sys.stdout)
        return 1
    print(f"whole: {record.documents:,} documents, {record.tokens:,} tokens", flush=True)
    return 0


def _kept(folder: DataFolder, plan: Plan, task: int) -> str:
    files = plan.files_of(task)
    done = sum(find_part(part_prefix(folder, task, number)) is not None for number in range(len(files)))
    return f"{done} of {len(files)} files are done and kept, the next start goes on"


if __name__ == "__main__":
    sys.exit(main(DataFolder(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])))
